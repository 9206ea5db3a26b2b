// One row of bfloat16 activations by e2m1 codes with AVX-512 VNNI: sums of blocks in integers,
// exactly. For CPUs whose products of bfloat16 take longer than those of bytes.
//
// Twice a code is an integer, -12 to 12. Sixteen activations times a power of two, their own, are
// integers too, which have so many digits to the base 256, each a byte of -128 to 127. Three digits
// hold bfloat16s down to 2^-15 times the largest of their sixteen, four down to 2^-23; a row with
// others is multiplied in float32.
//
// 256 activations are packed as vectors of bytes, lane i of 32 bits those of block i, as the codes
// come out of look-ups: of digit 0, 1, ... codes 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15. Look-ups
// make codes 12 larger, since one factor must not be negative; the sums begin at what that adds.
#pragma once

#include "avx512.h"

namespace {

template <class Weight_>
struct Avx512Digits {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Activation = bf16;
    using Packed = u32;
    using InFloats = Avx512Dots<Avx512Run, 1, Weight>;
    static constexpr int SMALL_M = 1, MIN_EXPONENT = InFloats::MIN_EXPONENT,
                         MAX_EXPONENT = InFloats::MAX_EXPONENT;
    static constexpr i64 BLOCK = Weight::BLOCK, RUN_CODES = 256;

    // How the row is packed: DIGITS, or 0 for float32; then its runs, or its numbers.
    static constexpr i64 HEADER = 16;  // words

    // Of 256 activations. `exponent`: what is added to the bits of a scale, moved to where float32
    // has them.
    template <int DIGITS>
    struct Run {
        u32 digits[DIGITS][4][16];
        i32 begin[DIGITS][16], exponent[16];
    };

    static void pack_small_m(const bf16* x, i64, Packed* packed, i64, i64 K) {
        packed[0] = pack<3>(x, packed + HEADER, K) ? 3 : pack<4>(x, packed + HEADER, K) ? 4 : 0;
        if (packed[0] != 0) return;
        float *at = reinterpret_cast<float*>(packed + HEADER),
              *wide = at + (K + RUN_CODES - 1) / RUN_CODES * RUN_CODES;
        for (i64 k = 0; k < K; ++k) wide[k] = widen(x[k]);
        InFloats::pack_small_m(wide, 0, at, 0, K);
    }

    static void small_m(int, const Columns& c, const Columns& next, const Packed* x, i64, i64 K,
                        float* out, i64 out_stride) {
        switch (x[0]) {
            case 3:
                return multiply<3>(c, next, x + HEADER, K, out);
            case 4:
                return multiply<4>(c, next, x + HEADER, K, out);
            default:
                return InFloats::template small_m_rows<1, 1>(
                    c, next, reinterpret_cast<const float*>(x + HEADER), K, out, out_stride);
        }
    }

  private:
    static constexpr i32 LEAST_EXPONENT = -60;  // of a block's largest activation

    // False if a block has activations that so many digits don't hold.
    template <int DIGITS>
    static bool pack(const bf16* x, Packed* packed, i64 K) {
        constexpr i32 BITS = 8 * DIGITS - 2;
        Run<DIGITS>* run = reinterpret_cast<Run<DIGITS>*>(packed);
        const __m512i ulp = _mm512_set1_epi32(1 << 17);  // of a bfloat16 that has lost its sign
        __mmask16 bad = 0;
        for (i64 k0 = 0; k0 < K; k0 += RUN_CODES, ++run) {
            __m512i numbers[16], lanes[16];
            for (i64 i = 0; i < 16; ++i) {
                const auto* at = reinterpret_cast<const __m256i*>(x + k0 + 16 * i);
                numbers[i] =
                    k0 + 16 * i < K
                        ? _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)), 16)
                        : _mm512_setzero_si512();
            }
            transpose_vectors(numbers, lanes);
            __m512i largest = _mm512_setzero_si512();
            for (int j = 0; j < 16; ++j)
                largest = _mm512_max_epu32(largest, _mm512_slli_epi32(lanes[j], 1));
            const __mmask16 some = _mm512_test_epi32_mask(largest, largest);
            // of the next larger number: the largest digits are 127, not 128
            const __m512i exponent = _mm512_sub_epi32(
                _mm512_srli_epi32(_mm512_add_epi32(largest, ulp), 24), _mm512_set1_epi32(127));
            bad |= _mm512_mask_cmplt_epi32_mask(some, exponent, _mm512_set1_epi32(LEAST_EXPONENT));
            const __m512i down = _mm512_maskz_sub_epi32(
                some, exponent, _mm512_set1_epi32(BITS));  // integers times 2^down are activations
            const __m512 up = _mm512_castsi512_ps(
                _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127), down), 23));
            for (int j = 0; j < 16; ++j) {
                const __m512 scaled = _mm512_mul_ps(_mm512_castsi512_ps(lanes[j]), up);
                lanes[j] = _mm512_cvtps_epi32(scaled);
                bad |= _mm512_cmp_ps_mask(_mm512_cvtepi32_ps(lanes[j]), scaled, _CMP_NEQ_UQ);
            }
            const __m512i half = _mm512_set1_epi32(128), byte = _mm512_set1_epi32(255);
            for (int digit = 0; digit < DIGITS; ++digit) {
                __m512i sum = _mm512_setzero_si512();
                for (int v = 0; v < 4; ++v) {
                    __m512i bytes = _mm512_setzero_si512();
                    for (int j = 3; j >= 0; --j) {
                        __m512i& rest = lanes[v / 2 * 8 + v % 2 + 2 * j];
                        const __m512i above = _mm512_srai_epi32(_mm512_add_epi32(rest, half), 8);
                        bytes = _mm512_or_si512(_mm512_slli_epi32(bytes, 8),
                                                _mm512_and_si512(rest, byte));
                        sum = _mm512_add_epi32(sum,
                                               _mm512_sub_epi32(rest, _mm512_slli_epi32(above, 8)));
                        rest = above;
                    }
                    _mm512_store_si512(run->digits[digit][v], bytes);
                }
                _mm512_store_si512(run->begin[digit],
                                   _mm512_mullo_epi32(sum, _mm512_set1_epi32(-LARGEST)));
            }
            const __m512i all = _mm512_add_epi32(
                down,
                _mm512_set1_epi32(Weight::SCALE_EXPONENT - 1));  // codes are twice what they are
            _mm512_store_si512(run->exponent, _mm512_slli_epi32(all, 23));
            if (bad != 0) return false;
        }
        return true;
    }

    static constexpr int LARGEST = 12;  // of a code, twice

    struct alignas(64) Codes {
        u8 of[64];  // look-ups take six bits, of which four belong to the code

        constexpr Codes() : of() {
            for (int i = 0; i < 64; ++i) of[i] = u8(int(2 * E2M1[i & 15]) + LARGEST);
        }
    };
    static constexpr Codes CODES{};

    // Lane i: the sum of block i, as float32.
    template <int DIGITS>
    [[gnu::always_inline]] static __m512 products(__m512i first, __m512i second,
                                                  const Run<DIGITS>& run) {
        const __m512i table = _mm512_load_si512(CODES.of);
        __m512i w[4];  // 8 codes of each block, then the other 8
        for (int half = 0; half < 2; ++half) {
            const auto* order = half == 0 ? TABLES.even : TABLES.odd;
            const __m512i codes =
                _mm512_permutex2var_epi32(first, _mm512_load_si512(order), second);
            w[2 * half] = _mm512_permutexvar_epi8(codes, table);
            w[2 * half + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), table);
        }
        __m512i sum[DIGITS];
        for (int digit = 0; digit < DIGITS; ++digit) {
            sum[digit] = _mm512_load_si512(run.begin[digit]);
            for (int v = 0; v < 4; ++v)
                sum[digit] =
                    _mm512_dpbusd_epi32(sum[digit], w[v], _mm512_load_si512(run.digits[digit][v]));
        }
        const auto joined = [](__m512i low, __m512i high) {
            return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
        };
        if constexpr (DIGITS == 3) {
            return _mm512_cvtepi32_ps(joined(sum[0], joined(sum[1], sum[2])));
        } else {
            const __m512 low = _mm512_cvtepi32_ps(joined(sum[0], sum[1])),
                         high = _mm512_cvtepi32_ps(joined(sum[2], sum[3]));
            return _mm512_fmadd_ps(high, _mm512_set1_ps(65536.f), low);
        }
    }

    template <int DIGITS>
    static void multiply(const Columns& c, const Columns& next, const Packed* x, i64 K,
                         float* out) {
        alignas(64) __m512 sums[LANES];
        for (int n = 0; n < LANES; ++n) {
            const auto* run = reinterpret_cast<const Run<DIGITS>*>(x);
            const u8 *codes = c.codes[n], *scales = c.scales[n];
            const i64 to_next = next.codes[n] - codes, to_next_scales = next.scales[n] - scales;
            __m512 sum = _mm512_setzero_ps();
            for (i64 k = 0; k < K; k += 64 * BLOCK) {
                i64 left = std::min(64 * BLOCK, K - k);
                Weight::fetch_line(scales + to_next_scales);
                if (are_shifted(scales, left / BLOCK)) {
                    for (; left >= RUN_CODES; left -= RUN_CODES)
                        sum = shifted<DIGITS, true>(codes, to_next, scales, RUN_CODES, *run++, sum);
                    if (left > 0)
                        sum = shifted<DIGITS, false>(codes, to_next, scales, left, *run, sum);
                    continue;
                }
                for (const i64 byte : {i64(0), left / 2 - 1})
                    _mm_prefetch(reinterpret_cast<const char*>(codes + to_next + byte),
                                 _MM_HINT_T1);
                sum = any<DIGITS>(codes, scales, left, run, sum);
                codes += left / 2, scales += left / BLOCK;
                run += (left + RUN_CODES - 1) / RUN_CODES;
            }
            sums[n] = sum;
        }
        _mm512_storeu_ps(out, _mm512_mul_ps(InFloats::total(sums), _mm512_load_ps(c.factor)));
    }

    // A run whose scales are shifted, or the `left` codes that a row ends with; goes on to the
    // next.
    template <int DIGITS, bool WHOLE>
    [[gnu::always_inline]] static __m512 shifted(const u8*& codes, i64 to_next, const u8*& scales,
                                                 i64 left, const Run<DIGITS>& run, __m512 sum) {
        __m512i half[2];
        for (i64 i = 0; i < 2; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + to_next + 64 * i), _MM_HINT_T1);
            half[i] =
                WHOLE ? _mm512_loadu_si512(codes + 64 * i) : load_some(codes, 64 * i, left / 2);
        }
        const __m512 sums = products<DIGITS>(half[0], half[1], run);
        const __m512i bits = scales_of_run(scales, WHOLE ? RUN_CODES / BLOCK : left / BLOCK);
        const __m512 scale = _mm512_castsi512_ps(_mm512_add_epi32(
            _mm512_slli_epi32(bits, Weight::SCALE_SHIFT), _mm512_load_si512(run.exponent)));
        codes += left / 2, scales += left / BLOCK;
        // past the end of the row, scales may be no numbers
        return WHOLE ? _mm512_fmadd_ps(sums, scale, sum)
                     : _mm512_mask3_fmadd_ps(sums, scale, sum, __mmask16(first_of(left / 16)));
    }

    // Up to 64 blocks with any scales.
    template <int DIGITS>
    [[gnu::noinline, gnu::cold]] static __m512 any(const u8* codes, const u8* scales, i64 count,
                                                   const Run<DIGITS>* run, __m512 sum) {
        const auto all = Scales<Weight>::of(load_some(scales, 0, count / BLOCK));
        for (i64 k = 0; k < count; k += RUN_CODES, ++run) {
            const __m512 sums = products<DIGITS>(load_some(codes, k / 2, count / 2),
                                                 load_some(codes, k / 2 + 64, count / 2), *run);
            const __m512i power =
                _mm512_add_epi32(_mm512_load_si512(run->exponent),
                                 _mm512_set1_epi32((127 - Weight::SCALE_EXPONENT) << 23));
            sum = _mm512_fmadd_ps(
                sums, _mm512_mul_ps(all.of_run(int(k / RUN_CODES)), _mm512_castsi512_ps(power)),
                sum);
        }
        return sum;
    }

    // Whether the bits of so many scales are those of float32, but for the exponent's bias.
    static bool are_shifted(const u8* scales, i64 count) {
        const __m512i above = _mm512_sub_epi8(load_some(scales, 0, count),
                                              _mm512_set1_epi8(char(Weight::FIRST_SHIFTED)));
        return _mm512_mask_cmpgt_epu8_mask(
                   first_of(count), above,
                   _mm512_set1_epi8(char(Weight::LAST_SHIFTED - Weight::FIRST_SHIFTED))) == 0;
    }

    // `count` scales of 256 codes, that of 16 codes in each lane.
    static __m512i scales_of_run(const u8* scales, i64 count) {
        const __m128i all = _mm_maskz_loadu_epi8(__mmask16(first_of(count)), scales);
        if constexpr (BLOCK == 16) return _mm512_cvtepu8_epi32(all);
        const __m128i each_twice = _mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        return _mm512_cvtepu8_epi32(_mm_shuffle_epi8(all, each_twice));
    }
};

}  // namespace
