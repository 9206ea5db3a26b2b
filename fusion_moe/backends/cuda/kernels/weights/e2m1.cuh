// Codes of e2m1 with block scales of a byte, as formats that four_bits.cuh reads.
//
// A code's two exponent bits and its mantissa bit, put where a number of 16 bits has the lowest of
// its own exponent and the highest of its mantissa, are the code's value times a power of two,
// 2^-126 in bfloat16 and 2^-14 in float16: subnormal codes become subnormal numbers. Multiplied by
// the block scale, times a large power of two, they are the weight; both factors have few bits, so
// the product is exact.
#pragma once

#include "weights/four_bits.cuh"

namespace {

constexpr u32 SIGNS = 0x80008000;

// The bits in which a pair of codes has its exponents and mantissas.
template <class T>
constexpr u32 SIZES = 0x01C001C0;
template <>
constexpr u32 SIZES<f16> = 0x0E000E00;

// Returns two codes of a word of a tile: those of one half of the columns, of row r or r + 8 (i).
template <class T>
__device__ __forceinline__ u32 codes_of_word(u32 word, int half, int i);

template <>
__device__ __forceinline__ u32 codes_of_word<bf16>(u32 word, int half, int i) {
    if (half == 0) return (i == 0 ? word : word * 64u) & (SIGNS | SIZES<bf16>);
    if (i == 0) return __funnelshift_l(word, word, 12) & (SIGNS | SIZES<bf16>);
    return and_or(word >> 6, 0x01000100u, (word * 4u) & 0x80C080C0u);
}

// The layout is made for bfloat16: here a code's sign and the rest of it move by different
// distances.
template <>
__device__ __forceinline__ u32 codes_of_word<f16>(u32 word, int half, int i) {
    if (half == 0)
        return i == 0 ? and_or(word, SIGNS, (word * 8u) & SIZES<f16>)
                      : and_or(word * 64u, SIGNS, (word * 512u) & SIZES<f16>);
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

// How scales are multiplied that need no more than one product.
template <class T>
struct ScaledPairs {
    static __device__ __forceinline__ u32 multiply(u32 codes, u32 scale) {
        return multiply_pair<T>(codes, scale);
    }
};

// What the bytes of block scales mean, an encoding says (Scales_):
//
//     Outer, BLOCK, TILED_RESCALE, LINEAR_RESCALE   as formats have them
//     tiled(two)                                    two scales as w16x64 stores them, a byte in
//     each half, times a power of two linear(byte)                                  a pair of the
//     scale, as the linear layout stores it, times a power of two multiply(codes, scale) a pair of
//     weights over a power of two, TILED_RESCALE or LINEAR_RESCALE
template <class T, class Scales_>
struct E2m1 : Scales_ {
    using Scale = u8;
    using Scales = PairOfScales;

    static __device__ __forceinline__ u32 ready(u32 word, int byte) {
        return Scales_::tiled(__byte_perm(word, 0, 0x4040 | (byte + 1) << 8 | byte));
    }

    static __device__ __forceinline__ Scales tiled(u32 low, u32 high) { return {low, high}; }
    static __device__ __forceinline__ Scales linear(u32 low, u32 high) {
        return {Scales_::linear(low), Scales_::linear(high)};
    }

    static __device__ __forceinline__ constexpr bool beside(int half, int i) {
        return half == 1 && i == 0;
    }
    static __device__ __forceinline__ u32 codes(u32 word, int half, int i) {
        return codes_of_word<T>(word, half, i);
    }

    static __device__ __forceinline__ u32 weights(u32 codes, const Scales& scales, int i) {
        return Scales_::multiply(codes, i == 0 ? scales.low : scales.high);
    }

    static __device__ __forceinline__ u32 linear_pair(u32 byte, const Scales& scales, bool row_8) {
        return Scales_::multiply(codes_of_byte<T>(byte), row_8 ? scales.high : scales.low);
    }
};

}  // namespace
