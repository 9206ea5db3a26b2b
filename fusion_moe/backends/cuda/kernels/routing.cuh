// Routing, and loops over the elements of results.
//
// `route` is a stable counting sort without a table: there is a block for each group, which reads
// all ids and places those of its group. No block needs what another one computes, and all but the
// first to read an id find it in the cache.
#pragma once

#include "combine.cuh"
#include "fragment_order.cuh"
#include "ragged.cuh"

namespace {

// Sorts the rows of ids [T, slots] by group. Each warp of a block reads a run of ids, a lane V that
// follow each other. Group 0 has the id `first`. REST more blocks than there are groups place the
// rows of ids that name none, past the last end; unless LOCAL, they report those other than -1.
template <class Id, bool LOCAL = false, int V = 1, int REST = 1>
struct Route {
    const Id* ids;  // [T, slots]
    i32 count, slots, groups;
    i32 *ends, *row_of, *slot_of;  // [groups], [count], [T, slots]
    i64* error;
    i32 first = 0;

    // Writes the end and the rows of the block's group; one of REST those that some warps read.
    __device__ void run() const {
        __shared__ i32 before[MOST_WARPS],
            same[MOST_WARPS];  // ids of the groups before and of this one, that each warp has
        const i32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const i32 each = (count + i32(blockDim.x) * V - 1) / (i32(blockDim.x) * V) * (32 * V);
        const i32 block = blockIdx.x, mine = min(block, groups), from = warp * each + lane * V;
        i32 lower = 0, equal = 0;
#pragma unroll UNROLLED
        for (i32 i = 0; i < each; i += 32 * V) {
            i32 group[V];
            groups_at(group, from + i);
#pragma unroll
            for (int v = 0; v < V; ++v) lower += group[v] < mine, equal += group[v] == mine;
        }
        lower = __reduce_add_sync(WHOLE_WARP, lower), equal = __reduce_add_sync(WHOLE_WARP, equal);
        if (lane == 0) before[warp] = lower, same[warp] = equal;
        __syncthreads();
        const i32 of_warp = lane < warps ? before[lane] + (lane < warp ? same[lane] : 0) : 0;
        i32 row = __reduce_add_sync(WHOLE_WARP, of_warp);
        if (threadIdx.x == blockDim.x - 1 && mine < groups) ends[mine] = row + equal;
        if (equal > 0 && (mine < groups || warp % REST == block - groups))
            place(from, each, mine, row);
    }

  private:
    static constexpr i32 MOST_WARPS = 32;
    static constexpr int UNROLLED = V == 1 ? 8 : 2;

    // Returns the group of the i-th id: `groups` if the id names none, and past the last id a
    // number that no block has.
    __device__ __forceinline__ i32 group_at(i32 i) const {
        if (i >= count) return groups + 1;
        const i32 group = group_of_id(ids[i], first, groups);
        if (!LOCAL && group == groups && ids[i] != -1 && blockIdx.x == 0)
            report(error, BAD_ID, i, i32(ids[i]));
        return group;
    }

    // Those of V ids. If these are several, bad ones are reported where they are placed.
    __device__ __forceinline__ void groups_at(i32 (&group)[V], i32 i) const {
        if constexpr (V == 1) {
            group[0] = group_at(i);
        } else {
            constexpr int PIECE = 16 / sizeof(Id);
            Vector<Id, PIECE> some[V / PIECE] = {};
#pragma unroll
            for (int p = 0; p < V; p += PIECE)
                if (i + p + PIECE <= count) some[p / PIECE] = load_vector<PIECE>(ids + i + p);
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const bool whole = i + v / PIECE * PIECE + PIECE <= count;
                const Id id = whole || i + v >= count ? some[v / PIECE].at[v % PIECE] : ids[i + v];
                const u64 place = u64(id) - u64(first);
                const i32 found = sizeof(Id) == 4 ? i32(min(u32(place), u32(groups)))
                                                  : i32(min(place, u64(groups)));
                group[v] = i + v < count ? found : groups + 1;
            }
        }
    }

    // Gives the ids of a warp that name the group `mine` the rows from `row` on, in order.
    __device__ __forceinline__ void place(i32 from, i32 each, i32 mine, i32 row) const {
        const u32 lower_lanes = (1u << threadIdx.x % 32) - 1;
#pragma unroll UNROLLED
        for (i32 i = 0; i < each; i += 32 * V) {
            i32 group[V];
            groups_at(group, from + i);
            u32 all[V];
#pragma unroll
            for (int v = 0; v < V; ++v) all[v] = __ballot_sync(WHOLE_WARP, group[v] == mine);
#pragma unroll
            for (int v = 0; v < V; ++v)
                if (group[v] == mine) {
                    const i32 n = from + i + v;
                    if (V > 1 && !LOCAL && mine == groups && ids[n] != -1)
                        report(error, BAD_ID, n, i32(ids[n]));
                    i32 to = row;
#pragma unroll
                    for (int w = 0; w < V; ++w)
                        to += __popc(all[w] & lower_lanes) + (w < v && group[w] == mine);
                    row_of[to] = n / slots;
                    slot_of[n] = to;
                }
#pragma unroll
            for (int v = 0; v < V; ++v) row += __popc(all[v]);
        }
    }
};

// The place of an expert; -1 for the id -1, for one that names no expert, and for a place that is
// none of those here; the latter two are reported.
template <class Id>
__device__ __forceinline__ i32 place_of(Id id, const i32* expert_map, i64 experts, i32 here, i64 i,
                                        i64* error) {
    if (id >= 0 && id < experts) {
        const i32 place = expert_map[id];
        if (place >= -1 && place < here) return place;
        report(error, BAD_PLACE, i32(id), place);
        return -1;
    }
    if (id != -1) report(error, BAD_ID, i, i32(id));
    return -1;
}

// A partition in nvFuser's form -> ends [GROUPS], by one warp: the first group that does not fit is
// reported, and ends are made safe.
template <int GROUPS>
__device__ __forceinline__ void problem_ends(const Problem& of, i32 rows, i32* ends, i64* error) {
    constexpr int EACH = (GROUPS + 31) / 32;  // groups of a lane, one after the other
    i32 end[EACH];
    load_ends<GROUPS>(end, of, rows);
    check_ends<GROUPS>(end, of, rows, error);
    clamp_ends(end, rows);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const i32 g = threadIdx.x % 32 * EACH + i;
        if (g < GROUPS) ends[g] = end[i];
    }
}

// Calls body(i) for i in 0 .. count - 1 on all threads of all blocks.
template <class Body>
__device__ __forceinline__ void for_all(i64 count, Body body) {
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += i64(gridDim.x) * blockDim.x)
        body(i);
}

// Does the same with all warps: the lanes of a warp get the same i.
template <class Body>
__device__ __forceinline__ void for_all_warps(i64 count, Body body) {
    const i32 warps = blockDim.x / 32;
    for (i64 i = i64(blockIdx.x) * warps + threadIdx.x / 32; i < count; i += i64(gridDim.x) * warps)
        body(i);
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, lanes);
    return x;
}

// Adds what the same lane of all warps of a block has. The first warp gets the sums.
template <int WARPS>
__device__ __forceinline__ float sum_of_warps(float x) {
    __shared__ float of_warp[WARPS][32];
    of_warp[threadIdx.x / 32][threadIdx.x % 32] = x;
    __syncthreads();
    float total = 0;
    for (int w = 0; w < WARPS; ++w) total += of_warp[w][threadIdx.x % 32];
    return total;
}

// Returns the sum of the terms start .. stop - 1; add(first, end) returns that of up to AT_ONCE
// terms. Sums of such blocks are added in float64, so errors do not grow with the number of terms.
template <i64 AT_ONCE, class Add>
__device__ __forceinline__ float sum_blocks(i64 start, i64 stop, Add add) {
    double total = 0;
    for (i64 first = start; first < stop; first += AT_ONCE) {
        const float block = add(first, min(first + AT_ONCE, stop));
        if (stop - start <= AT_ONCE) return block;
        total += block;
    }
    return float(total);
}

// Reports an end that is below the one before it (0 before the first), or past the rows.
__device__ __forceinline__ void check_end(const i32* ends, i64 g, i64 rows, i64* error) {
    const i32 before = g > 0 ? ends[g - 1] : 0, end = ends[g];
    if (end < before || end > rows) report(error, BAD_END, i32(g), end);
}

// Returns the rows of a group, limited to rows that there are. Reports ends that are wrong.
__device__ __forceinline__ MTile rows_of_group(const i32* ends, i64 g, i64 rows, i64* error) {
    if (threadIdx.x == 0) check_end(ends, g, rows, error);
    const i32 first = min(max(g > 0 ? ends[g - 1] : 0, 0), i32(rows));
    return {i32(g), first, min(max(ends[g], first), i32(rows))};
}

}  // namespace
