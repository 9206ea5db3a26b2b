// The epilogue of small-M kernels: the accumulators of the warps that share K are added in shared
// memory, and stored.
#pragma once

#include "added.cuh"
#include "fragment_order.cuh"
#include "ragged.cuh"

namespace {

// The epilogue of a tile of TILE_M rows of a group and WEIGHT_TILES * 16 rows of its matrix, with K
// divided among SPLIT_K warps. THREADS: threads of the block.
template <class Segment, int TILE_M, int WEIGHT_TILES, int SPLIT_K, int THREADS>
struct SplitKEpilogue {
    using Weights = typename Segment::Weights;
    static constexpr int TILE_N =
        Segment::BLOCK * (WEIGHT_TILES / Segment::BLOCK_TILES);  // of the result
    static constexpr int N_TILES = (Segment::WIDTH + TILE_N - 1) / TILE_N;
    static constexpr int STRIDE =
        16 * WEIGHT_TILES + 4;  // no two of a warp's stores meet in a bank
    static constexpr int PARTIALS = SPLIT_K * TILE_M * STRIDE, V = 2;
    static_assert(WEIGHT_TILES % Segment::BLOCK_TILES == 0, "a block's tiles make whole columns");

    // Writes a warp's accumulators of 16 rows of the matrix (tile `tile`) and rows t .. t + 7 of
    // the group. k_warp: its part of K.
    __device__ static __forceinline__ void write_partial(float* partials, const float (&sum)[4],
                                                         i32 k_warp, i32 tile, i32 t) {
        const i32 row = threadIdx.x % 32 / 4, lane_column = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            partials[(k_warp * TILE_M + t + 2 * lane_column + i % 2) * STRIDE + 16 * tile + row +
                     i / 2 * 8] = sum[i];
    }

    // Adds the partial sums of the warps along K, and stores the results. `at`: the first column.
    __device__ static __forceinline__ void store(const Segment& s, const MTile& m_tile, i32 at,
                                                 const float* partials) {
        for (i32 i = threadIdx.x; i < TILE_M * TILE_N / V; i += THREADS) {
            const i32 token = i / (TILE_N / V), column = i % (TILE_N / V) * V, j = at + column,
                      m = m_tile.first + token;
            if (m >= m_tile.end || j >= Segment::WIDTH) continue;
            const float* row =
                partials + token * STRIDE + column / Segment::BLOCK * (16 * Segment::BLOCK_TILES);
            float p[Segment::COLUMNS_PER_RESULT][V];
#pragma unroll
            for (int f = 0; f < Segment::COLUMNS_PER_RESULT; ++f) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const float* one = row + Segment::local(f, column % Segment::BLOCK + v);
                    float total = 0;
#pragma unroll
                    for (int k = 0; k < SPLIT_K; ++k) total += one[k * TILE_M * STRIDE];
                    const i32 of = Segment::column(f, min(j + v, Segment::WIDTH - 1));
                    p[f][v] = total * (Weights::RESCALE * Weights::outer(s, m_tile.group, of));
                    if constexpr (Segment::ADDED > 0) {
                        using Added = AddedProduct<Segment>;
                        p[f][v] +=
                            Added::dot(Added::rows(s), m, Added::columns(s, m_tile.group), of);
                    }
                }
            }
            store_columns<V>(s, m, m_tile.group, RowMajor{j}, p);
        }
    }

    // Stores the results of rows that belong to no group.
    __device__ static void store_ungrouped_rows(const Segment& s, const MTile& m_tile, i32 at) {
        for (i32 i = threadIdx.x; i < (m_tile.end - m_tile.first) * TILE_N / V; i += THREADS) {
            const i32 j = at + i % (TILE_N / V) * V;
            const float zero[Segment::COLUMNS_PER_RESULT][V] = {};
            store_columns<V>(s, m_tile.first + i / (TILE_N / V), Segment::GROUPS, RowMajor{j},
                             zero);
        }
    }
};

}  // namespace
