// Weights of e2m1 codes, two a byte, low nibble first, with a scale of one byte for each block of them along K, and a factor for each row:
// element = code * (scale * factor). What readers of them share; the tiers have vector code for them.
//
// A reader `Reader` derives from E2M1Weight<Reader>, and has beside BYTES and `scales_in_range`
//
//     BLOCK         codes that share a scale: 16 or 32
//     scale         of a byte; bfloat16 holds each exactly
//     factors       (p, g) -> a function of n: the factor of row n of matrix g
//     MIN_EXPONENT,
//     MAX_EXPONENT  2^MIN_EXPONENT <= |code * scale| < 2^MAX_EXPONENT for scales in range, but for zeros
//
// for AVX-512
//
//     halves        64 scales -> the low and the high bytes of their bfloat16, for every byte there is
//
// and for AMX, where 2^F16_CODE times a code times what f16_scale makes of its scale is 2^F16_WEIGHT times the weight, in normal numbers
// of float16:
//
//     F16_CODE, F16_WEIGHT
//     f16_scale       scales in the upper bytes of 16-bit numbers, all below FIRST_HARD -> float16
//     FIRST_HARD      the least byte that f16_scale does not take; 256 if it takes all that are in range
//     hard_f16_scale  the same for bytes from there on too, except that a NaN may become any number
//     is_nan          whether a byte is
#pragma once

#include "weight.h"

namespace {

template <class Reader>
struct E2M1Weight {
    struct Columns {
        const u8* codes[LANES];
        const u8* scales[LANES];
        alignas(64) float factor[LANES];
    };

    template <class Row>
    static Columns open(const Problem& p, i64 g, Row row) {
        Columns c;
        const auto factor = Reader::factors(p, g);
        const u8* codes = codes_of(p, g);
        const u8* scales = scales_of(p, g);
        for (int i = 0; i < LANES; ++i) {
            const i64 n = row(i);
            c.codes[i] = codes + n * (p.K / 2);
            c.scales[i] = scales + n * (p.K / Reader::BLOCK);
            c.factor[i] = factor(n);
        }
        return c;
    }

    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        const u8* codes = codes_of(p, g) + (n * p.K + k) / 2;
        const u8* scales = scales_of(p, g) + (n * p.K + k) / Reader::BLOCK;
        const float factor = Reader::factors(p, g)(n);
        for (i64 i = 0; i < count; i += Reader::BLOCK) {
            const float step = Reader::scale(*scales++) * factor;
            for (i64 j = i; j < i + Reader::BLOCK; j += 2, ++codes) out[j] = E2M1[*codes & 15] * step, out[j + 1] = E2M1[*codes >> 4] * step;
        }
    }

    static i64 contracted(const Problem& p) { return p.K; }

    static const u8* codes_of(const Problem& p, i64 g) { return static_cast<const u8*>(p.parts[0]) + g * p.N * (p.K / 2); }
    static const u8* scales_of(const Problem& p, i64 g) { return static_cast<const u8*>(p.parts[1]) + g * p.N * (p.K / Reader::BLOCK); }
};

// Activations whose products with codes and scales are normal numbers of float32, or 2^36 times smaller than the largest, and whose sums are
// finite.
template <class Weight>
constexpr int F32_MIN_EXPONENT = -90 - Weight::MIN_EXPONENT;
template <class Weight>
constexpr int F32_MAX_EXPONENT = 102 - Weight::MAX_EXPONENT;

template <class Weight>
constexpr bool HAS_E2M1_CODES = std::is_base_of<E2M1Weight<Weight>, Weight>::value;

}  // namespace
