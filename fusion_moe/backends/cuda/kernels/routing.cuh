// Routing, and loops over the elements of results.
//
// `route` is a stable counting sort without a table: each group has a block, which reads all ids
// and places those of its group. Blocks need nothing of each other, and ids come from a cache.
#pragma once

#include "fragment_order.cuh"
#include "ragged.cuh"

namespace {

// The sorted rows of [T, slots] ids. Each warp of a block reads a run of ids. The ids of groups
// begin at `first`, and a block more than there are groups places the rows of other ids, past the
// last end. Unless LOCAL, those other than -1 are reported.
template <class Id, bool LOCAL = false>
struct Route {
    const Id* ids;  // [T, slots]
    i32 count, slots, groups;
    i32 *ends, *row_of, *slot_of;  // [groups], [count], [T, slots]
    i64* error;
    i32 first = 0;

    // The rows of the block's group.
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

    // The group of an id, `groups` for ids of none; past the last id one without a block.
    __device__ __forceinline__ i32 group_at(i32 i) const {
        if (i >= count) return groups + 1;
        const i32 group = group_of_id(ids[i], first, groups);
        if (!LOCAL && group == groups && ids[i] != -1 && blockIdx.x == 0)
            report(error, BAD_ID, i, i32(ids[i]));
        return group;
    }

    // Those of a warp's ids that name a group get rows from `row` on.
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

// Calls body(i) for i in 0 .. count - 1 on all threads of all blocks.
template <class Body>
__device__ __forceinline__ void for_all(i64 count, Body body) {
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += i64(gridDim.x) * blockDim.x)
        body(i);
}

// The same on all warps: i is that of a warp.
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

// Of the same lane of all warps of a block, in the first of them.
template <int WARPS>
__device__ __forceinline__ float sum_of_warps(float x) {
    __shared__ float of_warp[WARPS][32];
    of_warp[threadIdx.x / 32][threadIdx.x % 32] = x;
    __syncthreads();
    float total = 0;
    for (int w = 0; w < WARPS; ++w) total += of_warp[w][threadIdx.x % 32];
    return total;
}

// The sum of terms start .. stop - 1, where add(first, end) is that of up to AT_ONCE. The sums of
// such blocks are added in float64, so errors do not grow with the number of terms.
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

// The rows of a group, within those that there are; ends that are wrong are reported.
__device__ __forceinline__ MTile rows_of_group(const i32* ends, i64 g, i64 rows, i64* error) {
    const i32 before = g > 0 ? ends[g - 1] : 0, end = ends[g];
    if ((end < before || end < 0 || end > rows) && threadIdx.x == 0)
        report(error, BAD_END, i32(g), end);
    const i32 first = min(max(before, 0), i32(rows));
    return {i32(g), first, min(max(end, first), i32(rows))};
}

// Needs something now, so that it is in L1 later.
__device__ __forceinline__ void prefetch(i64 x) { asm volatile("" ::"l"(x)); }
__device__ __forceinline__ void prefetch(float x) { asm volatile("" ::"f"(x)); }

// total[v] = sum over slots of weight * y[row][j + v], in order: y [rows, N], slot(i) and weight(i)
// of slot i.
template <int V, class T, class Slot, class Weight>
__device__ __forceinline__ void sum_slots(float (&total)[V], const T* y, i64 width, i64 j,
                                          i32 slots, Slot slot, Weight weight) {
#pragma unroll
    for (int v = 0; v < V; ++v) total[v] = 0;
#pragma unroll 4
    for (i32 i = 0; i < slots; ++i) {
        const Vector<T, V> row = load_vector<V>(y + slot(i) * width + j);
        const float w = weight(i);
#pragma unroll
        for (int v = 0; v < V; ++v) total[v] += widen(row.at[v]) * w;
    }
}

}  // namespace
