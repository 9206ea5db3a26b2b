// Weights of 8-bit floats with one scale for 128 of a row or more, such as FP8, by AVX-512 with
// products of float32. Sums of 128 products are multiplied by their scale.
//
// 64 codes of a row are looked up as the low and the high bytes of bfloat16, which has each
// exactly; unpacking these makes two vectors of pairs: of codes 16 q .. 16 q + 7 in lane q, and of
// the eight after them. Either half of a pair is a float32 after a shift or without one.
// Activations are packed in the order of what comes out, so no weight is ever moved.
#pragma once

#include "dequantized.h"

namespace {

template <class Weight, class = void>
constexpr bool ARE_BYTES = false;
template <class Weight>
constexpr bool ARE_BYTES<Weight, std::void_t<decltype(Weight::ARE_BYTES)>> = Weight::ARE_BYTES;

#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

// The bytes of the bfloat16 of each code without its sign.
template <class Weight>
struct alignas(64) ByteTable {
    u8 low[128], high[128];

    ByteTable() : low(), high() {
        for (int code = 0; code < 128; ++code) {
            const u32 bits = as_bits(Weight::Codes::TABLE[code]);
            low[code] = u8(bits >> 16), high[code] = u8(bits >> 24);
        }
    }
};

template <class Weight>
const ByteTable<Weight> BYTE_TABLE;

template <class Weight_>
struct Avx512Bytes : Avx512F32 {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Scales = typename Weight::Scales;
    static constexpr int SMALL_M = 8, MIN_EXPONENT = -60, MAX_EXPONENT = 60;
    static constexpr i64 BLOCK = 128, STEP = 64;

    // Of a row of activations, which ends with zeros. Rows do not lie a power of two apart: they
    // would meet in few places of the first-level cache.
    static i64 row_size(i64 K) { return (K + BLOCK - 1) / BLOCK * BLOCK + STEP; }

    static void pack_small_m(const float* x, i64 r, Packed* packed, i64, i64 K) {
        packed += r * row_size(K);
        for (i64 k = 0; k < row_size(K); ++k) {
            const i64 i = k % STEP, vector = i / 8 % 2 * 2 + i % 2, lane = i / 16 * 4 + i % 8 / 2;
            packed[k - i + vector * LANES + lane] = k < K ? x[k] : 0.f;
        }
    }

    static void small_m(int rows, const Columns& c, const Columns& next, const Packed* x, i64,
                        i64 K, float* out, i64 out_stride) {
        with_constant<1, 2, 3, 4, 6, 8>(
            rows, [&](auto r) { small_m_rows<r, r <= 4 ? 2 : 1>(c, next, x, K, out, out_stride); });
    }

  private:
    // WEIGHT_ROWS rows of the weight, which share what is loaded of the activations.
    template <int R, int WEIGHT_ROWS>
    static void small_m_rows(const Columns& c, const Columns& next, const Packed* x, i64 K,
                             float* out, i64 out_stride) {
        const Problem& p = *c.problem;
        const i64 stride = row_size(K);
        __m512i sums[R][LANES], columns[LANES];
        for (int n = 0; n < LANES; n += WEIGHT_ROWS) {
            __m512 sum[WEIGHT_ROWS][R] = {};
            const u8 *codes[WEIGHT_ROWS], *then[WEIGHT_ROWS];
            for (int i = 0; i < WEIGHT_ROWS; ++i) {
                codes[i] = Weight::codes(p, c.g, c.at[n + i]);
                then[i] = Weight::codes(p, next.g, next.at[n + i]);
            }
            const Scales scales[2] = {Scales::of(p, c.g, c.at[n]),
                                      Scales::of(p, c.g, c.at[n + WEIGHT_ROWS - 1])};
            const auto add_block = [&](i64 k, const auto& load) __attribute__((always_inline)) {
                __m512 part[WEIGHT_ROWS][2][R] = {};  // two chains
                for (i64 at = k; at < k + BLOCK; at += STEP) {
                    for (int i = 0; i < WEIGHT_ROWS; ++i) {
                        _mm_prefetch(reinterpret_cast<const char*>(then[i] + at), _MM_HINT_T1);
                        add(load(codes[i], at), x + at, stride, part[i]);
                    }
                }
                for (int i = 0; i < WEIGHT_ROWS; ++i) {
                    const __m512 scale = _mm512_set1_ps(scales[i].scale(k));
                    for (int r = 0; r < R; ++r)
                        sum[i][r] = _mm512_fmadd_ps(_mm512_add_ps(part[i][0][r], part[i][1][r]),
                                                    scale, sum[i][r]);
                }
            };
            i64 k = 0;
            for (; k + BLOCK <= K; k += BLOCK)
                add_block(k, [](const u8* row, i64 at) { return _mm512_loadu_si512(row + at); });
            if (k < K) add_block(k, [K](const u8* row, i64 at) { return load_some(row, at, K); });
            for (int r = 0; r < R; ++r) {
                for (int i = 0; i < WEIGHT_ROWS; ++i)
                    sums[r][n + i] = _mm512_castps_si512(sum[i][r]);
            }
        }
        for (int r = 0; r < R; ++r) {
            transpose_vectors(sums[r], columns);
            __m512 total = _mm512_setzero_ps();
            for (const __m512i column : columns)
                total = _mm512_add_ps(total, _mm512_castsi512_ps(column));
            _mm512_storeu_ps(out + r * out_stride, total);
        }
    }

    // The products of 64 codes and R rows of activations.
    template <int R>
    [[gnu::always_inline]] static void add(__m512i code, const Packed* x, i64 stride,
                                           __m512 (&part)[2][R]) {
        const auto& table = BYTE_TABLE<Weight>;
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), code,
                                                     _mm512_load_si512(table.low + 64)),
                      size = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), code,
                                                      _mm512_load_si512(table.high + 64)),
                      high = _mm512_ternarylogic_epi32(size, code, _mm512_set1_epi8(char(0x80)),
                                                       0xF8);  // size | (code & sign)
        for (int half = 0; half < 2; ++half) {
            const __m512i pairs =
                half == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high);
            const __m512i w[2] = {_mm512_slli_epi32(pairs, 16),
                                  _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xFFFF0000)))};
            for (int j = 0; j < 2; ++j) {
                for (int r = 0; r < R; ++r)
                    part[j][r] = Avx512F32::add(
                        w[j], _mm512_load_si512(x + r * stride + (2 * half + j) * LANES),
                        part[j][r]);
            }
        }
    }
};

template <class Weight>
struct BytesIsa : DequantizedIsa<F32, Pairs, Weight> {
    template <class A>
    using Fast = Kernels<SmallM<Avx512Bytes<Weight>>, typename BytesIsa::Wide>;
};

#else
template <class Weight>
using BytesIsa = DequantizedIsa<F32, Pairs, Weight>;
#endif

}  // namespace
