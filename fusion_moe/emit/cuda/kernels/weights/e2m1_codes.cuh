// Codes of e2m1 as pairs of numbers of 16 bits, times a power of two; and what a lane has of a tile of w16x64.
#pragma once

#include "weights/reader.cuh"

namespace {

constexpr u32 SIGNS = 0x80008000;

// Where a pair of codes has its exponents and mantissas.
template <class T>
constexpr u32 SIZES = 0x01C001C0;
template <>
constexpr u32 SIZES<f16> = 0x0E000E00;

// Two codes of a word of w16x64: of rows r or r + 8 (i), the half's.
template <class T>
__device__ __forceinline__ u32 codes_of_word(u32 word, int half, int i);

template <>
__device__ __forceinline__ u32 codes_of_word<bf16>(u32 word, int half, int i) {
    if (half == 0) return (i == 0 ? word : word * 64u) & (SIGNS | SIZES<bf16>);
    if (i == 0) return __funnelshift_l(word, word, 12) & (SIGNS | SIZES<bf16>);
    return and_or(word >> 6, 0x01000100u, (word * 4u) & 0x80C080C0u);
}

// The layout is made for bfloat16: here a code's sign and the rest of it move by different distances.
template <>
__device__ __forceinline__ u32 codes_of_word<f16>(u32 word, int half, int i) {
    if (half == 0) return i == 0 ? and_or(word, SIGNS, (word * 8u) & SIZES<f16>) : and_or(word * 64u, SIGNS, (word * 512u) & SIZES<f16>);
    if (i == 0) return and_or(word * 4096u, SIGNS, __funnelshift_l(word, word, 15) & SIZES<f16>);
    return and_or(word * 4u, SIGNS, and_or(word >> 3, 0x08000800u, (word * 32u) & 0x06000600u));
}

// The two codes of a byte -> one in each half.
template <class T>
__device__ __forceinline__ u32 codes_of_byte(u32 byte) {
    constexpr int UP = SIZES<T> == SIZES<f16> ? 9 : 6;
    const u32 spread = (byte & 0xFF) * 0x1001u;
    return and_or(spread << UP, SIZES<T>, (spread << 12) & SIGNS);
}

// Of the rows r and r + 8 that a lane has.
struct PairOfScales {
    u32 low, high;
};

// Of a word of w16x64: the half's pairs of columns, of both rows.
template <class T, class Scales>
__device__ __forceinline__ void dequantize_half(u32 word, const PairOfScales& scales, int half, u32* a) {
    a[0] = Scales::multiply(codes_of_word<T>(word, half, 0), scales.low);
    a[1] = Scales::multiply(codes_of_word<T>(word, half, 1), scales.high);
}

struct TiledCodes {
    uint4 codes;
    u32 scales;  // of rows r and r + 8, a byte each
};

__device__ __forceinline__ u32 word(const TiledCodes& packed, int v) {
    return v == 0 ? packed.codes.x : v == 1 ? packed.codes.y : v == 2 ? packed.codes.z : packed.codes.w;
}

template <class Scales>
__device__ __forceinline__ PairOfScales tiled_scales(const TiledCodes& packed) {
    return {Scales::tiled(packed.scales & 0xFF), Scales::tiled(packed.scales >> 8)};
}

// Where a lane's two lie among those of a tile.
template <class Scales>
__device__ __forceinline__ constexpr i32 scales_of_lane(i32 lane) {
    return Scales::BLOCK == 16 ? 2 * lane : lane / 4 * (128 / Scales::BLOCK) + lane % 4 * 16 / Scales::BLOCK * 2;
}

}  // namespace
