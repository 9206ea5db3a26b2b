// INT4: integers of -8 to 7 as codes, 8 more, and for 32 of them a bfloat16 block scale. Layouts
// store the scale as it is; w16x64 has the codes of a pair of columns as nibbles at the same place
// of both halves of a word: row r below row r + 8, half 0 below half 1.
//
// A weight of at most 11 significant bits is exact in float16; bfloat16 rounds it to 8, once, as it
// does a model that is dequantized to it.
#pragma once

#include "weights/four_bits.cuh"

namespace {

// The codes of a word of w16x64 that belong to one half of the columns and to row r or r + 8 (i).
__device__ __forceinline__ u32 nibbles(u32 word, int half, int i) {
    return word >> 8 * half & (i == 0 ? 0x000F000Fu : 0x00F000F0u);
}

// The two codes of a byte, one in each half of a word.
__device__ __forceinline__ u32 nibbles_of_byte(u32 byte) {
    return (byte & 0xFF) * 0x1001u & 0x000F000Fu;
}

template <class T>
struct Int4;

// Fragments hold weight * 2^-60; RESCALE undoes it. The bits of a code q (or of 16 q), read as a
// bfloat16, are q * 2^-133, which is subnormal or just above. One fma computes q * scale - 8 *
// scale. Scales of 2^-66 to 2^54 are in range; with others weights are infinite or have fewer bits.
template <>
struct Int4<bf16> {
    using Scale = u16;
    using Outer = NoOuterScale;
    static constexpr int BLOCK = 32;
    static constexpr float TILED_RESCALE = 0x1p60f, LINEAR_RESCALE = TILED_RESCALE;
    static constexpr u32 UP = 0x64006400, UP_OF_16 = 0x62006200,
                         DOWN = 0xA300A300;  // 2^73, 2^69, -2^-57

    struct Scales {
        u32 low, high, offset_low, offset_high;
    };

    static __device__ __forceinline__ u32 ready(u32 word, int) { return word; }
    static __device__ __forceinline__ Scales tiled(u32 low, u32 high) {
        return scales(low, high, UP_OF_16);
    }
    static __device__ __forceinline__ Scales linear(u32 low, u32 high) {
        return scales(low * 0x10001u, high * 0x10001u, UP);
    }

    static __device__ __forceinline__ constexpr bool beside(int, int) { return false; }
    static __device__ __forceinline__ u32 codes(u32 word, int half, int i) {
        return nibbles(word, half, i);
    }

    static __device__ __forceinline__ u32 weights(u32 codes, const Scales& scales, int i) {
        return i == 0 ? fma_pair<bf16>(codes, scales.low, scales.offset_low)
                      : fma_pair<bf16>(codes, scales.high, scales.offset_high);
    }

    static __device__ __forceinline__ u32 linear_pair(u32 byte, const Scales& scales, bool row_8) {
        return weights(nibbles_of_byte(byte), scales, row_8);
    }

  private:
    static __device__ __forceinline__ Scales scales(u32 low, u32 high, u32 up_high) {
        return {multiply_pair<bf16>(low, UP), multiply_pair<bf16>(high, up_high),
                multiply_pair<bf16>(low, DOWN), multiply_pair<bf16>(high, DOWN)};
    }
};

// Fragments hold weight * 2^5; RESCALE undoes it. Weights with scales of 2^-22 to 255 are exact;
// with smaller scales they are rounded to multiples of 2^-29, with larger ones some are infinite.
// A code (or 16 times a code) in the mantissa of 1024 is the number 1024 + code.
template <>
struct Int4<f16> {
    using Scale = u16;
    using Outer = NoOuterScale;
    static constexpr int BLOCK = 32;
    static constexpr float TILED_RESCALE = 0x1p-5f, LINEAR_RESCALE = TILED_RESCALE;
    static constexpr u32 EXPONENT = 0x64006400, ONE = 0x3C003C00,
                         OFFSET = 0xE408E408;                                // 1024, 1, -1032
    static constexpr u32 SIXTEENTH = 0x2C002C00, OFFSET_OF_16 = 0xD480D480;  // 1 / 16, -72
    using Scales = PairOfScales;

    static __device__ __forceinline__ u32 ready(u32 word, int) {
        return scale(word & 0xFFFF) | scale(word >> 16) << 16;
    }
    static __device__ __forceinline__ Scales tiled(u32 low, u32 high) { return {low, high}; }
    static __device__ __forceinline__ Scales linear(u32 low, u32 high) {
        return {scale(low) * 0x10001u, scale(high) * 0x10001u};
    }

    static __device__ __forceinline__ constexpr bool beside(int, int) { return false; }
    static __device__ __forceinline__ u32 codes(u32 word, int half, int i) {
        return nibbles(word, half, i) | EXPONENT;
    }

    static __device__ __forceinline__ u32 weights(u32 codes, const Scales& scales, int i) {
        const u32 integers = i == 0 ? fma_pair<f16>(codes, ONE, OFFSET)
                                    : fma_pair<f16>(codes, SIXTEENTH, OFFSET_OF_16);
        return multiply_pair<f16>(integers, i == 0 ? scales.low : scales.high);
    }

    static __device__ __forceinline__ u32 linear_pair(u32 byte, const Scales& scales, bool row_8) {
        const u32 integers = fma_pair<f16>(nibbles_of_byte(byte) | EXPONENT, ONE, OFFSET);
        return multiply_pair<f16>(integers, row_8 ? scales.high : scales.low);
    }

  private:
    static __device__ __forceinline__ u32 scale(u32 bits) {
        return narrow<f16>(__uint_as_float(bits << 16) * 32.f).bits;
    }
};

template <class T>
using Int4Tiled = FourBitTiled<Int4<T>>;
template <class T>
using Int4Linear = FourBitLinear<Int4<T>>;

}  // namespace
