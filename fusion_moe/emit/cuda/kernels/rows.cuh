// Routing, and loops over the elements of results.
//
// `route` is a stable counting sort: one block does all, where the counts of all its chunks fit its shared memory; else there are three
// launches: each block counts the ids of a chunk, one block adds the counts up, each block places its chunk.
#pragma once

#include "order.cuh"
#include "ragged.cuh"

namespace {

constexpr int ROUTE_THREADS = 1024, ROUTE_WARPS = ROUTE_THREADS / 32;  // a chunk has as many ids

// The sorted rows of [T, slots] ids. In shared memory each block has counts of the ids of its warps, [warps, G].
template <class Id, int G>
struct Route {
    const Id* ids;  // [T, slots]
    i32 count, slots;
    i32 *ends, *row_of, *slot_of;  // [G], [count], [T, slots]
    i32* table;                    // [chunks, G]: counts, then the rows where each chunk's ids of a group begin
    i64* error;

    // All chunks by one block.
    template <int CHUNKS>
    __device__ void whole() const {
        __shared__ i32 first[G];
        Picked picked[CHUNKS];
        count_ids(picked, 0);
        totals<CHUNKS>(first);
        prefix(first);
        place(picked, 0, first);
    }

    __device__ void counts() const {
        __shared__ i32 total[G];
        Picked picked[1];
        count_ids(picked, blockIdx.x);
        totals<1>(total);
        for (i32 g = threadIdx.x; g < G; g += ROUTE_THREADS) table[blockIdx.x * G + g] = total[g];
    }

    __device__ void scan() const {
        __shared__ i32 first[G];
        for (i32 g = threadIdx.x; g < G; g += ROUTE_THREADS) {
            i32 total = 0;
            for (i32 chunk = 0; chunk < chunks(); ++chunk) {
                const i32 here = table[chunk * G + g];
                table[chunk * G + g] = total;
                total += here;
            }
            first[g] = total;
        }
        __syncthreads();
        prefix(first);
        for (i32 i = threadIdx.x; i < chunks() * G; i += ROUTE_THREADS) table[i] += first[i % G];
    }

    __device__ void places() const {
        __shared__ i32 first[G];
        Picked picked[1];
        count_ids(picked, blockIdx.x);
        totals<1>(first);
        for (i32 g = threadIdx.x; g < G; g += ROUTE_THREADS) first[g] = table[blockIdx.x * G + g];
        __syncthreads();
        place(picked, blockIdx.x, first);
    }

private:
    // An id of a thread: its group, and how many of the warp's before it name the same.
    struct Picked {
        i32 group, rank;
    };

    __device__ static i32* before() {
        extern __shared__ i32 counts[];
        return counts;
    }

    __device__ i32 chunks() const { return (count + ROUTE_THREADS - 1) / ROUTE_THREADS; }

    __device__ static i32 number(i32 chunk) { return chunk * ROUTE_THREADS + i32(threadIdx.x); }

    // The group of an id; wrong ones are reported.
    __device__ i32 group_at(i32 i) const {
        if (i >= count) return G;
        const i64 id = i64(ids[i]);
        const i32 group = id < 0 ? 0 : id < G ? i32(id) : G - 1;
        if (id != group) report(error, BAD_ID, i, i32(id));
        return group;
    }

    // What the threads have of some chunks, from `chunk` on, and how often their warps name each group.
    template <int CHUNKS>
    __device__ void count_ids(Picked (&picked)[CHUNKS], i32 chunk) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) picked[c].group = group_at(number(chunk + c));
        for (i32 i = threadIdx.x; i < CHUNKS * ROUTE_WARPS * G; i += ROUTE_THREADS) before()[i] = 0;
        __syncthreads();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i32 group = picked[c].group, lane = threadIdx.x % 32;
            const u32 same = same_number<G>(group);
            picked[c].rank = __popc(same & ((1u << lane) - 1));
            if (group < G && picked[c].rank == 0) before()[row_of_warp(c) * G + group] = __popc(same);
        }
        __syncthreads();
    }

    __device__ static i32 row_of_warp(i32 c) { return c * ROUTE_WARPS + i32(threadIdx.x / 32); }

    // Counts of a warp -> of the warps before it; total[g]: of all. Each group's warps are cut into parts, one for a thread.
    template <int CHUNKS>
    __device__ void totals(i32* total) const {
        constexpr i32 PARTS = G < ROUTE_THREADS ? ROUTE_THREADS / G : 1;
        constexpr i32 warps = CHUNKS * ROUTE_WARPS, each = (warps + PARTS - 1) / PARTS;
        __shared__ i32 sums[PARTS * G];
        for (i32 i = threadIdx.x; i < PARTS * G; i += ROUTE_THREADS) {
            i32 sum = 0;
#pragma unroll 4
            for (i32 warp = i / G * each; warp < min(warps, (i / G + 1) * each); ++warp) sum += before()[warp * G + i % G];
            sums[i] = sum;
        }
        __syncthreads();
        for (i32 i = threadIdx.x; i < PARTS * G; i += ROUTE_THREADS) {
            i32 sum = 0;
#pragma unroll 4
            for (i32 part = 0; part < i / G; ++part) sum += sums[part * G + i % G];
            for (i32 warp = i / G * each; warp < min(warps, (i / G + 1) * each); ++warp) {
                const i32 here = before()[warp * G + i % G];
                before()[warp * G + i % G] = sum;
                sum += here;
            }
            if (i / G == PARTS - 1) total[i % G] = sum;
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

    template <int CHUNKS>
    __device__ void place(const Picked (&picked)[CHUNKS], i32 chunk, const i32* first) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i32 i = number(chunk + c), group = picked[c].group;
            if (i >= count) continue;
            const i32 row = first[group] + before()[row_of_warp(c) * G + group] + picked[c].rank;
            row_of[row] = i / slots;
            slot_of[i] = row;
        }
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
