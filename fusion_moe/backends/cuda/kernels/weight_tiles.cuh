// How producers fill a stage with a tile of the weight, in fprop and dgrad. There is a class for
// each way in which weights are stored:
//
//     Runs                           in which order the contracted rows are taken
//     begin(group, n_tile)           starts a work tile
//     copy(runs, to, kb)             copies this thread's part of K block kb; called in order
//
// Of weights that threads change on the way, `load` returns a Block as it is stored, and `store`
// puts it into the stage.
#pragma once

#include "choose.cuh"
#include "pieces.cuh"
#include "scale_runs.cuh"

namespace {

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
    using Runs = OneRun<Segment::K>;
    __device__ __forceinline__ WeightBoxes(const Segment&, i32) {}
    __device__ __forceinline__ void begin(i32, i32) {}
    __device__ __forceinline__ void copy(const Runs&, u32, i32) const {}
};

// Rows of a tile of which a thread copies a piece of every STEP-th: those of a matrix; -1: zeros.
template <int TILE, int THREADS>
struct PiecesOfRows {
    static constexpr int STEP = THREADS / 8, COUNT = TILE / STEP;
    i32 row[COUNT];

    // WIDTH: columns of the matrix; k: the first of those in the tile.
    template <int WIDTH, class T>
    __device__ __forceinline__ void copy(u32 to, const T* matrix, i32 k, i32 thread) const {
        const i32 piece = thread % 8;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            copy_piece<WIDTH>(to + swizzled(thread / 8 + STEP * i, piece), matrix, row[i],
                              k + 8 * piece, row[i] >= 0);
    }
};

// Weights stored [n, k].
template <class Segment, int TILE_N, int THREADS>
struct WeightRows {
    using Runs = OneRun<Segment::K>;
    struct Block {};
    const Segment& s;
    const i32 thread;
    const typename Segment::Activation* matrix;
    PiecesOfRows<TILE_N, THREADS> rows;

    __device__ __forceinline__ WeightRows(const Segment& s_, i32 thread_)
        : s(s_), thread(thread_) {}

    __device__ __forceinline__ void begin(i32 group, i32 n_tile) {
        matrix = s.b_matrix(group);
#pragma unroll
        for (int i = 0; i < rows.COUNT; ++i)
            rows.row[i] = column_of_tile<Segment, TILE_N>(n_tile, thread / 8 + rows.STEP * i);
    }

    __device__ __forceinline__ void copy(const Runs&, u32 to, i32 kb) const {
        rows.template copy<Segment::K>(to, matrix, kb * GEMM_K_BLOCK, thread);
    }
};

// Weights stored [k, n]: a thread copies eight columns of every STEP-th row.
template <class Segment, int TILE_N, int THREADS>
struct WeightColumns {
    using Runs = OneRun<Segment::K>;
    struct Block {};
    static constexpr int PIECES = TILE_N / 8, STEP = THREADS / PIECES;
    const Segment& s;
    const typename Segment::Activation* matrix;
    i32 column, thread;

    __device__ __forceinline__ WeightColumns(const Segment& s_, i32 thread_)
        : s(s_), thread(thread_) {}

    __device__ __forceinline__ void begin(i32 group, i32 n_tile) {
        matrix = s.b_matrix(group);
        column = column_of_tile<Segment, TILE_N>(n_tile, thread % PIECES * 8);
    }

    __device__ __forceinline__ void copy(const Runs&, u32 to, i32 kb) const {
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

// Quantized weights stored [k, n]: each producer warpgroup dequantizes a part of the columns, and
// each of its warps 16 of a K block's 64 rows, a tile of the weight at a time, as readers have it.
// Of a tile a lane makes 16 columns of two rows, which are four pieces of the stage.
template <class Segment, int TILE_N, int THREADS>
class PackedWeight {
    using Weights = typename Segment::Weights;
    static constexpr int EACH = TILE_N / (THREADS / 128);  // columns of a warpgroup

  public:
    using Runs = ScaleRuns<Segment>;
    // A thread's part of a K block as it is stored.
    struct Block {
        typename Weights::Packed packed[EACH / 64] = {};
        bool in_run;
    };

    __device__ __forceinline__ PackedWeight(const Segment& s, i32 thread)
        : weight_{s}, first_(thread / 128 * EACH) {}

    __device__ __forceinline__ void begin(i32 group, i32 n_tile) {
        group_ = group, column_ = n_tile * TILE_N + first_;
    }

    __device__ __forceinline__ void copy(const Runs& runs, u32 to, i32 kb) const {
        store(to, load(runs, kb));
    }

    __device__ __forceinline__ Block load(const Runs& runs, i32 kb) const {
        Block found;
        // rows past those of the block's run are zeros, since they are multiplied too
        found.in_run = Runs::LENGTH % 64 == 0 || kb % Runs::BLOCKS * 64 + row_ < Runs::LENGTH;
        if (found.in_run) {
            Weights reader;
            reader.open(weight_, group_, runs.first_row(kb) + row_, column_ / 64, lane_);
#pragma unroll
            for (int c = 0; c < EACH / 64; ++c)
                if (Segment::N % TILE_N == 0 || column_ + 64 * c < Segment::N)
                    found.packed[c] = reader.load(c);
        }
        return found;
    }

    __device__ __forceinline__ void store(u32 to, const Block& block) const {
#pragma unroll
        for (int c = 0; c < EACH / 64; ++c)
            store(to + (first_ / 64 + c) * PIECE_BYTES, block.packed[c], block.in_run);
    }

  private:
    // A tile, to a piece of 64 columns.
    __device__ __forceinline__ void store(u32 to, const typename Weights::Packed& packed,
                                          bool in_run) const {
        const auto scales = Weights::scales(packed);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[4][2] = {};
#pragma unroll
            for (int v = 0; v < 4; ++v)
                if (in_run) Weights::dequantize(packed, scales, v, half, a[v]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 piece = to + swizzled(row_ + lane_ / 4 + 8 * i, 2 * (lane_ % 4) + half);
                asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(piece), "r"(a[0][i]),
                             "r"(a[1][i]), "r"(a[2][i]), "r"(a[3][i])
                             : "memory");
            }
        }
    }

    const StoredWeight<Segment> weight_;
    const i32 first_, row_ = threadIdx.x / 32 % 4 * 16, lane_ = threadIdx.x % 32;
    i32 group_, column_;
};

// Of a segment. BOXES: whether its matrices may come in boxes.
template <class Segment, int TILE_N, int THREADS, bool BOXES = true>
using WeightTiles = Choose<Segment::B_PACKED, PackedWeight<Segment, TILE_N, THREADS>,
                           Choose<BOXES && Segment::B_BOXES, WeightBoxes<Segment>,
                                  Choose<Segment::B_MN, WeightColumns<Segment, TILE_N, THREADS>,
                                         WeightRows<Segment, TILE_N, THREADS>>>>;

}  // namespace
