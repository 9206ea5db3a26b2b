// Large-M grouped products for GPUs without wgmma, by mma.sync. Work tiles are those of
// large_m.cuh: the matrix is on the side of mma's 16 rows, the activations on that of its 8
// columns.
//
// All warps of a team copy (copy_ring.cuh) and multiply. A warp has 16 * REPEATS rows of the
// matrix and all rows of the work tile. So weights are dequantized once, and stay in registers for
// all of these rows; activations are read from shared memory by every warp, for REPEATS products at
// a time. A block has two teams of one consumer: one multiplies while the other stores, or waits
// for the first copies of a work tile. They take the block's work tiles in turn, whoever is done
// first: warps of one are often preferred, and its team would else be done long before the other.
//
// A K block is two halves, of 32 k each. Fragments of one are made while the other team multiplies:
// a second set of them would take registers from rows, and lost 4 % beside it. The packed weights
// of the next K block are loaded before the second half is multiplied, so it has to be there by
// then.
//
// Rows are row-major. Lane 4 r + c has the 16 columns of a tile from 16 c on (reader.cuh), which
// are 32 bytes of a row: two loads that need no ldmatrix, and registers that follow each other for
// two products. The half h of a K block has the h-th eight of every 16 columns. Two fragments of it
// are made of half h of all words of codes. ROW_ORDER: of both halves of words 2 h and 2 h + 1,
// which is the order of SmallM's and LargeM's products. A dgrad contracts columns in their order,
// by ldmatrix.
#pragma once

#include "copy_ring.cuh"
#include "large_m_tile.cuh"
#include "mma.cuh"
#include "timeline.cuh"

namespace {

template <class Segment, int TILE_M, int CONSUMERS, int REPEATS, bool ROW_ORDER>
struct LargeMma : LargeMTile<Segment, TILE_M, CONSUMERS, REPEATS, 1, 128 * CONSUMERS, true, false> {
    static constexpr int TEAM_THREADS = 128 * CONSUMERS, TEAMS = 256 / TEAM_THREADS;
    using Tile = LargeMTile<Segment, TILE_M, CONSUMERS, REPEATS, 1, TEAM_THREADS, true, false>;
    using Tile::ALL_K_BLOCKS, Tile::N_TILES, Tile::REPEATS_PER_RESULT, Tile::WARPGROUP_WARPS,
        Tile::repeat_of, Tile::weight_tile_of;
    using typename Tile::Packed, typename Tile::RepeatWeights, typename Tile::Scales,
        typename Tile::SharedWeights, typename Tile::Tiles, typename Tile::Transpose,
        typename Tile::Weights;
    static constexpr int RUNS = Scales::COUNT, RUN_K_BLOCKS = ALL_K_BLOCKS / RUNS;
    static constexpr int HEIGHTS = 8;  // of M tiles: there is a loop for each height
    static constexpr int ROWS_PER_STEP = TEAM_THREADS / (TILE_ROW_BYTES / 16);  // of copies
    static_assert(TILE_M % ROWS_PER_STEP == 0, "whole steps of copies");
    static_assert(ALL_K_BLOCKS % RUNS == 0, "whole runs");

    struct alignas(128) Stage {
        u8 activations[TILE_M * TILE_ROW_BYTES];
        RepeatWeights weights[CONSUMERS * REPEATS];
    };
    using TileScheduler = ::TileScheduler<Segment::GROUPS, TILE_M,
                                          Segment::GROUPS_READ_PER_TWO_TILES, 1, 1, HEIGHTS, false>;
    using WorkTiles = typename TileScheduler::WorkTiles;
    using Team = ::Team<TEAMS, TEAM_THREADS>;  // the threads that compute a work tile
    struct Turns {
        i32 taken, of_team[TEAMS];
    };
    static constexpr int FIT =
        (Segment::MAX_SHARED_BYTES - int(sizeof(TileScheduler) + sizeof(Turns))) /
        int(TEAMS * sizeof(Stage));
    static constexpr int STAGES = FIT < 6 ? FIT : 6;
    using Ring = CopyRing<STAGES, 2, Team>;

    struct Shared {
        Stage stage[TEAMS][STAGES];
        TileScheduler scheduler;
        Turns turns;

        __device__ __forceinline__ Stage* stages() { return stage[Team::number()]; }
    };
    static_assert(sizeof(Shared) <= Segment::MAX_SHARED_BYTES &&
                  4 * sizeof(i32) * (Segment::GROUPS + 1) <= sizeof(Stage) * TEAMS * STAGES);

    __device__ static void run(const Segment& s, const SizeClass& size_class) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        if (threadIdx.x == 0) shared.turns.taken = TEAMS;
        if (!size_class.reads_before_wait) griddepcontrol_wait();
        shared.scheduler.build(s.partition(), i32(s.rows()), N_TILES, size_class,
                               blockIdx.x == 0 ? s.error : nullptr,
                               reinterpret_cast<i32*>(shared.stage));
        if (size_class.reads_before_wait && !size_class.concurrent_with_previous)
            griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        WorkTiles work(shared.scheduler);
        for (work.go_to_turn(Team::number()); work.more(); work.go_to_turn(next(shared.turns))) {
            if (!work.more_grouped()) {
                Tile::store_ungrouped_rows(s, work.current(), Team::thread());
                continue;
            }
            mark_tile(Team::thread() == 0, false);
            float sum[REPEATS][TILE_M / 2];
            multiply(s, shared, work.current(), sum);
            store(s, shared, work.current(), sum);  // found again: registers are short meanwhile
            mark_tile(Team::thread() == 0, true);
        }
        if (size_class.concurrent_with_previous && blockIdx.x == gridDim.x - 1)
            griddepcontrol_wait();
    }

  private:
    using Fragments = u32[REPEATS][2][4];  // of half a K block

    // Takes the team's next turn, once all of it have stored their results.
    __device__ static __forceinline__ i32 next(Turns& turns) {
        Team::sync();
        if (Team::thread() == 0) turns.of_team[Team::number()] = atomicAdd(&turns.taken, 1);
        Team::sync();
        return turns.of_team[Team::number()];
    }

    __device__ static __forceinline__ void multiply(const Segment& s, Shared& shared,
                                                    const WorkTile& work_tile,
                                                    float (&sum)[REPEATS][TILE_M / 2]) {
        const Scales scales(s, work_tile.m_tile.group);
        Mainloop(s, shared, work_tile, scales).template run<HEIGHTS>(sum, work_tile.tile_m);
    }

    // Where a consumer transposes its results.
    struct Buffers {
        u8* first;
        __device__ __forceinline__ u8* epilogue_buffer(int i) const {
            return first + i * Transpose::BUFFER_BYTES;
        }
    };

    __device__ static __forceinline__ void store(const Segment& s, Shared& shared,
                                                 const WorkTile& work_tile,
                                                 float (&sum)[REPEATS][TILE_M / 2]) {
        constexpr int BUFFERS = 2;
        static_assert(CONSUMERS * BUFFERS * Transpose::BUFFER_BYTES <= sizeof(shared.stage[0]),
                      "results are transposed where the stages were");
        const Scales scales(s, work_tile.m_tile.group);
        const Buffers buffers{reinterpret_cast<u8*>(shared.stages()) +
                              Team::thread() / 128 * (BUFFERS * Transpose::BUFFER_BYTES)};
#pragma unroll
        for (int h = 0; h < REPEATS; h += REPEATS_PER_RESULT) {
            float outer[REPEATS_PER_RESULT][2];
#pragma unroll
            for (int i = 0; i < REPEATS_PER_RESULT; ++i)
                scales.of_lane(outer[i], work_tile.n_tile, weight_tile_of(h + i), threadIdx.x % 32);
            Tile::template store<BUFFERS>(sum + h, outer, s, buffers, work_tile, h);
        }
    }

    // The activations of a work tile. A thread copies 16 bytes of every ROWS_PER_STEP-th row.
    struct Activations {
        const u8* first;
        i32 row[TILE_M / ROWS_PER_STEP];  // how many times 16 bytes after the first

        __device__ __forceinline__ Activations(const Segment& s, const WorkTile& work_tile) {
            constexpr i32 PIECES = TILE_ROW_BYTES / 16;
            const i32 mine = Team::thread() / PIECES, piece = threadIdx.x % PIECES;
            first = reinterpret_cast<const u8*>(s.row(work_tile.m_tile.first)) + 16 * piece;
#pragma unroll
            for (int i = 0; i < TILE_M / ROWS_PER_STEP; ++i) {
                // accumulators past the end are not stored
                const i32 m = min(work_tile.m_tile.first + mine + ROWS_PER_STEP * i,
                                  work_tile.m_tile.end - 1);
                row[i] = i32((reinterpret_cast<const u8*>(s.row(m)) + 16 * piece - first) / 16);
            }
        }

        template <int Height>
        __device__ __forceinline__ void copy(u8* to, i32 kb, bool good) const {
            constexpr i32 PIECES = TILE_ROW_BYTES / 16;
            const u32 place =
                shared_address(to) + swizzled(Team::thread() / PIECES, threadIdx.x % PIECES);
            const u8* from = first + kb * i32(TILE_ROW_BYTES);
#pragma unroll
            for (int i = 0; i * ROWS_PER_STEP < Height; ++i)
                cp_async_16(place + i * ROWS_PER_STEP * TILE_ROW_BYTES, from + i64(row[i]) * 16,
                            good);
        }
    };

    struct Mainloop {
        Stage* const stages;
        Weights weights;
        const Activations rows;
        const Scales& scales;
        const SharedWeights mine;  // of the weights of a repeat
        const u32 first;           // where a lane's rows of a stage's first half begin
        Ring ring;

        __device__ __forceinline__ Mainloop(const Segment& s, Shared& shared,
                                            const WorkTile& work_tile, const Scales& scales)
            : stages(shared.stages()),
              rows(s, work_tile),
              scales(scales),
              mine(Tiles::shared(repeat_of(0) * sizeof(RepeatWeights),
                                 repeat_of(0) * sizeof(RepeatWeights),
                                 threadIdx.x / 32 % WARPGROUP_WARPS, threadIdx.x % 32)),
              first(first_piece(threadIdx.x % 32)) {
            weights.open(s, work_tile, Team::thread());
        }

        // By the loop for the height of the work tile.
        template <int Height>
        __device__ __forceinline__ void run(float (&sum)[REPEATS][TILE_M / 2], i32 tile_m) {
            if constexpr (Height < TILE_M) {
                if (tile_m > Height) return run<Height + HEIGHTS>(sum, tile_m);
            }
            zero<0, Height>(sum);
            Fragments fragments;
            Packed packed[REPEATS];
            const auto copy = [&](i32 stage, i32 kb) {
                this->template copy<Height>(stages[stage], kb);
            };
            ring.begin(copy);
            ring.next(copy);
            u32 activations = load(packed);
#pragma unroll 1
            for (int run = 0; run < RUNS; ++run) {
#pragma unroll 1
                for (i32 kb = 0; kb < RUN_K_BLOCKS; ++kb) {
                    make(fragments, packed, 0);
                    multiply<Height>(sum, fragments, activations);
                    make(fragments, packed, 1);
                    const u32 other_half = activations ^ HALF;
                    ring.next(copy);  // past the last K block there is nothing, and nothing uses it
                    activations = load(packed);
                    multiply<Height>(sum, fragments, other_half);
                }
                if (run + 1 < RUNS) Tile::template rescale<Height>(sum, scales.factor(run));
            }
            Team::sync();  // results are transposed where others have read
            zero<Height, TILE_M>(sum);
        }

      private:
        template <int First, int End>
        __device__ static __forceinline__ void zero(float (&sum)[REPEATS][TILE_M / 2]) {
#pragma unroll
            for (int h = 0; h < REPEATS; ++h)
#pragma unroll
                for (int i = First / 2; i < End / 2; ++i) sum[h][i] = 0;
        }

        // What differs between a lane's addresses in the halves of a K block.
        static constexpr u32 HALF = Segment::DGRAD ? 64 : ROW_ORDER ? 8 : 16;

        __device__ static __forceinline__ u32 first_piece(u32 lane) {
            return Segment::DGRAD ? swizzled(lane % 8, lane / 8) : swizzled(lane / 4, lane % 4 * 2);
        }

        template <int Height>
        __device__ __forceinline__ void copy(Stage& to, i32 kb) const {
            const i32 at =
                RUNS == 1 ? kb : scales.first_k_block(kb / RUN_K_BLOCKS) + kb % RUN_K_BLOCKS;
            const bool good = kb < ALL_K_BLOCKS;  // a branch would keep products from the copies
            weights.template copy<1>(to.weights, Team::thread(), at, good);
            rows.template copy<Height>(to.activations, at, good);
        }

        // Loads what a lane has of the weights of the ring's stage; where its activations begin.
        __device__ __forceinline__ u32 load(Packed (&packed)[REPEATS]) const {
            const Stage& stage = stages[ring.stage()];
#pragma unroll
            for (int h = 0; h < REPEATS; ++h) {
                const RepeatWeights& from = stage.weights[h];
                packed[h] = mine.load(from.elements[0][0], from.first_scales(0));
            }
            return shared_address(stage.activations) + first;
        }

        __device__ static __forceinline__ void make(Fragments& fragments,
                                                    const Packed (&packed)[REPEATS], int half) {
#pragma unroll
            for (int h = 0; h < REPEATS; ++h)
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    u32(&a)[4] = fragments[h][step];
                    if constexpr (Segment::DGRAD || ROW_ORDER) {
                        SharedWeights::dequantize(packed[h], 2 * half + step, a);
                    } else {
                        u32 of_word[2][4];
#pragma unroll
                        for (int v = 0; v < 2; ++v) {
                            SharedWeights::dequantize(packed[h], 2 * step + v, of_word[v]);
                            a[2 * v] = of_word[v][2 * half],
                                  a[2 * v + 1] = of_word[v][2 * half + 1];
                        }
                    }
                }
        }

        // The pairs of eight rows that a lane multiplies by in both steps of half a K block.
        __device__ static __forceinline__ void load_pairs(u32 (&x)[4], u32 from) {
            if constexpr (Segment::DGRAD) {
                load_matrices(x, from);
            } else if constexpr (ROW_ORDER) {
                load_shared_8(x[0], x[2], from);
                load_shared_8(x[1], x[3], from ^ 16);
            } else {
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                             : "r"(from));
            }
        }

        __device__ static __forceinline__ void load_shared_8(u32& low, u32& high, u32 from) {
            asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(low), "=r"(high) : "r"(from));
        }

        // sum[h][4 t + i]: rows r and r + 8 of the warp's tile in a repeat, and rows 8 t + 2 c, 8 t
        // + 2 c + 1 of activations.
        template <int Height>
        __device__ static __forceinline__ void multiply(float (&sum)[REPEATS][TILE_M / 2],
                                                        const Fragments& fragments,
                                                        u32 activations) {
#pragma unroll
            for (int t = 0; t < Height / 8; ++t) {
                u32 x[4];
                load_pairs(x, activations + t * (8 * TILE_ROW_BYTES));
#pragma unroll
                for (int step = 0; step < 2; ++step)
#pragma unroll
                    for (int h = 0; h < REPEATS; ++h)
                        mma_16x8x16<typename Segment::Activation>(
                            reinterpret_cast<float (&)[4]>(sum[h][4 * t]), fragments[h][step],
                            x[2 * step], x[2 * step + 1]);
            }
        }
    };
};

}  // namespace
