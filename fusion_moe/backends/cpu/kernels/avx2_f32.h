// AVX2 with FMA: products of float32.
#pragma once

#include <immintrin.h>

#include "panels.h"
#include "words.h"

namespace {

// Eight rows of eight words -> word w of every row, for each w.
inline void transpose_vectors(__m256 (&a)[8], __m256* out) {
    __m256 b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // a[i + q], 128 bits h: word 4 h + q of rows i .. i + 3
        for (int q = 0; q < 4; q += 2) {
            a[i + q] = _mm256_shuffle_ps(b[i + q / 2], b[i + 2 + q / 2], 0x44);
            a[i + q + 1] = _mm256_shuffle_ps(b[i + q / 2], b[i + 2 + q / 2], 0xEE);
        }
    }
    for (int q = 0; q < 4; ++q) {
        out[q] = _mm256_permute2f128_ps(a[q], a[4 + q], 0x20);
        out[4 + q] = _mm256_permute2f128_ps(a[q], a[4 + q], 0x31);
    }
}

struct Avx2F32 : F32Words, WordTiles<Avx2F32, float, 6, 1> {
    using Sums = __m256;

    static void transpose(const float* in, i64 in_stride, float* out, i64 out_stride) {
        for (int q = 0; q < 4; ++q) {  // of eight rows and words each
            const i64 row = q / 2 * 8, word = q % 2 * 8;
            __m256 a[8], b[8];
            for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(in + (row + i) * in_stride + word);
            transpose_vectors(a, b);
            for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + (word + i) * out_stride + row, b[i]);
        }
    }
    static __m256 load(const float* panel) { return _mm256_load_ps(panel); }
    static __m256 all(float x) { return _mm256_set1_ps(x); }
    static __m256 add(__m256 w, __m256 x, __m256 sum) { return _mm256_fmadd_ps(x, w, sum); }
};

}  // namespace
