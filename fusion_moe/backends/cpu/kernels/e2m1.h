// Weights of e2m1 codes, two a byte, low nibble first, with a scale of one byte for each block of
// them along K, and a factor for each row: element = code * (scale * factor). What readers of them
// share; the ISA levels have vector code for them.
//
// A reader `Reader` derives from E2M1Weight<Reader>, and has beside BYTES and `scales_in_range`
//
//     BLOCK            codes that share a scale: 16 or 32
//     scale            of a byte; bfloat16 holds each exactly
//     factors          (p, g) -> a function of n: the factor of row n of matrix g
//     MIN_EXPONENT,
//     MAX_EXPONENT     2^MIN_EXPONENT <= |code * scale| < 2^MAX_EXPONENT for scales in range, but
//     for zeros matrix_in_range  whether the scales of a whole matrix are
//
// for AVX-512
//
//     halves           64 scales -> the low and the high bytes of their bfloat16, for every byte
//     there is FIRST_SHIFTED, LAST_SHIFTED     bytes from the first to the last, SCALE_SHIFT bits
//     further up, are float32 scales but for SCALE_EXPONENT, which is SCALE_SHIFT,     to be added
//     to the exponent SCALE_EXPONENT POWERS_OF_TWO    whether scales are exponents of two, and
//     nothing else
//
// and for AMX, where 2^F16_CODE times a code times what f16_scale makes of its scale is
// 2^F16_WEIGHT times the weight, in normal numbers of float16:
//
//     F16_CODE, F16_WEIGHT
//     f16_scale       scales in the upper bytes of 16-bit numbers, all below FIRST_HARD -> float16
//     FIRST_HARD      the least byte that f16_scale does not take; 256 if it takes all that are in
//     range hard_f16_scale  the same for bytes from there on too, except that a NaN may become any
//     number is_nan          whether a byte is
#pragma once

#if defined(__AVX512VBMI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "order.h"
#include "weight.h"

// The order of block scales, if not that of the linear layout: readers.py defines it.
#ifndef SCALE_ORDER
#define SCALE_ORDER LinearOrder
#endif

namespace {

// Sixteen codes, or their numbers.
#ifdef __AVX512VBMI__
inline __m512 numbers_of(const u8* codes) {
    return _mm512_permutexvar_ps(nibbles_of(codes), _mm512_loadu_ps(E2M1));
}

inline void scaled_numbers(const u8* codes, float step, float* out) {
    _mm512_storeu_ps(out, _mm512_mul_ps(numbers_of(codes), _mm512_set1_ps(step)));
}
#elif defined(__AVX2__)
inline void scaled_numbers(const u8* codes, float step, float* out) {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28),
                  sign = _mm256_set1_epi32(int(0x80000000));
    for (int half = 0; half < 2; ++half) {
        i32 eight;
        std::memcpy(&eight, codes + 4 * half, sizeof eight);
        const __m256i each = _mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts);
        const __m256 size =
            _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1), each);  // look-ups take three bits
        const __m256i minus = _mm256_and_si256(_mm256_slli_epi32(each, 28), sign);
        _mm256_storeu_ps(
            out + 8 * half,
            _mm256_mul_ps(_mm256_xor_ps(size, _mm256_castsi256_ps(minus)), _mm256_set1_ps(step)));
    }
}
#else
inline void scaled_numbers(const u8* codes, float step, float* out) {
    for (int i = 0; i < LANES; i += 2, ++codes)
        out[i] = E2M1[*codes & 15] * step, out[i + 1] = E2M1[*codes >> 4] * step;
}
#endif

template <class Reader>
struct E2M1Weight {
    static constexpr i64 ALIGNED = LANES;
    using Order = SCALE_ORDER;

    struct Columns {
        const u8* codes[LANES];
        const u8* scales[LANES];
        alignas(64) float factor[LANES];
    };

    template <class Row>
    static Columns open(const Problem& p, i64 g, Row row) {
        static_assert(Reader::BLOCK == 16 || Reader::BLOCK == 32,
                      "the kernels for e2m1 codes read block scales of 16 or 32 of them");
        Columns c;
        const auto factor = Reader::factors(p, g);
        const u8* codes = codes_of(p, g);
        const u8* scales = scales_of(p, g);
        [[maybe_unused]] i64 at[LANES];
        for (int i = 0; i < LANES; ++i) {
            const i64 n = row(i);
            c.codes[i] = codes + n * (p.K / 2);
            if constexpr (IS_LINEAR<Order>)
                c.scales[i] = scales + n * (p.K / Reader::BLOCK);
            else
                at[i] = n;
            c.factor[i] = factor(n);
        }
        if constexpr (!IS_LINEAR<Order>) Rows<Order>::of(scales, at, p.K / Reader::BLOCK, c.scales);
        return c;
    }

    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        const u8* codes = codes_of(p, g) + (n * p.K + k) / 2;
        const u8* scales = scales_of(p, g) + Order::of_row(n, p.K / Reader::BLOCK);
        const float factor = Reader::factors(p, g)(n);
        for (i64 i = 0; i < count; i += LANES) {
            const u8 scale = scales[Order::of_column(i64(u64(k + i) / Reader::BLOCK))];
            scaled_numbers(codes + i / 2, Reader::scale(scale) * factor, out + i);
        }
    }

    // The scale of element k of row n, of a matrix with these scales.
    static float scale_at(const u8* scales, i64 n, i64 k, i64 K) {
        return Reader::scale(scales[Order::of_row(n, K / Reader::BLOCK) +
                                    Order::of_column(i64(u64(k) / Reader::BLOCK))]);
    }

    static void fetch_scales(const WorkTile&) {}
    // Brings a line of a row's scales nearer; those that were copied are near. Inlined, or g++
    // takes it for a function without effect.
    [[gnu::always_inline]] static void fetch_line(const u8* scales) {
        if constexpr (IS_LINEAR<Order>) __builtin_prefetch(scales, 0, 2);
    }
    static void begin() { Rows<Order>::forget(); }
    static i64 contracted(const Problem& p) { return p.K; }

    static const u8* codes_of(const Problem& p, i64 g) {
        return static_cast<const u8*>(p.parts[0]) + g * p.N * (p.K / 2);
    }
    static const u8* scales_of(const Problem& p, i64 g) {
        return static_cast<const u8*>(p.parts[1]) + g * Order::size(p.N, p.K / Reader::BLOCK);
    }
};

// Activations whose products with codes and scales are normal numbers of float32, or 2^36 times
// smaller than the largest, and whose sums are finite.
template <class Weight>
constexpr int F32_MIN_EXPONENT = -90 - Weight::MIN_EXPONENT;
template <class Weight>
constexpr int F32_MAX_EXPONENT = 102 - Weight::MAX_EXPONENT;

template <class Weight>
constexpr bool HAS_E2M1_CODES = std::is_base_of<E2M1Weight<Weight>, Weight>::value;

}  // namespace
