// The tile scheduler of a persistent grid: groups whose sizes only the device knows.
//
// A group of `size` rows is divided into the fewest M tiles that TILE_M allows. Their height is a
// multiple of HEIGHTS, and equal or nearly so. A work tile is an M tile and one of `n_tiles` N
// tiles. Block b takes work tiles b, b + blocks, ..., by `go_to_turn` every other turn in reverse;
// if the blocks of a cluster share work tiles, the cluster takes them that way. If MOST_PARTS is
// more than 1 and no other kernel runs at the same time, waves.cuh distributes the work tiles
// instead. Groups with the highest M tiles come first, so that small work tiles are left for the
// end. A group's M tiles are divided into rotations: a few M tiles with all N tiles. The blocks
// that run at a time then read about as many bytes of weights as of activations, which minimizes
// the sum.
//
// Next to a concurrent small-M kernel, which has the groups with fewer rows, only so few blocks are
// active that they finish in about half of its time: the small-M kernel needs nearly all
// multiprocessors to read weights at the full speed of memory. While it reads the weights of
// GROUPS_READ_PER_TWO_TILES groups, a block computes two M tiles with all N tiles. This number is a
// fact of the GPU, from arch.py.
//
// Work tiles of a group take equally long, even though the last M tile may be lower and the last N
// tile narrower. So blocks stay in step along K, and what one reads from memory, the others find in
// the cache. (Otherwise a product with K = 14,336 read 2.4 times as much.)
#pragma once

#include "ragged.cuh"
#include "waves.cuh"

namespace {

struct alignas(16) WorkTile {
    MTile m_tile;
    i32 tile_m, n_tile;  // tile_m: height of the M tile, a multiple of 8
    u32 consumers;       // a bit for each consumer that computes it

    __device__ __forceinline__ bool there() const { return m_tile.group >= 0; }
};

constexpr i32 NO_WORK_TILE = 1 << 30;  // the number of an idle block, past the last tile

// HEIGHTS: what heights of M tiles are multiples of. EQUAL: whether those of a group are all as
// high; else the last of them are lower by HEIGHTS, which covers fewer rows that are not there.
template <int GROUPS, int TILE_M, i32 GROUPS_READ_PER_TWO_TILES, int CLUSTER = 1,
          int MOST_PARTS = 1, int HEIGHTS = 8, bool EQUAL = true>
class TileScheduler {
  public:
    // Called by all threads of a block; `scratch` has room for 4 (GROUPS + 1) numbers.
    template <class Ends>
    __device__ void build(Ends ends, i32 rows, i32 n_tiles, const SizeClass& size_class, i64* error,
                          i32* scratch) {
        if (threadIdx.x == 0) n_tiles_ = n_tiles, active_blocks_ = gridDim.x / CLUSTER;
        int2* group = reinterpret_cast<int2*>(scratch);  // what it is sorted by, and its work tiles
        i32 *place = scratch + 2 * (GROUPS + 1), *upto = place + GROUPS + 1;
        m_tiles_.build(ends, rows, size_class, error);
        if (m_tiles_.before[GROUPS + 1] == 0) {  // other kernels have it all
            if (threadIdx.x == 0) end_ = 0, by_turns_ = false, waves_ = Waves::plain(0);
            __syncthreads();
            return;
        }
        if (size_class.with_small_m) limit_blocks(size_class.above_rows);
        for (i32 g = threadIdx.x; g <= GROUPS; g += blockDim.x) {
            group[g] = {g < GROUPS ? tile_m_of(g) * (GROUPS + 1) + GROUPS - g : 0,
                        m_tiles_of(g) * n_tiles};  // rows of no group come last
            place[g] = upto[g] = 0;
        }
        __syncthreads();
        for (i32 i = threadIdx.x; i < PARTS * SIDE; i += blockDim.x)
            if (i % SIDE <= GROUPS) count(group, i % SIDE, i / SIDE, place, upto);
        __syncthreads();
        for (i32 g = threadIdx.x; g <= GROUPS; g += blockDim.x)
            group_of_place_[place[g]] = g, work_tiles_upto_[place[g]] = upto[g] + group[g].y,
            tile_m_[place[g]] = tile_m_of(g);
        if (threadIdx.x == 0) {
            by_turns_ = MOST_PARTS > 1 && !size_class.concurrent_with_next &&
                        !size_class.concurrent_with_previous;
            waves_ = by_turns_ ? Waves::of(upto[GROUPS], active_blocks_, MOST_PARTS)
                               : Waves::plain(upto[GROUPS]);
            end_ = waves_.end + group[GROUPS].y;
        }
        __syncthreads();
    }

    // Goes through the work tiles of this block.
    class WorkTiles {
      public:
        __device__ explicit WorkTiles(const TileScheduler& scheduler)
            : scheduler_(scheduler),
              mine_(i32(blockIdx.x) / CLUSTER, scheduler.active_blocks_,
                    MOST_PARTS > 1 && scheduler.by_turns_) {
            if (mine_.number >= scheduler.active_blocks_) mine_.number = NO_WORK_TILE;
            first_ = mine_.number;
        }

        __device__ bool first() const { return mine_.number == first_; }
        __device__ bool more() const { return mine_.number < scheduler_.end_; }
        __device__ bool more_grouped() const {
            return mine_.number < scheduler_.waves_.end;
        }  // rows of no group come last
        __device__ void advance() {
            if (MOST_PARTS > 1)
                mine_.advance(scheduler_.active_blocks_);
            else
                mine_.number += scheduler_.active_blocks_;
        }
        __device__ void go_to(i32 number) { mine_.number = number; }
        // The turn-th of those of a block without parts. The highest tiles come first: in every
        // other turn blocks take them in reverse, and so have as many rows in the end.
        __device__ void go_to_turn(i32 turn) {
            const i32 blocks = scheduler_.active_blocks_;
            mine_.number =
                turn * blocks + (turn % 2 && first_ < blocks ? blocks - 1 - first_ : first_);
        }

        // Called by a whole warp.
        __device__ WorkTile current() const {
            const auto [number, consumers] = MOST_PARTS > 1 ? scheduler_.waves_.find(mine_.number)
                                                            : PartOfTile{mine_.number, ~0u};
            i32 place = 0;  // of the first group whose work tiles end after `number`
#pragma unroll
            for (i32 i = 0; i <= GROUPS; i += 32) {
                const i32 other = i + i32(threadIdx.x % 32);
                place += __popc(__ballot_sync(
                    WHOLE_WARP, other < GROUPS && scheduler_.work_tiles_upto_[other] <= number));
            }
            const i32 g = scheduler_.group_of_place_[place], m_tiles = scheduler_.m_tiles_of(g),
                      tile_m = scheduler_.tile_m_[place];
            const i32 within = number - (place == 0 ? 0 : scheduler_.work_tiles_upto_[place - 1]);
            const i32 rotations = (m_tiles + ROTATION - 1) / ROTATION,
                      each = (m_tiles + rotations - 1) / rotations;
            const i32 per_rotation = each * scheduler_.n_tiles_;
            const i32 rotation = within / per_rotation, rest = within % per_rotation,
                      in_rotation = min(each, m_tiles - rotation * each);
            const i32 m_tile = rotation * each + rest % in_rotation;
            i32 first = scheduler_.m_tiles_.first[g] + m_tile * tile_m, height = tile_m;
            if constexpr (!EQUAL) {
                const i32 after_high = m_tile - scheduler_.high_tiles_of(g, tile_m);
                if (after_high >= 0) first -= after_high * HEIGHTS, height -= HEIGHTS;
            }
            return {{g, first, min(first + height, scheduler_.m_tiles_.first[g + 1])},
                    height,
                    rest / in_rotation,
                    consumers};
        }

      private:
        const TileScheduler& scheduler_;
        InWaves mine_;
        i32 first_;
    };

  private:
    static constexpr i32 ROTATION = 8;  // the most M tiles of a rotation
    static constexpr i32 SIDE = (GROUPS + 32) / 32 * 32,
                         PARTS = SIDE > 256   ? 2
                                 : SIDE > 128 ? 4
                                              : 8,
                         PART = (GROUPS + PARTS) / PARTS;

    // Decides how many blocks are active.
    __device__ void limit_blocks(i32 rows_of_others) {
        i32 low = 0;
        for (i32 first = 0; first < GROUPS; first += blockDim.x) {
            const i32 g = first + threadIdx.x,
                      size = g < GROUPS ? m_tiles_.first[g + 1] - m_tiles_.first[g] : 0;
            low += __syncthreads_count(size > 0 && size <= rows_of_others);
        }
        if (threadIdx.x == 0 && low > 0)
            active_blocks_ = max(
                1, min(active_blocks_, GROUPS_READ_PER_TWO_TILES * m_tiles_.before[GROUPS] / low));
    }

    // Counts the groups of one part that come before group g, and their work tiles, and adds both
    // to g's totals. The threads of a warp read the same group at a time.
    __device__ static void count(const int2* group, i32 g, i32 part, i32* place, i32* upto) {
        const i32 mine = group[g].x;
        i32 groups = 0, work_tiles = 0;
#pragma unroll 4
        for (i32 other = part * PART; other < min(part * PART + PART, GROUPS + 1); ++other) {
            const int2 it = group[other];
            groups += it.x > mine ? 1 : 0;
            work_tiles += it.x > mine ? it.y : 0;
        }
        atomicAdd(place + g, groups), atomicAdd(upto + g, work_tiles);
    }

    __device__ i32 m_tiles_of(i32 g) const { return m_tiles_.before[g + 1] - m_tiles_.before[g]; }

    __device__ i32 tile_m_of(i32 g) const {
        const i32 size = m_tiles_.first[g + 1] - m_tiles_.first[g], m_tiles = m_tiles_of(g);
        return m_tiles == 0 ? 0 : (size + HEIGHTS * m_tiles - 1) / (HEIGHTS * m_tiles) * HEIGHTS;
    }

    // How many of a group's M tiles are tile_m high, as all would be if they were equal.
    __device__ i32 high_tiles_of(i32 g, i32 tile_m) const {
        const i32 size = m_tiles_.first[g + 1] - m_tiles_.first[g];
        return (size + HEIGHTS - 1) / HEIGHTS - m_tiles_of(g) * (tile_m / HEIGHTS - 1);
    }

    MTiles<GROUPS, TILE_M> m_tiles_;
    i32 n_tiles_, active_blocks_;  // N tiles of a result; blocks (or clusters) that take work: the
                                   // others leave room for a concurrent small-M kernel
    i32 end_;                      // the number after the last work tile's
    bool by_turns_;
    Waves waves_;
    // By place in the order of work: the group, the work tiles up to and with it, the height of its
    // M tiles.
    i32 group_of_place_[GROUPS + 1], work_tiles_upto_[GROUPS + 1], tile_m_[GROUPS + 1];
};

}  // namespace
