// MXFP4: e2m1 codes [G, N, K/2], an e8m0 scale for 32 of them [G, N, K/32]: 2^(byte - 127), but 255
// is NaN.
#pragma once

#ifdef __AVX512VBMI__
#include <immintrin.h>
#endif

#include "e2m1.h"

namespace {

struct MXFP4 : E2M1Weight<MXFP4> {
    static constexpr double BYTES = 0.53125;
    static constexpr i64 BLOCK = 32;
    static constexpr int FIRST = 106, LAST = 132;  // bytes of scales in range
    static constexpr int MIN_EXPONENT = FIRST - 128, MAX_EXPONENT = LAST - 127 + 3;

    static float scale(u8 byte) { return e8m0_(byte); }

    static auto factors(const Problem&, i64) {
        return [](i64) { return 1.f; };
    }

    // Scales that float16 holds, with room for the codes; 0 is as good where it scales zeros only,
    // as quantizers write it.
    static bool scales_in_range(const WorkTile& work_tile) {
        const i64 blocks = work_tile.p->K / BLOCK;
        for (i64 column_block = 0; column_block < work_tile.column_blocks(); ++column_block) {
            if (!in_range(work_tile.columns<MXFP4>(column_block), blocks)) return false;
        }
        return true;
    }

    static void fetch_scales(const WorkTile& work_tile) {
        if constexpr (!IS_LINEAR<Order>) return;  // to fetch them would be to copy them
        const i64 bytes = work_tile.p->K / BLOCK;
        for (i64 column_block = 0; column_block < work_tile.column_blocks(); ++column_block) {
            const Columns c = work_tile.columns<MXFP4>(column_block);
            for (int i = 0; i < LANES; ++i) {
                for (i64 at = 0; at < bytes; at += 64) __builtin_prefetch(c.scales[i] + at, 0, 2);
            }
        }
    }

    static bool matrix_in_range(const Problem& p, i64 g) {
        for (i64 first = 0; first < p.N; first += LANES) {
            const auto row = [&](i64 i) { return std::min(first + i, p.N - 1); };
            if (!in_range(open(p, g, row), p.K / BLOCK)) return false;
        }
        return true;
    }

#ifdef __AVX512VBMI__
    static void halves(__m512i bytes, __m512i& low, __m512i& high) {
        const __mmask64 ends = _mm512_cmple_epu8_mask(_mm512_add_epi8(bytes, _mm512_set1_epi8(1)),
                                                      _mm512_set1_epi8(1));  // 0 and 255
        high = _mm512_and_si512(_mm512_srli_epi16(bytes, 1), _mm512_set1_epi8(0x7F));
        low = _mm512_and_si512(_mm512_slli_epi16(bytes, 7), _mm512_set1_epi8(char(0x80)));
        low = _mm512_mask_add_epi8(low, ends, low, _mm512_set1_epi8(0x40));
    }

    static constexpr int FIRST_SHIFTED = FIRST, LAST_SHIFTED = LAST, SCALE_SHIFT = 23,
                         SCALE_EXPONENT = 0;
    static constexpr bool POWERS_OF_TWO = true;

    // FIRST is 2^-13. A scale of 0, or none, becomes a number too, times zeros.
    static constexpr int F16_CODE = 0, F16_WEIGHT = 127 - 13 - FIRST, FIRST_HARD = 256;
    static __m512i f16_scale(__m512i upper) {
        return _mm512_sub_epi16(_mm512_slli_epi16(upper, 2),
                                _mm512_set1_epi16(short((FIRST - 2) << 10)));
    }
    static __m512i hard_f16_scale(__m512i upper) { return f16_scale(upper); }
    static bool is_nan(u8) { return false; }  // none in range
#endif

  private:
    // Sixteen rows: rows end with some bytes that are seen twice, rather than with some alone.
    static bool in_range(const Columns& c, i64 blocks) {
        constexpr int WIDTH = 32;
        using Lanes [[gnu::vector_size(WIDTH)]] = u8;
        Lanes above{}, some = Lanes{} + FIRST;
        for (const u8* scales : c.scales) {
            for (i64 at = 0; at < blocks; at += WIDTH) {
                if (blocks < WIDTH)
                    std::memcpy(&some, scales, std::size_t(blocks));
                else
                    std::memcpy(&some, scales + std::min(at, blocks - WIDTH), WIDTH);
                const Lanes size = some - FIRST;
                above = size > above ? size : above;
            }
        }
        u64 words[WIDTH / 8];
        const Lanes bad = Lanes(above > LAST - FIRST);
        std::memcpy(words, &bad, WIDTH);
        if (!(words[0] | words[1] | words[2] | words[3])) return true;
        for (int i = 0; i < LANES; ++i) {
            if (!in_range_but_for_zeros(c.scales[i], c.codes[i], blocks)) return false;
        }
        return true;
    }

    static bool in_range_but_for_zeros(const u8* scales, const u8* codes, i64 blocks) {
        for (i64 b = 0; b < blocks; ++b, codes += BLOCK / 2) {
            const bool in_range = scales[b] >= FIRST && scales[b] <= LAST;
            const auto not_zero = [](u8 two) { return (two & 0x77) != 0; };
            if (!in_range && (scales[b] != 0 || std::any_of(codes, codes + BLOCK / 2, not_zero)))
                return false;
        }
        return true;
    }
};

}  // namespace

using Weight = MXFP4;
