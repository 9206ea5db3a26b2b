// Routing, and loops over the elements of results.
//
// `route` is a stable counting sort in up to three launches: each block counts the ids of a chunk, one block adds the counts up, each
// block places its chunk. One launch does where one chunk holds all ids.
#pragma once

#include "order.cuh"
#include "ragged.cuh"

namespace {

constexpr int ROUTE_THREADS = 1024, ROUTE_WARPS = ROUTE_THREADS / 32;  // a chunk has as many ids

// The sorted rows of [T, slots] ids.
template <class Id, int G>
struct Route {
    const Id* ids;  // [T, slots]
    i32 count, slots;
    i32 *ends, *row_of, *slot_of;  // [G], [count], [T, slots]
    i32* table;                    // [chunks, G]: counts, then the rows where each chunk's ids of a group begin
    i64* error;

    // What fits one block.
    __device__ void whole() const {
        __shared__ i32 first[G];
        extern __shared__ i32 before[];  // [warps, G]
        const i32 mine = rank(before, 0);
        totals(before, first);
        prefix(first);
        place(before, first, mine, 0);
    }

    __device__ void counts() const {
        __shared__ i32 total[G];
        extern __shared__ i32 before[];
        rank(before, blockIdx.x);
        totals(before, total);
        for (i32 g = threadIdx.x; g < G; g += ROUTE_THREADS) table[blockIdx.x * G + g] = total[g];
    }

    __device__ void scan() const {
        __shared__ i32 first[G];
        const i32 chunks = (count + ROUTE_THREADS - 1) / ROUTE_THREADS;
        for (i32 g = threadIdx.x; g < G; g += ROUTE_THREADS) {
            i32 total = 0;
            for (i32 chunk = 0; chunk < chunks; ++chunk) {
                const i32 here = table[chunk * G + g];
                table[chunk * G + g] = total;
                total += here;
            }
            first[g] = total;
        }
        __syncthreads();
        prefix(first);
        for (i32 i = threadIdx.x; i < chunks * G; i += ROUTE_THREADS) table[i] += first[i % G];
    }

    __device__ void places() const {
        __shared__ i32 first[G];
        extern __shared__ i32 before[];
        const i32 mine = rank(before, blockIdx.x);
        totals(before, first);
        __syncthreads();
        for (i32 g = threadIdx.x; g < G; g += ROUTE_THREADS) first[g] = table[blockIdx.x * G + g];
        __syncthreads();
        place(before, first, mine, blockIdx.x);
    }

private:
    __device__ i32 group_at(i32 i) const {
        const i64 id = i64(ids[i]);
        if (id >= 0 && id < G) return i32(id);
        report(error, BAD_ID, i, i32(id));
        return id < 0 ? 0 : G - 1;
    }

    // How many ids of its warp before a thread's own name the same group; before[warp][g]: how many of a warp name g.
    __device__ i32 rank(i32* before, i32 chunk) const {
        const i32 i = chunk * ROUTE_THREADS + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (i32 j = threadIdx.x; j < ROUTE_WARPS * G; j += ROUTE_THREADS) before[j] = 0;
        __syncthreads();
        const i32 group = i < count ? group_at(i) : G;
        const u32 same = __match_any_sync(WHOLE_WARP, group);
        if (group < G && lane == __ffs(same) - 1) before[warp * G + group] = __popc(same);
        __syncthreads();
        return __popc(same & ((1u << lane) - 1));
    }

    // before[warp][g] -> how many of the warps before name g; total[g]: how many of all.
    __device__ void totals(i32* before, i32* total) const {
        for (i32 g = threadIdx.x; g < G; g += ROUTE_THREADS) {
            i32 sum = 0;
            for (int warp = 0; warp < ROUTE_WARPS; ++warp) {
                const i32 here = before[warp * G + g];
                before[warp * G + g] = sum;
                sum += here;
            }
            total[g] = sum;
        }
        __syncthreads();
    }

    // first[g]: sizes -> first rows; writes the ends. By the first warp.
    __device__ void prefix(i32* first) const {
        constexpr int EACH = (G + 31) / 32;
        if (threadIdx.x < 32) {
            const i32 from = threadIdx.x * EACH;
            i32 sum = 0;
            for (int i = 0; i < EACH; ++i) sum += from + i < G ? first[from + i] : 0;
            i32 upto = sum;
            for (int step = 1; step < 32; step *= 2) {
                const i32 other = __shfl_up_sync(WHOLE_WARP, upto, step);
                if (threadIdx.x >= step) upto += other;
            }
            i32 row = upto - sum;
            for (int i = 0; i < EACH && from + i < G; ++i) {
                const i32 size = first[from + i];
                first[from + i] = row;
                row += size;
                ends[from + i] = row;
            }
        }
        __syncthreads();
    }

    __device__ void place(const i32* before, const i32* first, i32 mine, i32 chunk) const {
        const i32 i = chunk * ROUTE_THREADS + threadIdx.x;
        if (i >= count) return;
        const i64 id = i64(ids[i]);
        const i32 group = id < 0 ? 0 : id < G ? i32(id) : G - 1;
        const i32 row = first[group] + before[threadIdx.x / 32 * G + group] + mine;
        row_of[row] = i / slots;
        slot_of[i] = row;
    }
};

// Calls body(i) for i in 0 .. count - 1 on all threads of all blocks.
template <class Body>
__device__ __forceinline__ void for_all(i64 count, Body body) {
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += i64(gridDim.x) * blockDim.x) body(i);
}

// total[v] = sum over slots of weight * y[row][j + v], in order: y [rows, N], slot(i) and weight(i) of slot i.
template <int V, class T, class Slot, class Weight>
__device__ __forceinline__ void sum_slots(float (&total)[V], const T* y, i64 width, i64 j, i32 slots, Slot slot, Weight weight) {
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
