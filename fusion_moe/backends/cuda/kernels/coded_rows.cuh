// Rows in e4m3 with a scale for 128 columns as numbers, for products in which both operands are
// such.
#pragma once

#include "codes.cuh"

namespace {

// Copies a row of K codes, and its scales, to those of ROWS rows that are below `end`. By as many
// threads as there are COUNT pieces of 16 bytes, of which this is the c-th; each reads all its
// pieces before it stores any.
template <int COUNT, i64 K, int ROWS>
__device__ __forceinline__ void copy_row(const u8* codes, const float* scales, i64 c,
                                         const i64 (&row)[ROWS], i64 end, u8* to_codes,
                                         float* to_scales) {
    constexpr i64 EACH = K / (16 * COUNT), BLOCKS = (K + 127) / 128;
    Vector<u32, 4> piece[COUNT];
#pragma unroll
    for (int v = 0; v < COUNT; ++v)
        piece[v] = load_vector<4>(reinterpret_cast<const u32*>(codes) + (c + v * EACH) * 4);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int v = 0; v < COUNT; ++v)
            if (row[r] < end)
                store_vector<4>(reinterpret_cast<u32*>(to_codes + row[r] * K) + (c + v * EACH) * 4,
                                piece[v]);
    for (i64 b = c; b < BLOCKS; b += EACH) {
        const float scale = scales[b];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (row[r] < end) to_scales[row[r] * BLOCKS + b] = scale;
    }
}

// What the eight codes from place 8 * piece on of rows of K columns stand for, or those that stand
// there in fragment order.
template <i32 K, bool FRAGMENT_ORDER>
__device__ __forceinline__ Vector<bf16, 8> decoded_piece(const u8* codes, const float* scales,
                                                         i64 piece) {
    const i64 first = 8 * piece, row = first / K;
    const float scale = scales[row * ((K + 127) / 128) + first % K / 128];
    Vector<u16, 4> pairs;
    if constexpr (FRAGMENT_ORDER)
        pairs = fragment_pairs<u16>(codes, piece);
    else
        pairs = load_vector<4>(reinterpret_cast<const u16*>(codes + first));
    Vector<u32, 4> found;
#pragma unroll
    for (int v = 0; v < 4; ++v) found.at[v] = numbers_of(pairs.at[v], scale, scale);
    return reinterpret_cast<const Vector<bf16, 8>&>(found);
}

}  // namespace
