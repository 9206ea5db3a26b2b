// MXFP4: codes of e2m1, and for 32 of them a block scale e8m0, 2^(byte - 127); 255 is NaN. Both
// layouts store it as it is.
//
// Scales have a wider range than products of 16 bits: what lies beyond is named below. A trained
// weight's scales lie within: the largest weight of a block is 4 to 8 times its scale.
#pragma once

#include "weights/e2m1.cuh"

namespace {

constexpr u32 BOTH = 0x10001;  // one in each half

// For a byte in each half: 0x100 where it is 255, else 0.
__device__ __forceinline__ u32 bit_8_of_nan(u32 two) { return (two + BOTH) & 0x100 * BOTH; }

template <class T>
struct Mxfp4Scales;

// Fragments hold weight * 2^-60; RESCALE undoes it. Weights with scales of 2^-72 to 2^61 are exact.
// Larger scales count as 2^61; with smaller ones weights are rounded to multiples of 2^-73.
template <>
struct Mxfp4Scales<bf16> : ScaledPairs<bf16> {
    using Outer = NoOuterScale;
    static constexpr int BLOCK = 32;
    static constexpr float TILED_RESCALE = 0x1p60f, LINEAR_RESCALE = TILED_RESCALE;

    static __device__ __forceinline__ u32 tiled(u32 two) {
        constexpr u32 UP = 66, MAX = 254 - UP;
        const u32 nan = bit_8_of_nan(two);  // 254 becomes 255, and the mantissa is not zero
        return __vminu2(two, MAX * BOTH) * 0x80 + UP * BOTH * 0x80 + nan - (nan >> 2);
    }

    static __device__ __forceinline__ u32 linear(u32 byte) { return tiled(byte * BOTH); }
};

// Fragments hold weight * 2^5; RESCALE undoes it. Weights with scales of 2^-21 to 2^8 are exact.
// Larger scales count as 2^8, smaller ones as zero. Codes are read as 2^-14 of their value, and are
// multiplied by 2^12 first: float16 has too few powers of two to do that in the scale.
template <>
struct Mxfp4Scales<f16> {
    using Outer = NoOuterScale;
    static constexpr int BLOCK = 32;
    static constexpr float TILED_RESCALE = 0x1p-5f, LINEAR_RESCALE = TILED_RESCALE;

    static __device__ __forceinline__ u32 tiled(u32 two) {
        constexpr u32 ZERO = 105, MAX = ZERO + 30;
        return (__vminu2(__vmaxu2(two, ZERO * BOTH), MAX * BOTH) - ZERO * BOTH) * 0x400 +
               bit_8_of_nan(two) * 6;  // 30 becomes 31
    }

    static __device__ __forceinline__ u32 linear(u32 byte) { return tiled(byte * BOTH); }

    static __device__ __forceinline__ u32 multiply(u32 codes, u32 scale) {
        constexpr u32 UP = 0x6C006C00;  // 2^12
        return multiply_pair<f16>(multiply_pair<f16>(codes, UP), scale);
    }
};

template <class T>
using Mxfp4Tiled = FourBitTiled<E2m1<T, Mxfp4Scales<T>>>;
template <class T, class Order = LinearOrder>
using Mxfp4Linear = FourBitLinear<E2m1<T, Mxfp4Scales<T>>, Order>;

}  // namespace
