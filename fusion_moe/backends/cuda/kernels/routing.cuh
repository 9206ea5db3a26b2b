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

// Sorts the rows of ids [T, slots] by group. Each warp of a block reads a run of ids. Group 0 has
// the id `first`. One more block than there are groups places the rows of ids that name none, past
// the last end; unless LOCAL, it reports those other than -1.
template <class Id, bool LOCAL = false>
struct Route {
    const Id* ids;  // [T, slots]
    i32 count, slots, groups;
    i32 *ends, *row_of, *slot_of;  // [groups], [count], [T, slots]
    i64* error;
    i32 first = 0;

    // Writes the end and the rows of the block's group.
    __device__ void run() const {
        __shared__ i32 before[MOST_WARPS],
            same[MOST_WARPS];  // ids of the groups before and of this one, that each warp has
        const i32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const i32 each = (count + i32(blockDim.x) - 1) / i32(blockDim.x) * 32;
        const i32 mine = blockIdx.x, from = warp * each + lane;
        i32 lower = 0, equal = 0;
#pragma unroll 8
        for (i32 i = 0; i < each; i += 32) {
            const i32 group = group_at(from + i);
            lower += group < mine, equal += group == mine;
        }
        lower = __reduce_add_sync(WHOLE_WARP, lower), equal = __reduce_add_sync(WHOLE_WARP, equal);
        if (lane == 0) before[warp] = lower, same[warp] = equal;
        __syncthreads();
        const i32 of_warp = lane < warps ? before[lane] + (lane < warp ? same[lane] : 0) : 0;
        i32 row = __reduce_add_sync(WHOLE_WARP, of_warp);
        if (threadIdx.x == blockDim.x - 1 && mine < groups) ends[mine] = row + equal;
        if (equal > 0) place(from, each, mine, row);
    }

  private:
    static constexpr i32 MOST_WARPS = 32;

    // Returns the group of the i-th id: `groups` if the id names none, and past the last id a
    // number that no block has.
    __device__ __forceinline__ i32 group_at(i32 i) const {
        if (i >= count) return groups + 1;
        const i32 group = group_of_id(ids[i], first, groups);
        if (!LOCAL && group == groups && ids[i] != -1 && blockIdx.x == 0)
            report(error, BAD_ID, i, i32(ids[i]));
        return group;
    }

    // Gives the ids of a warp that name the group `mine` the rows from `row` on, in order.
    __device__ __forceinline__ void place(i32 from, i32 each, i32 mine, i32 row) const {
        const u32 lower_lanes = (1u << threadIdx.x % 32) - 1;
#pragma unroll 8
        for (i32 i = 0; i < each; i += 32) {
            const bool here = group_at(from + i) == mine;
            const u32 all = __ballot_sync(WHOLE_WARP, here);
            if (here) {
                const i32 to = row + __popc(all & lower_lanes);
                row_of[to] = (from + i) / slots;
                slot_of[from + i] = to;
            }
            row += __popc(all);
        }
    }
};

// The place of an expert; -1 for the id -1, and for one that names no expert, which is reported.
template <class Id>
__device__ __forceinline__ i32 place_of(Id id, const i32* places, i64 experts, i64 i, i64* error) {
    if (id >= 0 && id < experts) return places[id];
    if (id != -1) report(error, BAD_ID, i, i32(id));
    return -1;
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

// Returns the rows of a group, limited to rows that there are. Reports ends that are wrong.
__device__ __forceinline__ MTile rows_of_group(const i32* ends, i64 g, i64 rows, i64* error) {
    const i32 before = g > 0 ? ends[g - 1] : 0, end = ends[g];
    if ((end < before || end < 0 || end > rows) && threadIdx.x == 0)
        report(error, BAD_END, i32(g), end);
    const i32 first = min(max(before, 0), i32(rows));
    return {i32(g), first, min(max(end, first), i32(rows))};
}

}  // namespace
