// Sums of the rows of tokens.
#pragma once

#include "ragged.cuh"

namespace {

// For each token t, and V columns from j on: total[v] = the sum over slots, in order, of weight *
// y[row][j + v], y [rows, width]; then store(t, j, total). Slots with rows from *end on are left
// out, unless `end` is null. AT_ONCE slots are read before any is added. BEFORE_WAIT: a thread's
// first rows and weights are there before the kernel before this one has ended: they are read while
// that runs.
template <int V, int AT_ONCE, bool BEFORE_WAIT, class T, class Row, class Weight, class Store>
__device__ __forceinline__ void combine_slots(const T* y, const i32* end, i64 tokens, i64 width,
                                              i32 slots, Row row, Weight weight, Store store) {
    const i64 pieces = width / V, count = tokens * pieces;
    i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x, t, j, rows[AT_ONCE];
    float weights[AT_ONCE];
    const auto read = [&](i32 first) {
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s)
            if (first + s < slots) rows[s] = row(t, first + s), weights[s] = weight(t, first + s);
    };
    const auto begin = [&] {
        if (i >= count) return;
        t = i / pieces, j = i % pieces * V;
        read(0);
    };
    if (!BEFORE_WAIT) griddepcontrol_wait();
    begin();
    const i64 last = end ? *end : 0;
    if (BEFORE_WAIT) griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    while (i < count) {
        float total[V] = {};
        for (i32 first = 0; first < slots; first += AT_ONCE) {
            if (first > 0) read(first);
            Vector<T, V> found[AT_ONCE];
            const auto counts = [&](int s) {
                return first + s < slots && (!end || rows[s] < last);
            };
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s)
                if (counts(s)) found[s] = load_vector<V>(y + rows[s] * width + j);
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s)
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (counts(s)) total[v] += widen(found[s].at[v]) * weights[s];
        }
        store(t, j, total);
        i += i64(gridDim.x) * blockDim.x;
        begin();
    }
}

}  // namespace
