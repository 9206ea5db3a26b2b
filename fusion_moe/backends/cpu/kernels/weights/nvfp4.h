// NVFP4: e2m1 codes [G, N, K/2], an e4m3 scale for 16 of them [G, N, K/16], a float32 scale for
// each run of rows [G, runs].
#pragma once

#ifdef __AVX512VBMI__
#include <immintrin.h>
#endif

#include "e2m1.h"

namespace {

struct NVFP4 : E2M1Weight<NVFP4> {
    static constexpr double BYTES = 0.5625;
    static constexpr i64 BLOCK = 16;
    static constexpr int MIN_EXPONENT = -10, MAX_EXPONENT = 12;

    static float scale(u8 byte) { return E4M3_VALUES[byte]; }

    static auto factors(const Problem& p, i64 g) {
        const float* of_runs = static_cast<const float*>(p.parts[2]) + g * p.runs;
        return [of_runs, runs = p.runs, run_rows = u32(p.N / p.runs)](i64 n) {
            return of_runs[runs == 1 ? 0 : u32(n) / run_rows];
        };
    }

    // Decode scales that keep products among the normal numbers, whatever the order of
    // multiplications.
    static bool scales_in_range(const WorkTile& work_tile) {
        return matrix_in_range(*work_tile.p, work_tile.group);
    }

    static bool matrix_in_range(const Problem& p, i64 g) {
        const float* of_runs = static_cast<const float*>(p.parts[2]) + g * p.runs;
        bool good = true;
        for (i64 s = 0; s < p.runs; ++s) {
            const float size = __builtin_fabsf(of_runs[s]);
            good = good && ((size >= 0x1p-60f && size <= 0x1p20f) || size == 0.f);
        }
        return good;
    }

#ifdef __AVX512VBMI__
    // The bytes of the bfloat16 of an e4m3 byte without its sign.
    struct alignas(64) Halves {
        u8 low[128], high[128];

        constexpr Halves() : low(), high() {
            for (int i = 0; i < 128; ++i)
                low[i] = u8(E4M3_VALUES.bits[i]), high[i] = u8(E4M3_VALUES.bits[i] >> 8);
        }
    };
    static const Halves HALVES;

    static void halves(__m512i bytes, __m512i& low, __m512i& high) {
        const __m512i sign = _mm512_and_si512(bytes, _mm512_set1_epi8(char(0x80)));
        high = _mm512_permutex2var_epi8(_mm512_load_si512(HALVES.high), bytes,
                                        _mm512_load_si512(HALVES.high + 64));
        low = _mm512_permutex2var_epi8(_mm512_load_si512(HALVES.low), bytes,
                                       _mm512_load_si512(HALVES.low + 64));
        high = _mm512_or_si512(high, sign);
    }

    // eeee mmm, four bits of exponent, are the bits of float32 but for the exponent's bias.
    static constexpr int FIRST_SHIFTED = 0x08, LAST_SHIFTED = 0x7E, SCALE_SHIFT = 20,
                         SCALE_EXPONENT = 120;
    static constexpr bool POWERS_OF_TWO = false;

    // s eeee mmm is 2^-8 times the scale as s 0eeee mmm 0000000.
    static constexpr int F16_CODE = 8, F16_WEIGHT = 0;
    static constexpr int FIRST_HARD =
        0x7F;  // NaN, and negative scales: the sign's copy is in the way
    static __m512i f16_scale(__m512i upper) { return _mm512_srli_epi16(upper, 1); }
    static __m512i hard_f16_scale(__m512i upper) {
        return _mm512_and_si512(_mm512_srai_epi16(upper, 1), _mm512_set1_epi16(short(0xBFFF)));
    }
    static bool is_nan(u8 byte) { return (byte & 0x7F) == 0x7F; }
#endif
};

#ifdef __AVX512VBMI__
constexpr NVFP4::Halves NVFP4::HALVES{};
#endif

}  // namespace

using Weight = NVFP4;
