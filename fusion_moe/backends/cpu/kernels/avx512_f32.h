// AVX-512 (F, BW, VL, DQ, VBMI): what its kernels share, and products of float32.
#pragma once

#include <immintrin.h>

#include "panels.h"
#include "words.h"

namespace {

// The first `count` of 64.
inline __mmask64 first_of(i64 count) {
    return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1;
}

// Bytes at .. at + 63 of `size`, those past it zero.
inline __m512i load_some(const u8* bytes, i64 at, i64 size) {
    return _mm512_maskz_loadu_epi8(first_of(size - at), bytes + at);
}

// Sixteen rows of sixteen words -> word w of every row, for each w.
inline void transpose_vectors(__m512i (&a)[16], __m512i* out) {
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // a[4 j + i], 128 bits q: words 4 q + i of rows 4 j .. 4 j + 3
        const __m512i p = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44),
                      q = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xEE);
        const __m512i r = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44),
                      s = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xEE);
        out[i] = _mm512_shuffle_i32x4(p, r, 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(p, r, 0xDD);
        out[8 + i] = _mm512_shuffle_i32x4(q, s, 0x88);
        out[12 + i] = _mm512_shuffle_i32x4(q, s, 0xDD);
    }
}

// The same in memory, rows so many words apart.
template <class Word>
inline void transpose_words(const Word* in, i64 in_stride, Word* out, i64 out_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(in + i * in_stride);
    transpose_vectors(a, b);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_stride, b[i]);
}

// A tile of as many rows and Columns as there are.
template <class Vectors>
inline void multiply_tile(int rows, int column_blocks, const typename Vectors::Packed* x,
                          i64 stride, const typename Vectors::Panel* panel, i64 K, float* out,
                          i64 out_stride) {
    with_constant<1, 2, 3, 4>(column_blocks, [&](auto s) {
        with_constant<1, 2, 3, 4, 5, 6>(rows, [&](auto r) {
            Vectors::template tile<r, s>(x, stride, panel, K, out, out_stride);
        });
    });
}

// A tile times the factors of its Columns.
template <class Columns>
inline void multiply_by_factors(int rows, int column_blocks, const Columns* c, float* out,
                                i64 out_stride) {
    for (int r = 0; r < rows; ++r) {
        for (int s = 0; s < column_blocks; ++s) {
            float* at = out + r * out_stride + s * LANES;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_load_ps(c[s].factor)));
        }
    }
}

// Products of words: `V::add` adds those of sixteen, or of one of them sixteen times, to sums.
// Panels are [words][column_blocks][16].
template <class V, class Word>
struct WordTiles {
    static constexpr int ROWS = 6, COLUMN_BLOCKS = 4;

    static void transpose(const Word* in, i64 in_stride, Word* out, i64 out_stride) {
        transpose_words(in, in_stride, out, out_stride);
    }

    // x [R][stride] of so many words times the panel -> out [R][out_stride]
    template <int R, int S>
    static void tile(const Word* x, i64 stride, const Word* panel, i64 count, float* out,
                     i64 out_stride) {
        __m512 sum[R][S];
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s) sum[r][s] = _mm512_setzero_ps();
        }
        for (i64 p = 0; p < count; ++p, panel += S * LANES) {
            __m512i w[S];
            for (int s = 0; s < S; ++s) w[s] = _mm512_load_si512(panel + s * LANES);
            for (int r = 0; r < R; ++r) {
                const __m512i a = V::all(x[r * stride + p]);
                for (int s = 0; s < S; ++s) sum[r][s] = V::add(w[s], a, sum[r][s]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s)
                _mm512_storeu_ps(out + r * out_stride + s * LANES, sum[r][s]);
        }
    }

    template <class Columns>
    static void multiply(int rows, int column_blocks, const Word* x, i64 stride, const Word* panel,
                         i64 K, const Columns*, float* out, i64 out_stride) {
        multiply_tile<V>(rows, column_blocks, x, stride, panel, words_of<V>(K), out, out_stride);
    }
};

struct Avx512F32 : F32Words, WordTiles<Avx512F32, float> {
    using WordTiles::transpose;

    static __m512i all(float x) { return _mm512_castps_si512(_mm512_set1_ps(x)); }
    static __m512 add(__m512i w, __m512i x, __m512 sum) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
    }
};

}  // namespace
