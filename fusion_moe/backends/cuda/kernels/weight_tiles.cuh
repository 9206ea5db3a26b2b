// How producers fill a stage with a tile of the weight, in fprop and dgrad. There is a class for
// each way in which weights are stored:
//
//     Memory                         its shared memory; all threads of a block call `init`
//     begin(runs, group, n_tile)     starts a work tile
//     copy(to, kb)                   copies this thread's part of K block kb; called in order
#pragma once

#include "dequantized_columns.cuh"
#include "pieces.cuh"

namespace {

struct NoMemory {
    __device__ __forceinline__ void init() {}
};

// As ScaleRuns, for contracted rows with one outer scale.
template <int K>
struct OneRun {
    static constexpr i32 COUNT = 1, BLOCKS = (K + GEMM_K_BLOCK - 1) / GEMM_K_BLOCK;
    template <class Segment>
    __device__ __forceinline__ OneRun(const Segment&, i32) {}
    __device__ __forceinline__ i32 first_row(i32 kb) const { return kb * GEMM_K_BLOCK; }
};

// The column of the product at column c of an N tile; -1 if there is none.
template <class Segment, int TILE_N>
__device__ __forceinline__ i32 column_of_tile(i32 n_tile, i32 c) {
    constexpr int TILE_COLUMNS = TILE_N / Segment::COLUMNS_PER_RESULT;
    const i32 j = n_tile * TILE_COLUMNS + c % TILE_COLUMNS;
    return j < Segment::WIDTH ? Segment::column(c / TILE_COLUMNS, j) : -1;
}

// Weights in boxes: the kernel's one copying thread copies them, so there is nothing to do here.
template <class Segment>
struct WeightBoxes {
    using Memory = NoMemory;
    __device__ __forceinline__ WeightBoxes(const Segment&, Memory&, i32) {}
    template <class Runs>
    __device__ __forceinline__ void begin(const Runs&, i32, i32) {}
    __device__ __forceinline__ void copy(u32, i32) const {}
};

// Weights stored [n, k]: a thread copies every 16th row of the tile.
template <class Segment, int TILE_N>
struct WeightRows {
    using Memory = NoMemory;
    static constexpr int COUNT = TILE_N / 16;
    const Segment& s;
    const typename Segment::Activation* matrix;
    i32 row[COUNT], thread;

    __device__ __forceinline__ WeightRows(const Segment& s_, Memory&, i32 thread_)
        : s(s_), thread(thread_) {}

    template <class Runs>
    __device__ __forceinline__ void begin(const Runs&, i32 group, i32 n_tile) {
        matrix = s.b_matrix(group);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            row[i] = column_of_tile<Segment, TILE_N>(n_tile, thread / 8 + 16 * i);
    }

    __device__ __forceinline__ void copy(u32 to, i32 kb) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            copy_piece<Segment::K>(to + swizzled(thread / 8 + 16 * i, thread % 8), matrix, row[i],
                                   kb * GEMM_K_BLOCK + 8 * (thread % 8), row[i] >= 0);
    }
};

// Weights stored [k, n]: a thread copies eight columns of every STEP-th row.
template <class Segment, int TILE_N, int THREADS>
struct WeightColumns {
    using Memory = NoMemory;
    static constexpr int PIECES = TILE_N / 8, STEP = THREADS / PIECES;
    const Segment& s;
    const typename Segment::Activation* matrix;
    i32 column, thread;

    __device__ __forceinline__ WeightColumns(const Segment& s_, Memory&, i32 thread_)
        : s(s_), thread(thread_) {}

    template <class Runs>
    __device__ __forceinline__ void begin(const Runs&, i32 group, i32 n_tile) {
        matrix = s.b_matrix(group);
        column = column_of_tile<Segment, TILE_N>(n_tile, thread % PIECES * 8);
    }

    __device__ __forceinline__ void copy(u32 to, i32 kb) const {
        const i32 piece = thread % PIECES;
#pragma unroll
        for (int i = 0; i < GEMM_K_BLOCK / STEP; ++i) {
            const i32 k = thread / PIECES + STEP * i;
            const bool good = column >= 0 && kb * GEMM_K_BLOCK + k < Segment::K;
            const u32 place = to + piece / 8 * PIECE_BYTES + swizzled(k, piece % 8);
            copy_piece<Segment::N>(place, matrix, kb * GEMM_K_BLOCK + k, column, good);
        }
    }
};

// Quantized weights stored [k, n]: each producer warpgroup dequantizes a part of the columns.
template <class Segment, int TILE_N, int THREADS>
struct PackedWeight {
    static constexpr int EACH = TILE_N / (THREADS / 128);
    using Columns = DequantizedColumns<Segment, EACH / 64, THREADS / 32>;
    using Memory = typename Columns::Memory;
    Columns columns;
    i32 first;

    __device__ __forceinline__ PackedWeight(const Segment& s, Memory& memory, i32 thread)
        : columns(s, memory), first(thread / 128 * EACH) {}

    __device__ __forceinline__ void begin(const ScaleRuns<Segment>& runs, i32 group, i32 n_tile) {
        columns.begin(runs, group, n_tile * TILE_N + first);
    }

    __device__ __forceinline__ void copy(u32 to, i32 kb) {
        columns.store(to + first / 64 * PIECE_BYTES, kb);
    }
};

template <class Segment, int TILE_N, int THREADS, bool BOXES, bool PACKED, bool MN>
struct WeightTilesOf {
    using Runs = OneRun<Segment::K>;
    using Tiles = WeightRows<Segment, TILE_N>;
};
template <class Segment, int TILE_N, int THREADS, bool MN>
struct WeightTilesOf<Segment, TILE_N, THREADS, true, false, MN> {
    using Runs = OneRun<Segment::K>;
    using Tiles = WeightBoxes<Segment>;
};
template <class Segment, int TILE_N, int THREADS>
struct WeightTilesOf<Segment, TILE_N, THREADS, false, false, true> {
    using Runs = OneRun<Segment::K>;
    using Tiles = WeightColumns<Segment, TILE_N, THREADS>;
};
template <class Segment, int TILE_N, int THREADS>
struct WeightTilesOf<Segment, TILE_N, THREADS, false, true, true> {
    using Runs = ScaleRuns<Segment>;
    using Tiles = PackedWeight<Segment, TILE_N, THREADS>;
};

template <class Segment, int TILE_N, int THREADS>
using WeightTiles = typename WeightTilesOf<Segment, TILE_N, THREADS, Segment::B_BOXES,
                                           Segment::B_PACKED, Segment::B_MN>::Tiles;
template <class Segment>
using RunsOf = typename WeightTilesOf<Segment, 256, 128, Segment::B_BOXES, Segment::B_PACKED,
                                      Segment::B_MN>::Runs;

}  // namespace
