// Rows partitioned into groups, with ends that only the device knows: what is wrong with them is
// made safe, and reported.
#pragma once

#include "memory.cuh"

namespace {

constexpr u32 WHOLE_WARP = 0xFFFFFFFF;

// What runtime/cuda.py reads: 0 if all is well, else what was wrong, at which place, and the value.
enum Fault : u64 {
    NONE = 0,
    BAD_END = 1,
    BAD_ID = 2,
    BAD_INDEX = 3,
    BAD_SCALE = 4,
    NO_ANSWER = 5,
    NO_RANK = 6,
    BAD_PLACE = 7,
    BAD_PROBLEM = 8,
    BAD_WEIGHT = 9
};

__device__ __forceinline__ void report(i64* word, Fault fault, i32 place, i32 value) {
    *reinterpret_cast<volatile u64*>(word) =
        u64(fault) << 56 | u64(u32(place) & 0xFFFFFF) << 32 | u32(value);
}

// An index that memory may be read with; the first one that is not is reported.
__device__ __forceinline__ i64 clamp_index(i64 index, i64 size, i64* error) {
    if (index >= 0 && index < size) return index;
    report(error, BAD_INDEX, 0, i32(index));
    return index < 0 ? 0 : size - 1;
}

// The same, reported when all is done. A report between loads would keep the later ones waiting for
// the earlier ones.
struct LateReport {
    i64* word;
    i32 index = 0;
    bool bad = false;

    __device__ __forceinline__ ~LateReport() {
        if (bad) report(word, BAD_INDEX, 0, index);
    }
};
__device__ __forceinline__ i64 clamp_index(i64 index, i64 size, LateReport& late) {
    const bool good = index >= 0 && index < size;
    late.index = good ? late.index : i32(index), late.bad |= !good;
    return good ? index : index < 0 ? 0 : size - 1;
}

// The group of a row; the number of groups for one past the last end.
__device__ __forceinline__ i64 group_of(const i32* ends, i64 groups, i64 row) {
    i64 low = 0, high = groups;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (ends[middle] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// The block of rows that a row is in, where each group begins with a block of its own
// (groups.block_slots); -1 past the last end.
template <i32 BLOCK>
__device__ __forceinline__ i64 block_of(const i32* ends, i64 groups, i64 row) {
    const i64 g = group_of(ends, groups, row),
              start = g == 0 ? 0 : min(max(i64(ends[g - 1]), i64(0)), row);
    return g == groups ? -1 : start / BLOCK + g + (row - start) / BLOCK;
}

// Which lanes of a warp have the same number, of 0 .. MAX, as a lane, and which have smaller ones:
// by a vote for each bit.
template <int MAX>
struct Votes {
    u32 same = WHOLE_WARP, less = 0;

    __device__ __forceinline__ explicit Votes(i32 number) {
#pragma unroll
        for (int bit = bits(MAX) - 1; bit >= 0; --bit) {
            const u32 with = __ballot_sync(WHOLE_WARP, number >> bit & 1),
                      has = number >> bit & 1 ? WHOLE_WARP : 0;
            less |= same & has & ~with;
            same &= ~(has ^ with);
        }
    }

  private:
    __device__ static constexpr int bits(int most) { return most ? 1 + bits(most / 2) : 0; }
};

struct Plus {
    __device__ __forceinline__ i32 operator()(i32 a, i32 b) const { return a + b; }
};

struct Max {
    __device__ __forceinline__ i32 operator()(i32 a, i32 b) const { return max(a, b); }
};

// An inclusive scan over the lanes of a warp.
template <class Both>
__device__ __forceinline__ i32 scan(i32 x, Both both) {
    const i32 lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i32 other = __shfl_up_sync(WHOLE_WARP, x, step);
        if (lane >= step) x = both(x, other);
    }
    return x;
}

// Ends in a warp: EACH groups of a lane, one after the other; past the last that of the last. Null:
// of one group, which has all rows.
template <int GROUPS, int EACH>
__device__ __forceinline__ void load_ends(i32 (&end)[EACH], const i32* ends, i32 rows) {
    if (GROUPS == 1 && ends == nullptr) {
        for (i32& each : end) each = rows;
        return;
    }
    const i32 first = threadIdx.x % 32 * EACH;
    constexpr int V = GROUPS % 4 == 0 && EACH % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < EACH; i += V) {
        const Vector<i32, V> some =
            first + i < GROUPS ? load_vector<V>(ends + first + i) : Vector<i32, V>{};
#pragma unroll
        for (int v = 0; v < V; ++v) end[i + v] = some.at[v];
    }
    if constexpr (GROUPS < 32 * EACH) {
        const i32 last = __shfl_sync(WHOLE_WARP, end[(GROUPS - 1) % EACH], (GROUPS - 1) / EACH);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i >= GROUPS) end[i] = last;
    }
}

// A partition as nvFuser's grouped products take it (groups.check_problem): starts [GROUPS],
// sizes [GROUPS, 3], padded_starts [GROUPS]; of products with n out- and k in-features.
struct Problem {
    const i32 *starts, *sizes, *padded_starts;
    i32 n, k;
};

// A group ends where the next one starts, as the reporting block checks.
template <int GROUPS, int EACH>
__device__ __forceinline__ void load_ends(i32 (&end)[EACH], const Problem& of, i32 rows) {
    const i32 total = i32(u32(of.starts[GROUPS - 1]) + u32(of.sizes[3 * (GROUPS - 1)]));
    load_ends<GROUPS>(end, of.starts, rows);
    const i32 next = __shfl_down_sync(WHOLE_WARP, end[0], 1), first = threadIdx.x % 32 * EACH;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        end[i] = first + i >= GROUPS - 1 ? total : i + 1 < EACH ? end[i + 1] : next;
}

// The row before the first of a lane's groups.
template <int EACH>
__device__ __forceinline__ i32 start_of(const i32 (&end)[EACH]) {
    const i32 before = __shfl_up_sync(WHOLE_WARP, end[EACH - 1], 1);
    return threadIdx.x % 32 == 0 ? 0 : before;
}

// Reports the first end that is below the one before it, negative, or past the rows.
template <int GROUPS, int EACH>
__device__ __forceinline__ void check_ends(const i32 (&end)[EACH], const i32*, i32 rows,
                                           i64* error) {
    i32 least = start_of(end), bad = GROUPS, value = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const i32 g = threadIdx.x % 32 * EACH + i;
        if (bad == GROUPS && g < GROUPS && (end[i] < least || end[i] < 0 || end[i] > rows))
            bad = g, value = end[i];
        least = end[i];
    }
    const i32 first = __reduce_min_sync(WHOLE_WARP, bad);
    if (bad == first && bad < GROUPS) report(error, BAD_END, bad, value);
}

// The same of a problem: reports the first group that does not follow the one before it, or is of
// another product. Each group is compared with the one before it alone, so nothing is added up.
template <int GROUPS, int EACH>
__device__ __forceinline__ void check_ends(const i32 (&)[EACH], const Problem& of, i32 rows,
                                           i64* error) {
    const auto padded = [](i64 m) { return (m + 127) / 128 * 128; };
    i32 bad = GROUPS;
#pragma unroll 4
    for (i32 i = 0; i < 32 * EACH; i += 32) {
        const i32 g = i + i32(threadIdx.x % 32), at = min(g, GROUPS - 1), before = max(at - 1, 0);
        const i64 m = of.sizes[3 * at], above = g > 0 ? of.sizes[3 * before] : 0,
                  end = g > 0 ? of.starts[before] + above : 0,
                  stored = g > 0 ? of.padded_starts[before] + padded(above) : 0;
        const bool fits = (of.starts[at] == end) & (m >= 0) & (end + m <= rows) &
                          (of.sizes[3 * at + 1] == of.n) & (of.sizes[3 * at + 2] == of.k) &
                          (of.padded_starts[at] == stored);
        if (g < GROUPS && !fits) bad = min(bad, g);
    }
    const i32 first = __reduce_min_sync(WHOLE_WARP, bad);
    if (bad == first && bad < GROUPS) report(error, BAD_PROBLEM, bad, of.sizes[3 * bad]);
}

// As groups.clamp_ends: they never decrease, and lie in 0..rows.
template <int EACH>
__device__ __forceinline__ void clamp_ends(i32 (&end)[EACH], i32 rows) {
    bool good = true;
    i32 least = start_of(end);
#pragma unroll
    for (int i = 0; i < EACH; ++i) good = good && end[i] >= least && end[i] <= rows, least = end[i];
    if (__all_sync(WHOLE_WARP, good)) return;
    i32 high = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) high = end[i] = max(high, min(end[i], rows));
    const i32 highest = scan(high, Max()), other = __shfl_up_sync(WHOLE_WARP, highest, 1);
    const i32 before = threadIdx.x % 32 == 0 ? 0 : other;
#pragma unroll
    for (int i = 0; i < EACH; ++i) end[i] = max(end[i], before);
}

constexpr i32 UNBOUNDED = 0x7FFFFFFF;

// What the host tells one launch of a product. It is a parameter, so that all launches share one
// compiled kernel.
struct SizeClass {
    i32 above_rows, max_rows;  // it computes groups of more than above_rows rows, and of up to
                               // max_rows; others leave the rest to it
    i32 reads_before_wait;  // whether what it finds its tiles by is there before the kernel before
                            // it has ended
    i32 concurrent_with_previous,
        concurrent_with_next;  // whether the kernel before, or after, computes other groups of the
                               // same product
    i32 with_small_m;          // whether one of these is a small-M kernel
    i32 by_ids;                // whether it finds its tile in ids that are not sorted yet
    i32 by_slot;               // whether these are of one token: each has tiles of its own
    i32 routes;                // whether it sorts them for later kernels, too
};

constexpr SizeClass ALL_GROUPS = {0, UNBOUNDED};

// How many M tiles a group has; none if another kernel computes it.
template <int TILE_M>
__device__ __forceinline__ i32 m_tiles_of(i32 size, const SizeClass& size_class) {
    return size > size_class.above_rows && size <= size_class.max_rows
               ? (size + TILE_M - 1) / TILE_M
               : 0;
}

// The M tiles of a lane's groups.
template <int TILE_M, int EACH>
__device__ __forceinline__ i32 m_tiles_in(const i32 (&end)[EACH], i32 start,
                                          const SizeClass& size_class) {
    i32 m_tiles = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        m_tiles += m_tiles_of<TILE_M>(end[i] - start, size_class);
        start = end[i];
    }
    return m_tiles;
}

// Rows first .. end - 1 of a group, at most TILE_M; group GROUPS: rows that belong to none.
struct MTile {
    i32 group, first, end;
};

__device__ __forceinline__ MTile from_lane(const MTile& m_tile, int lane) {
    return {__shfl_sync(WHOLE_WARP, m_tile.group, lane),
            __shfl_sync(WHOLE_WARP, m_tile.first, lane), __shfl_sync(WHOLE_WARP, m_tile.end, lane)};
}

// The M tiles, of TILE_M rows, of group 0, then those of group 1, ..., then those of rows that
// belong to no group. Another kernel's groups have none; nor have rows of no group, unless groups
// of any size above are this one's. It lies in shared memory. Ends are used as groups.clamp_ends
// makes them.
template <int GROUPS, int TILE_M>
struct MTiles {
    i32 first[GROUPS + 2];   // row; group GROUPS has the rows of no group
    i32 before[GROUPS + 2];  // M tiles of the groups before; of all groups

    // Called by all threads of a block. Ends: as load_ends takes them. Reports the first invalid
    // end in `error` unless null.
    template <class Ends>
    __device__ __forceinline__ void build(Ends ends, i32 rows, const SizeClass& size_class,
                                          i64* error) {
        if (threadIdx.x < 32) build_by_warp(ends, rows, size_class, error);
        __syncthreads();
    }

  private:
    template <class Ends>
    __device__ __forceinline__ void build_by_warp(Ends ends, i32 rows, const SizeClass& size_class,
                                                  i64* error) {
        constexpr int EACH = (GROUPS + 31) / 32;  // groups of a lane, one after the other
        const i32 lane = threadIdx.x;
        i32 end[EACH];
        load_ends<GROUPS>(end, ends, rows);
        if (error) check_ends<GROUPS>(end, ends, rows, error);
        clamp_ends(end, rows);
        i32 row = start_of(end), mine = m_tiles_in<TILE_M>(end, row, size_class),
            number = scan(mine, Plus()) - mine;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 g = lane * EACH + i;
            if (g < GROUPS) first[g] = row, before[g] = number;
            number += m_tiles_of<TILE_M>(end[i] - row, size_class);
            row = end[i];
        }
        if (lane == 31) {
            first[GROUPS] = row, before[GROUPS] = number;
            const bool with_rest = size_class.max_rows == UNBOUNDED;
            first[GROUPS + 1] = rows,
                           before[GROUPS + 1] =
                               number + (with_rest ? (rows - row + TILE_M - 1) / TILE_M : 0);
        }
    }
};

// An M tile, and which of the N tiles; which half of the N tile, or BOTH_HALVES.
struct TilePlace {
    static constexpr i32 BOTH_HALVES = -1;
    MTile m_tile;
    i32 n_tile, half = BOTH_HALVES;
};

__device__ __forceinline__ TilePlace from_lane(const TilePlace& place, int lane) {
    return {from_lane(place.m_tile, lane), __shfl_sync(WHOLE_WARP, place.n_tile, lane)};
}

// Of the tiles of rows `first` .. `end` - 1 and of all N tiles the number-th one: those of the same
// columns, which read the same weights, follow each other.
template <int TILE_M>
__device__ __forceinline__ TilePlace tile_place(i32 group, i32 first, i32 end, i32 number) {
    const i32 m_tiles = (end - first + TILE_M - 1) / TILE_M;
    i32 n_tile = number, row = first;
    if (m_tiles > 1) n_tile = number / m_tiles, row += (number - n_tile * m_tiles) * TILE_M;
    return {{group, row, min(end, row + TILE_M)}, n_tile};
}

// The number-th tile of rows `first` .. `rows` - 1, which are of no group; empty if there are not
// so many.
template <int GROUPS, int TILE_M, int N_TILES>
__device__ __forceinline__ TilePlace tile_past(i32 first, i32 rows, i32 number) {
    first += number / N_TILES * TILE_M;
    return {{GROUPS, first, min(first + TILE_M, rows)}, number % N_TILES};
}

// The number-th of `count` tiles, of which some are split into halves: which tile, which half of
// it, and how many there are then.
struct LastWave {
    i32 number, half, count;
};

// WAVE blocks run at once. Tiles of the last wave, when multiprocessors run out of work, are split
// as far as there are idle blocks; but a wave that is nearly whole would become two. 0: there are
// no halves.
template <int WAVE>
__device__ __forceinline__ LastWave split_last_wave(i32 number, i32 count, i32 idle_blocks) {
    if constexpr (WAVE > 0) {
        const i32 last = count % WAVE,
                  halves = count > WAVE && last <= WAVE / 4 * 3 ? min(last, idle_blocks) : 0;
        const i32 beyond = number - (count - halves);
        if (beyond >= 0 && beyond < 2 * halves)
            return {number - beyond + beyond / 2, beyond % 2, count + halves};
        count += halves;
    }
    return {number, TilePlace::BOTH_HALVES, count};
}

// One of those M tiles, each N_TILES times, found by a warp on its own, for all its lanes; empty if
// there are not so many. WAVE: see split_last_wave.
template <int GROUPS, int TILE_M, int N_TILES, int WAVE, class Ends>
__device__ __forceinline__ TilePlace find_tile_by_ends(Ends ends, i32 rows,
                                                       const SizeClass& size_class, i32 number,
                                                       i64* error) {
    constexpr int EACH = (GROUPS + 31) / 32;  // groups of a lane, one after the other
    const i32 lane = threadIdx.x % 32;
    i32 end[EACH];
    load_ends<GROUPS>(end, ends, rows);
    if (error) check_ends<GROUPS>(end, ends, rows, error);
    clamp_ends(end, rows);
    const i32 start = start_of(end);
    i32 count[EACH], mine = 0, row = start;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        mine += count[i] = m_tiles_of<TILE_M>(end[i] - row, size_class) * N_TILES;
        row = end[i];
    }
    const i32 last = __shfl_sync(WHOLE_WARP, end[EACH - 1], 31),
              grouped = __reduce_add_sync(WHOLE_WARP, mine);
    const bool with_rest = size_class.max_rows == UNBOUNDED;
    const i32 ungrouped = with_rest ? (rows - last + TILE_M - 1) / TILE_M * N_TILES : 0;
    const LastWave wave =
        split_last_wave<WAVE>(number, grouped, i32(gridDim.x) - grouped - ungrouped);
    if (number >= wave.count) {  // rows of no group, or none
        if (!with_rest) return {{GROUPS, rows, rows}, 0};
        return tile_past<GROUPS, TILE_M, N_TILES>(last, rows, number - wave.count);
    }
    number = wave.number;
    const i32 upto = scan(mine, Plus());
    const u32 past = __ballot_sync(WHOLE_WARP, upto > number);
    i32 left = number - (upto - mine), group = 0, first = 0, stop = 0, within = 0;
    row = start;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (left >= 0 && left < count[i])
            group = lane * EACH + i, first = row, stop = end[i], within = left;
        left -= count[i];
        row = end[i];
    }
    TilePlace found = from_lane(tile_place<TILE_M>(group, first, stop, within), __ffs(past) - 1);
    found.half = wave.half;
    return found;
}

// The group of an id, if the ids of groups begin at `first`; `groups` for other ids.
__device__ __forceinline__ i32 group_of_id(i64 id, i32 first, i32 groups) {
    const u64 group = u64(id) - u64(first);
    return group < u64(groups) ? i32(group) : groups;
}

constexpr int SMALL_M_WARPS = 8;  // of a block, at most

// Of up to 32 ids, the token of each sorted row, for the warp that has sorted them.
__device__ __forceinline__ i32* sorted_tokens() {
    __shared__ i32 tokens[SMALL_M_WARPS][32];
    return tokens[threadIdx.x / 32];
}

// As find_tile_by_ends, of the ids of one token: each has tiles of its own, and its rank is its
// row. Fewer steps follow each other than where ids are sorted. blocks: those that may have tiles.
template <int GROUPS, int N_TILES, int WAVE, class Id>
__device__ __forceinline__ TilePlace find_tile_by_slot(const Id* ids, i32 first_id, i32 count,
                                                       i32 number, i32 blocks) {
    const i32 lane = threadIdx.x % 32, tiles = count * N_TILES;
    const i32 group = lane < count ? group_of_id(ids[lane], first_id, GROUPS) : GROUPS;
    const LastWave wave = split_last_wave<WAVE>(number, tiles, blocks - tiles);
    if (number >= wave.count) return {{GROUPS, count, count}, 0};
    const i32 slot = wave.number / N_TILES, mine = __shfl_sync(WHOLE_WARP, group, slot);
    const i32 row =
        __popc(__ballot_sync(WHOLE_WARP, group < mine || (group == mine && lane < slot)));
    return {{mine, row, row + 1}, wave.number % N_TILES, wave.half};
}

// Up to 32 ids in a warp, sorted by it: the group of a lane's id, and its place among those of it.
// blocks: those that may have tiles.
template <int GROUPS>
struct FewIds {
    const i32 lane = threadIdx.x % 32;
    i32 group, blocks = gridDim.x;
    Votes<GROUPS> votes;
    i32 place = __popc(votes.same & ((1u << lane) - 1));

    template <class Id>
    __device__ __forceinline__ FewIds(const Id* ids, i32 first_id, i32 count)
        : group(lane < count ? group_of_id(ids[lane], first_id, GROUPS) : GROUPS), votes(group) {}

    // As find_tile_by_ends.
    template <int TILE_M, int N_TILES, int WAVE>
    __device__ __forceinline__ TilePlace find(i32 rows, i32 number) const {
        const i32 size = __popc(votes.same);
        const u32 begins =
            __ballot_sync(WHOLE_WARP, group < GROUPS && place % TILE_M == 0);  // a tile
        const i32 last = __popc(__ballot_sync(WHOLE_WARP, group < GROUPS)),
                  grouped = __popc(begins) * N_TILES;
        const i32 ungrouped = (rows - last + TILE_M - 1) / TILE_M * N_TILES;
        const LastWave wave = split_last_wave<WAVE>(number, grouped, blocks - grouped - ungrouped);
        if (number >= wave.count)
            return tile_past<GROUPS, TILE_M, N_TILES>(last, rows, number - wave.count);
        const i32 first = __popc(votes.less),
                  within = wave.number - __popc(votes.less & begins) * N_TILES;
        const bool here = group < GROUPS && place == 0 && within >= 0 &&
                          within < (size + TILE_M - 1) / TILE_M * N_TILES;
        const u32 holds = __ballot_sync(WHOLE_WARP, here);
        TilePlace found =
            from_lane(tile_place<TILE_M>(group, first, first + size, within), __ffs(holds) - 1);
        found.half = wave.half;
        return found;
    }

    // What `route` computes, in its place: each warp knows the tokens of its rows, and the last
    // block, which has no tile, writes what later kernels read.
    template <bool LOCAL, class Id>
    __device__ __forceinline__ void route(const Id* ids, i32 count, i32 slots, i32* ends,
                                          i32* row_of, i32* slot_of, i64* error) {
        const i32 row = __popc(votes.less) + place, token = lane / slots;
        if (lane < count) sorted_tokens()[row] = token;
        __syncwarp();
        --blocks;
        if (i32(blockIdx.x) < blocks) return;
        if (i32(threadIdx.x) < count) {
            row_of[row] = token, slot_of[lane] = row;
            if (!LOCAL && group == GROUPS && ids[lane] != -1)
                report(error, BAD_ID, lane, i32(ids[lane]));
        }
        for (i32 first = i32(threadIdx.x) - lane; first < GROUPS; first += i32(blockDim.x)) {
            i32 end = 0;
#pragma unroll
            for (int i = 0; i < 32; ++i) end += __shfl_sync(WHOLE_WARP, group, i) <= first + lane;
            if (first + lane < GROUPS) ends[first + lane] = end;
        }
    }
};

}  // namespace
