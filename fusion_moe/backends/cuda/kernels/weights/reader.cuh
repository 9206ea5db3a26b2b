// What a kernel of a product knows of its weights: a reader, `Segment::Weights`, a template of the
// type of the activations that its fragments are multiplied by. No other file knows an encoding.
//
// Small-M kernels read tiles of 16 rows and 64 k that follow each other along K, from memory to
// registers:
//
//     open(s, group, first_row, block, lane)         where a lane's first tile lies, the block-th
//     along K Packed load(blocks_ahead); advance(blocks)     what the lane has of a tile, as it is
//     stored; further along K Scales scales(packed)                          of all that the lane
//     has dequantize(packed, scales, v, half, a)         a[0], a[1]: columns 16 c + 8 half + 2 v
//     and the next, of rows r and r + 8
//
// Lane 4 r + c holds rows r and r + 8, and of each the 16 columns from 16 c on. Step v of four
// multiplies by two pairs of these in each row: both halves make the fragment of a tensor core's
// instruction.
//
// Large-M kernels copy tiles to shared memory as they are stored. ELEMENTS and SCALES are bytes of
// a tile there (0: no scales), elements(s) and scales(s) where those of all matrices begin. If not
// SCALES_FOLLOW, those of a tile are several arrays, or tiles share them: first_piece(s, piece),
// pieces_apart(piece) and piece_of_tile(piece, row_tiles, tile) say where each 16 bytes of them
// are. Shared<FRAGMENT_ORDER> says where the 16 bytes of a producer's lane go, in each run of 512
// bytes of elements (swizzled_lane), and makes fragments of step v; FRAGMENT_ORDER: whether
// activations are in fragment order, or row-major. Transposed<APART> makes fragments for dgrad, of
// readers that have it.
//
// What `dequantize` makes are the weights over RESCALE, a power of two that keeps them in range,
// and over the outer scale, one for a run of rows: outer(s, group, row), and outer_of_lane(...) of
// rows r and r + 8 of a tile.
#pragma once

#include "memory.cuh"

namespace {

constexpr int RUN = 512;  // bytes of a tile that a warp reads or copies at once

__device__ __forceinline__ u32 word_of(const uint4& x, int v) {
    return v == 0 ? x.x : v == 1 ? x.y : v == 2 ? x.z : x.w;
}

// A stored scale, as a number of 1, 2 or 4 bytes, from shared memory.
template <int BYTES>
__device__ __forceinline__ u32 read_shared(const u8* p) {
    if constexpr (BYTES == 1)
        return *p;
    else if constexpr (BYTES == 2)
        return *reinterpret_cast<const u16*>(p);
    else
        return *reinterpret_cast<const u32*>(p);
}

// Where the tiles of a matrix's 16 rows begin, from the block-th on.
template <class Segment>
__device__ __forceinline__ i64 tile_number(i32 group, i32 first_row, i32 block) {
    static_assert(Segment::N % 16 == 0 && Segment::K % 64 == 0,
                  "a matrix in the layout w16x64 is made of whole tiles of 16 rows and 64 columns");
    return (i64(group) * (Segment::N / 16) + first_row / 16) * (Segment::K / 64) + block;
}

// Where the items of a part lie: its block scales, or its elements in pieces of 16. Item (n, b) of
// a matrix, which takes `size` items, lies at of_row(n, columns) + of_column(b). Orders of other
// layouts are written from their descriptors (cxx/orders.py).
struct LinearOrder {
    static constexpr int COLUMNS = 1, TILE = 1;
    static constexpr __device__ i64 size(i64 rows, i64 columns) { return rows * columns; }
    static constexpr __device__ i64 of_row(i64 n, i64 columns) { return n * columns; }
    static constexpr __device__ i64 of_column(i64 b) { return b; }
};

template <class Order>
constexpr bool IS_LINEAR = false;
template <>
constexpr bool IS_LINEAR<LinearOrder> = true;

struct NoOuterScale {
    template <class Segment>
    static __device__ __forceinline__ float outer(const Segment&, i32, i32) {
        return 1.f;
    }

    template <class Segment>
    static __device__ __forceinline__ void outer_of_lane(float (&outer)[2], const Segment&, i32,
                                                         i32, i32) {
        outer[0] = outer[1] = 1.f;
    }
};

// A float32 for each of SCALE_RUNS equal runs of a matrix's rows. Where::of(s): those of all.
template <class Where>
struct OuterScale {
    template <class Segment>
    static __device__ __forceinline__ float outer(const Segment& s, i32 group, i32 row) {
        static_assert(Segment::N % Segment::SCALE_RUNS == 0,
                      "the runs of rows that have an outer scale each are equally long");
        return Where::of(s)[group * Segment::SCALE_RUNS + row / (Segment::N / Segment::SCALE_RUNS)];
    }

    // In one run of rows the two are one.
    template <class Segment>
    static __device__ __forceinline__ void outer_of_lane(float (&outer)[2], const Segment& s,
                                                         i32 group, i32 first_row, i32 lane) {
        constexpr i32 LENGTH = Segment::N / Segment::SCALE_RUNS, APART = LENGTH % 16 == 0 ? 0 : 1;
        const i32 row = first_row + APART * (lane / 4);
        const float* of_group = Where::of(s) + group * Segment::SCALE_RUNS;
        outer[0] = of_group[row / LENGTH],
        outer[1] = APART ? of_group[(row + 8) / LENGTH] : outer[0];
    }
};

struct DecodeScales {
    template <class Segment>
    static __device__ __forceinline__ const float* of(const Segment& s) {
        return s.decode_scale;
    }
};
using DecodeScale = OuterScale<DecodeScales>;

}  // namespace
