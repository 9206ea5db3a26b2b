// e2m1 codes by AVX2 with FMA and F16C: products of float32, whatever the activations are.
#pragma once

#include "avx2_f32.h"
#include "e2m1.h"

namespace {

// Scales of all bytes, to be broadcast from.
template <class Weight>
struct ScaleTable {
    float of[256];

    ScaleTable() {
        for (int byte = 0; byte < 256; ++byte) of[byte] = Weight::scale(u8(byte));
    }
};

template <class Weight>
const ScaleTable<Weight> SCALES;

template <class Weight_>
struct Avx2 : Avx2F32 {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    static constexpr int SMALL_M = 4, MIN_EXPONENT = F32_MIN_EXPONENT<Weight>,
                         MAX_EXPONENT = F32_MAX_EXPONENT<Weight>;
    static constexpr i64 BLOCK = Weight::BLOCK;

    // Of each block the even activations, then the odd ones; zeros up to a multiple of 64.
    static void pack_small_m(const float* x, i64 r, Packed* packed, i64 stride, i64 K) {
        packed += r * stride;
        for (i64 k = 0; k < K; k += 16) {
            for (int i = 0; i < 8; ++i)
                packed[k + i] = x[k + 2 * i], packed[k + 8 + i] = x[k + 2 * i + 1];
        }
        std::fill(packed + K, packed + (K + 63) / 64 * 64, 0.f);
    }

    // A row of the weight at a time, as it lies in memory. Each code is looked up as the high byte
    // of its float16, whose low byte is zero.
    template <int R>
    static void small_m_rows(const Columns& c, const Packed* x, i64 stride, i64 K, float* out,
                             i64 out_stride) {
        for (int n = 0; n < LANES; ++n) {
            __m256 sum[R][2];
            for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
            i64 k = 0;
            for (; k + 64 <= K; k += 64)
                four_blocks<R>(c.codes[n] + k / 2, c.scales[n] + k / BLOCK, x + k, stride, sum);
            if (k < K) {
                u8 codes[32] = {}, scales[4] = {};
                std::memcpy(codes, c.codes[n] + k / 2, std::size_t(K - k) / 2);
                std::memcpy(scales, c.scales[n] + k / BLOCK, std::size_t(K - k) / BLOCK);
                four_blocks<R>(codes, scales, x + k, stride, sum);
            }
            for (int r = 0; r < R; ++r)
                out[r * out_stride + n] = total(_mm256_add_ps(sum[r][0], sum[r][1])) * c.factor[n];
        }
    }

    static void small_m(int rows, const Columns& c, const Columns&, const Packed* x, i64 stride,
                        i64 K, float* out, i64 out_stride) {
        with_constant<1, 2, 3, 4>(
            rows, [&](auto r) { small_m_rows<r>(c, x, stride, K, out, out_stride); });
    }

    static void dequantize(const Columns* c, const Columns* next, int, i64 K, Panel* panel) {
        const __m256 table = _mm256_loadu_ps(E2M1);  // look-ups take three bits: sizes
        const __m256i sign = _mm256_set1_epi32(int(0x80000000));
        for (i64 k = 0; k < K; k += 64) {
            for (int half = 0; half < 2; ++half) {
                const int first = 8 * half;
                __m256 word[8];
                words_of(c->codes + first, k / 2, K / 2, word);
                for (int i = first; i < first + 8; ++i)
                    _mm_prefetch(reinterpret_cast<const char*>(next->codes[i] + k / 2),
                                 _MM_HINT_T1);
                for (i64 b = 0; b < 4 && k + 16 * b < K; ++b) {
                    alignas(32) float steps[8];
                    for (int i = 0; i < 8; ++i)
                        steps[i] =
                            SCALES<Weight>.of[c->scales[first + i][k / BLOCK + b * 16 / BLOCK]] *
                            c->factor[first + i];
                    const __m256 step = _mm256_load_ps(steps);
                    for (int j = 0; j < 16; ++j) {
                        const __m256i v = _mm256_castps_si256(word[2 * b + j / 8]);
                        const __m256 size =
                            _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(v, 4 * (j % 8)));
                        const __m256i minus =
                            _mm256_and_si256(_mm256_slli_epi32(v, 28 - 4 * (j % 8)), sign);
                        const __m256 w =
                            _mm256_mul_ps(_mm256_xor_ps(size, _mm256_castsi256_ps(minus)), step);
                        _mm256_store_ps(panel + (k + 16 * b + j) * LANES + first, w);
                    }
                }
            }
        }
    }

  private:
    // 64 codes of a row: the even codes of blocks 0 and 2, those of 1 and 3, the odd ones of 0 and
    // 2, those of 1 and 3.
    template <int R>
    static void four_blocks(const u8* codes, const u8* scales, const Packed* x, i64 stride,
                            __m256 (&sum)[R][2]) {
        alignas(16) static const u8 high[16] = {0x00, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46,
                                                0x80, 0xB8, 0xBC, 0xBE, 0xC0, 0xC2, 0xC4, 0xC6};
        const __m256i table =
            _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
        const __m256i zero = _mm256_setzero_si256(), nibble = _mm256_set1_epi8(15);
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(v, nibble));
        const __m256i odd =
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
        const __m256i evens[2] = {_mm256_unpacklo_epi8(zero, even),
                                  _mm256_unpackhi_epi8(zero, even)};
        const __m256i odds[2] = {_mm256_unpacklo_epi8(zero, odd), _mm256_unpackhi_epi8(zero, odd)};
        for (int b = 0; b < 4; ++b) {
            const __m256i pair[2] = {evens[b % 2], odds[b % 2]};
            const __m256 e = _mm256_cvtph_ps(b < 2 ? _mm256_castsi256_si128(pair[0])
                                                   : _mm256_extracti128_si256(pair[0], 1));
            const __m256 o = _mm256_cvtph_ps(b < 2 ? _mm256_castsi256_si128(pair[1])
                                                   : _mm256_extracti128_si256(pair[1], 1));
            const __m256 scale = _mm256_broadcast_ss(SCALES<Weight>.of + scales[b * 16 / BLOCK]);
            for (int r = 0; r < R; ++r) {
                const Packed* at = x + r * stride + 16 * b;
                const __m256 p = _mm256_fmadd_ps(o, _mm256_loadu_ps(at + 8),
                                                 _mm256_mul_ps(e, _mm256_loadu_ps(at)));
                sum[r][b % 2] = _mm256_fmadd_ps(p, scale, sum[r][b % 2]);
            }
        }
    }

    static float total(__m256 v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }

    // Bytes at .. at + 31 of eight rows of `size`, those past it zero -> 8 vectors: word w of every
    // row.
    static void words_of(const u8* const* row, i64 at, i64 size, __m256* out) {
        __m256 a[8];
        for (int i = 0; i < 8; ++i) {
            if (size - at >= 32) {
                a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(row[i] + at));
            } else {
                alignas(32) u8 some[32] = {};
                std::memcpy(some, row[i] + at, std::size_t(size - at));
                a[i] = _mm256_load_ps(reinterpret_cast<const float*>(some));
            }
        }
        transpose_vectors(a, out);
    }
};

template <class Weight>
struct Avx2Isa : VectorIsa {
    using Wide = Panels<Avx2<Weight>>;
    template <class A>
    using Fast = Kernels<SmallM<Avx2<Weight>>, Panels<Avx2<Weight>>>;
};

}  // namespace
