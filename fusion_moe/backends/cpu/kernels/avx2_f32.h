// AVX2 with FMA: products of float32.
#pragma once

#include <immintrin.h>

#include "panels.h"
#include "words.h"

namespace {

struct Avx2F32 : F32Words {  // panels are [K][16]
    static constexpr int ROWS = 6, COLUMN_BLOCKS = 1;

    template <class Columns>
    static void multiply(int rows, int, const Packed* x, i64 stride, const Panel* panel, i64 K,
                         const Columns*, float* out, i64 out_stride) {
        with_constant<1, 2, 3, 4, 5, 6>(
            rows, [&](auto r) { tile<r>(x, stride, panel, K, out, out_stride); });
    }

  private:
    template <int R>
    static void tile(const Packed* x, i64 stride, const Panel* panel, i64 K, float* out,
                     i64 out_stride) {
        __m256 sum[R][2];
        for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
        for (i64 k = 0; k < K; ++k, panel += LANES) {
            const __m256 w[2] = {_mm256_load_ps(panel), _mm256_load_ps(panel + 8)};
            for (int r = 0; r < R; ++r) {
                const __m256 a = _mm256_broadcast_ss(x + r * stride + k);
                for (int h = 0; h < 2; ++h) sum[r][h] = _mm256_fmadd_ps(a, w[h], sum[r][h]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + r * out_stride + 8 * h, sum[r][h]);
        }
    }
};

}  // namespace
