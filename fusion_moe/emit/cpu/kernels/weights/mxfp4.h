// MXFP4: e2m1 codes [G, N, K/2], an e8m0 scale for 32 of them [G, N, K/32]: 2^(byte - 127), but 255 is NaN.
#pragma once

#ifdef __AVX512VBMI__
#include <immintrin.h>
#endif

#include "e2m1.h"

namespace {

struct MXFP4 : E2M1Weight<MXFP4> {
    static constexpr double BYTES = 0.53125;
    static constexpr i64 BLOCK = 32;
    static constexpr int FIRST = 106, LAST = 132;  // bytes of usual scales
    static constexpr int SMALLEST = FIRST - 128, LARGEST = LAST - 127 + 3;

    // 2^-127 is subnormal, and bfloat16 holds it.
    static float scale(u8 byte) { return as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : u32(byte) << 23); }

    static auto factors(const Problem&, i64) {
        return [](i64) { return 1.f; };
    }

    // Scales that float16 holds, with room for the codes; 0 is as good where it scales zeros only, as quantizers write it.
    static bool usual(const Item& item) {
        const i64 blocks = item.p->K / BLOCK;
        for (i64 sub = 0; sub < item.subs(); ++sub) {
            const Columns c = item.columns<MXFP4>(sub);
            for (int i = 0; i < LANES; ++i) {
                if (!all_usual(c.scales[i], blocks) && !usual_but_for_zeros(c.scales[i], c.codes[i], blocks)) return false;
            }
        }
        return true;
    }

#ifdef __AVX512VBMI__
    static void halves(__m512i bytes, __m512i& low, __m512i& high) {
        const __mmask64 ends = _mm512_cmple_epu8_mask(_mm512_add_epi8(bytes, _mm512_set1_epi8(1)), _mm512_set1_epi8(1));  // 0 and 255
        high = _mm512_and_si512(_mm512_srli_epi16(bytes, 1), _mm512_set1_epi8(0x7F));
        low = _mm512_and_si512(_mm512_slli_epi16(bytes, 7), _mm512_set1_epi8(char(0x80)));
        low = _mm512_mask_add_epi8(low, ends, low, _mm512_set1_epi8(0x40));
    }

    // FIRST is 2^-13. A scale of 0, or none, becomes a number too, times zeros.
    static constexpr int F16_CODE = 0, F16_WEIGHT = 127 - 13 - FIRST, FIRST_HARD = 256;
    static __m512i f16_scale(__m512i upper) {
        return _mm512_sub_epi16(_mm512_slli_epi16(upper, 2), _mm512_set1_epi16(short((FIRST - 2) << 10)));
    }
    static __m512i hard_f16_scale(__m512i upper) { return f16_scale(upper); }
    static bool is_nan(u8) { return false; }  // no usual one
#endif

  private:
    static bool all_usual(const u8* scales, i64 blocks) {
        u8 least = 255, most = 0;
        for (i64 b = 0; b < blocks; ++b) least = std::min(least, scales[b]), most = std::max(most, scales[b]);
        return least >= FIRST && most <= LAST;
    }

    static bool usual_but_for_zeros(const u8* scales, const u8* codes, i64 blocks) {
        for (i64 b = 0; b < blocks; ++b, codes += BLOCK / 2) {
            const bool usual = scales[b] >= FIRST && scales[b] <= LAST;
            if (!usual && (scales[b] != 0 || std::any_of(codes, codes + BLOCK / 2, [](u8 two) { return (two & 0x77) != 0; }))) return false;
        }
        return true;
    }
};

}  // namespace

using Weight = MXFP4;
