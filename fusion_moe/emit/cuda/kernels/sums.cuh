// What a block of warps does with the sums of a tile of few rows: those of its warps along K are added in shared memory, and stored.
#pragma once

#include "order.cuh"
#include "ragged.cuh"

namespace {

// A tile of HEIGHT rows of a group and TILES * 16 rows of its matrix, whose K is cut into WK parts, made by THREADS threads.
template <class Segment, int HEIGHT, int TILES, int WK, int THREADS>
struct Sums {
    using Weights = typename Segment::Weights;
    static constexpr int COLUMNS = Segment::B * (TILES / Segment::TILES);  // of the result
    static constexpr int ACROSS = (Segment::W + COLUMNS - 1) / COLUMNS;
    static constexpr int STRIDE = 16 * TILES + 4;  // no two of a warp's stores meet in a bank
    static constexpr int COUNT = WK * HEIGHT * STRIDE, V = 2;
    static_assert(TILES % Segment::TILES == 0, "a block's tiles make whole columns");

    // Keeps a warp's fragment of 16 rows of the matrix and 8 of the group: of part `wk` of K, at tile `tile` and rows `t` .. `t` + 7.
    __device__ static __forceinline__ void keep(float* sums, const float (&sum)[4], i32 wk, i32 tile, i32 t) {
        const i32 row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[(wk * HEIGHT + t + 2 * quarter + i % 2) * STRIDE + 16 * tile + row + i / 2 * 8] = sum[i];
    }

    // Adds what the warps have along K, and stores. `at`: the first column.
    __device__ static __forceinline__ void store(const Segment& s, const Span& span, i32 at, const float* sums) {
        for (i32 i = threadIdx.x; i < HEIGHT * COLUMNS / V; i += THREADS) {
            const i32 token = i / (COLUMNS / V), column = i % (COLUMNS / V) * V, j = at + column, m = span.first + token;
            if (m >= span.end || j >= Segment::W) continue;
            const float* row = sums + token * STRIDE + column / Segment::B * (16 * Segment::TILES);
            float p[Segment::F][V];
#pragma unroll
            for (int f = 0; f < Segment::F; ++f) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const float* one = row + Segment::local(f, column % Segment::B + v);
                    float total = 0;
#pragma unroll
                    for (int k = 0; k < WK; ++k) total += one[k * HEIGHT * STRIDE];
                    const i32 of = Segment::column(f, min(j + v, Segment::W - 1));
                    p[f][v] = total * (Weights::FACTOR * Weights::outer(s, span.group, of));
                }
            }
            store_columns<V>(s, m, span.group, InTurn{j}, p);
        }
    }

    // Rows that belong to no group.
    __device__ static void fill(const Segment& s, const Span& span, i32 at) {
        for (i32 i = threadIdx.x; i < (span.end - span.first) * COLUMNS / V; i += THREADS) {
            const i32 j = at + i % (COLUMNS / V) * V;
            const float zero[Segment::F][V] = {};
            store_columns<V>(s, span.first + i / (COLUMNS / V), Segment::G, InTurn{j}, zero);
        }
    }
};

}  // namespace
