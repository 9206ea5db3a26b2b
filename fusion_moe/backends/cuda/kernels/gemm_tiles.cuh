// What the kernels of grouped products of 16-bit matrices share, whatever multiplies their tiles
// (gemm.cuh, gemm_mma.cuh): the work tiles of wgrad, how its rows are copied, and what happens to
// accumulators.
//
// Accumulators are exchanged among the four lanes that share rows, so that each has eight columns
// that follow each other of one row. Sums over a row's columns are stored for each part of an N
// tile that is added up on its own, and added in order by another kernel.
#pragma once

#include "added.cuh"
#include "epilogue_rows.cuh"
#include "schedule.cuh"
#include "weight_tiles.cuh"

namespace {

// What a warp has of a work tile of fprop or dgrad: 16 rows and COLUMNS columns of the product, the
// part-th of EACH columns for each of those that a result reads. first: the row of the first of
// each four warps, one below the other.
template <class Segment, int TILE_N, int COLUMNS>
struct GemmPart {
    static constexpr int RESULTS = Segment::COLUMNS_PER_RESULT, TILE_COLUMNS = TILE_N / RESULTS,
                         EACH = COLUMNS / RESULTS, PARTS = TILE_COLUMNS / EACH;
    static_assert(EACH % 32 == 0, "four lanes have eight columns each");

    // The added (LoRA) product.
    __device__ static __forceinline__ void add(const Segment& s, const WorkTile& tile, i32 first,
                                               float (&sum)[COLUMNS / 2], int part) {
        constexpr int RUN = RESULTS == 1 ? TILE_COLUMNS : EACH;
        const i32 row = threadIdx.x % 32 / 4, m = first + threadIdx.x / 32 % 4 * 16 + row,
                  last = tile.m_tile.end - 1;
        using Added = AddedProduct<Segment>;
        const auto rows = Added::rows(s);
        const auto matrix = Added::columns(s, tile.m_tile.group);
        const i32 column = tile.n_tile * TILE_COLUMNS + (PARTS > 1 ? part * EACH : 0) + row;
        const auto columns = [&](int i, int k) {
            const i32 j = min(column + 8 * i % RUN, Segment::WIDTH - 1);
            return matrix.four(Segment::column(8 * i / RUN, j), k);
        };
        Added::template add<COLUMNS / 8>(
            sum, [&](int k) { return rows.four(min(m, last), k); },
            [&](int k) { return rows.four(min(m + 8, last), k); }, columns);
    }

    __device__ static __forceinline__ void store(const Segment& s, const WorkTile& tile, i32 first,
                                                 const float (&sum)[COLUMNS / 2], int number) {
        const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4,
                  part = PARTS == 1 ? 0 : number;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i32 m = first + 16 * warp + lane / 4 + 8 * h;
            const bool good = m < tile.m_tile.end;
            float total[Segment::SUMS > 0 ? Segment::SUMS : 1] = {};  // of this part's columns
#pragma unroll
            for (int i = 0; i < EACH / 32; ++i) {
                float p[RESULTS][8];
#pragma unroll
                for (int f = 0; f < RESULTS; ++f) row_of_quad(p[f], sum, f * EACH / 8 + 4 * i, h);
                const i32 j = tile.n_tile * TILE_COLUMNS + part * EACH + 32 * i + 8 * (lane % 4);
                if (good) s.store(m, tile.m_tile.group, j, p, total);
            }
            if constexpr (Segment::SUMS > 0)
                store_sums<4>(s, m, tile.n_tile * PARTS + part, good, total);
        }
    }
};

// wgrad
// -------------------------------------------------------------------------------------------------

// The tiles of all groups, those of the groups with the most rows first.
template <int GROUPS>
struct WgradScheduler {
    i32 first[GROUPS + 2], before[GROUPS + 2];  // as MTiles has them
    i32 group_of_place[GROUPS];

    // By all threads of a block.
    __device__ void build(const i32* ends, i32 rows, i64* error) {
        MTiles<GROUPS, 128>& m_tiles = reinterpret_cast<MTiles<GROUPS, 128>&>(first);
        m_tiles.build(ends, rows, ALL_GROUPS, error);
        for (i32 g = threadIdx.x; g < GROUPS; g += blockDim.x) {
            const i32 mine = size(g);
            i32 place = 0;
            for (i32 other = 0; other < GROUPS; ++other)
                place += size(other) > mine || (size(other) == mine && other < g);
            group_of_place[place] = g;
        }
        __syncthreads();
    }

    __device__ __forceinline__ i32 size(i32 g) const { return first[g + 1] - first[g]; }
};

// Of a group's result [N, K]. Rotations of tiles of a, with all tiles of b: see schedule.cuh.
template <class Segment, int TILE_M, int TILE_N>
struct WgradTile {
    static constexpr i32 A_TILES = (Segment::N + TILE_M - 1) / TILE_M,
                         B_TILES = (Segment::K + TILE_N - 1) / TILE_N;
    static constexpr i32 EACH_GROUP = A_TILES * B_TILES, ROTATION = 2048 / TILE_M;
    static_assert(i64(Segment::GROUPS) * EACH_GROUP < NO_WORK_TILE,
                  "numbers of work tiles are i32");
    i32 group, a, b, first, end;

    __device__ __forceinline__ WgradTile(const WgradScheduler<Segment::GROUPS>& scheduler,
                                         i32 number) {
        const i32 place = number / EACH_GROUP, within = number % EACH_GROUP;
        const i32 rotation = within / (ROTATION * B_TILES), rest = within % (ROTATION * B_TILES);
        const i32 height = min(ROTATION, A_TILES - rotation * ROTATION);
        group = scheduler.group_of_place[place];
        a = (rotation * ROTATION + rest % height) * TILE_M, b = rest / height * TILE_N;
        first = scheduler.first[group], end = scheduler.first[group + 1];
    }

    __device__ __forceinline__ i32 k_blocks() const {
        return (end - first + GEMM_K_BLOCK - 1) / GEMM_K_BLOCK;
    }
};

// How THREADS threads copy the 64 rows of a block, of an operand of which a tile has COLUMNS: eight
// columns at a time, of every STEP-th row, COUNT times. A lane knows one row, that of its thread's
// copy lane % COUNT, and tells the lanes that copy the same row.
template <int COLUMNS, int THREADS>
struct RowCopies {
    static constexpr int PIECES = COLUMNS / 8, STEP = THREADS / PIECES, COUNT = GEMM_K_BLOCK / STEP;
    static_assert(PIECES % COUNT == 0 && COUNT <= 32,
                  "lanes that tell each other copy the same rows");

    // first: the group's first row.
    __device__ static __forceinline__ i32 known_row(i32 first, i32 kb, i32 thread) {
        return first + kb * GEMM_K_BLOCK + thread / PIECES + STEP * (thread % COUNT);
    }

    // WIDTH: columns of the matrix. row: the known one, in memory; -1: zeros.
    template <int WIDTH, class T>
    __device__ static __forceinline__ void copy(u32 to, const T* matrix, i32 row, i32 column,
                                                i32 thread) {
        const i32 piece = thread % PIECES, first = thread / PIECES;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const i32 its = __shfl_sync(WHOLE_WARP, row, i, COUNT);
            const u32 place = to + piece / 8 * PIECE_BYTES + swizzled(first + STEP * i, piece % 8);
            copy_piece<WIDTH>(place, matrix, its, column + 8 * piece, its >= 0);
        }
    }
};

// Stores a warp's 16 rows of a group's result, from `row` and `column` on.
template <int COLUMNS, class Segment>
__device__ __forceinline__ void store_wgrad(const Segment& s, i32 group, i32 row, i32 column,
                                            const float (&sum)[COLUMNS / 2]) {
    const i32 lane = threadIdx.x % 32;
    float p[1][8], none[1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const i32 n = row + lane / 4 + 8 * h;
#pragma unroll
        for (int i = 0; i < COLUMNS / 32; ++i) {
            row_of_quad(p[0], sum, 4 * i, h);
            if (n < Segment::N)
                s.store(i64(group) * Segment::N + n, group, column + 32 * i + 8 * (lane % 4), p,
                        none);
        }
    }
}

}  // namespace
