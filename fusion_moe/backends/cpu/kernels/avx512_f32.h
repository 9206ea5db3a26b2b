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

// Vectors of sixteen words.
template <class V, class Word>
struct Avx512Words : WordTiles<V, Word, 6, 4> {
    using Sums = __m512;

    static void transpose(const Word* in, i64 in_stride, Word* out, i64 out_stride) {
        transpose_words(in, in_stride, out, out_stride);
    }
    static __m512i load(const Word* panel) { return _mm512_load_si512(panel); }
};

struct Avx512F32 : F32Words, Avx512Words<Avx512F32, float> {
    using Avx512Words::transpose;

    static __m512i all(float x) { return _mm512_castps_si512(_mm512_set1_ps(x)); }
    static __m512 add(__m512i w, __m512i x, __m512 sum) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
    }
};

}  // namespace
