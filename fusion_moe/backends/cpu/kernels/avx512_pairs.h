// AVX-512: products of pairs of bfloat16. Numbers below 2^-126 count as zero, in sums too.
#pragma once

#include "avx512_f32.h"
#include "e2m1.h"

namespace {

inline __m512bh pairs(__m512i v) { return reinterpret_cast<__m512bh>(v); }
inline __m512bh all(u32 pair) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(int(pair))); }

struct Avx512Pairs {
    using Activation = bf16;
    using Packed = u32;  // elements k and k + 1
    using Panel = u32;   // [K/2][column_blocks][16]
    static constexpr int ROWS = 6, COLUMN_BLOCKS = 4;
    static constexpr int MIN_EXPONENT = -60, MAX_EXPONENT = 60;
    static constexpr i64 DEPTH = 2;

    static u32 word(const bf16* a, const bf16* b, i64 j) {
        return u32(a[j].bits) | u32(b[j].bits) << 16;
    }
    static u32 first(u32 word) { return word & 0xFFFFu; }
    static void words(const bf16* a, const bf16* b, u32* out) {
        const auto half = [](const bf16* x) {
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
        };
        _mm512_store_si512(out, _mm512_or_si512(half(a), _mm512_slli_epi32(half(b), 16)));
    }

    // Sixteen codes of two rows, each times a scale that leaves it exact in bfloat16: the upper
    // half of its float32.
    static void words_of_codes(const u8* a, float a_scale, const u8* b, float b_scale, u32* out) {
        const __m512i low =
            _mm512_castps_si512(_mm512_mul_ps(numbers_of(a), _mm512_set1_ps(a_scale)));
        const __m512i high =
            _mm512_castps_si512(_mm512_mul_ps(numbers_of(b), _mm512_set1_ps(b_scale)));
        _mm512_store_si512(out,
                           _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(low, 16), high));
    }

    static void transpose(const u32* in, i64 in_stride, u32* out, i64 out_stride) {
        transpose_words(in, in_stride, out, out_stride);
    }

    static void pack(const bf16* x, Packed* packed, i64 K) {
        std::memcpy(packed, x, std::size_t(K) * sizeof(bf16));
        if (K % 2 == 1) packed[K / 2] = x[K - 1].bits;
    }

    // x [R][stride] of so many pairs times the panel -> out [R][out_stride]
    template <int R, int S>
    static void tile(const Packed* x, i64 stride, const Panel* panel, i64 count, float* out,
                     i64 out_stride) {
        __m512 sum[R][S];
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s) sum[r][s] = _mm512_setzero_ps();
        }
        for (i64 p = 0; p < count; ++p, panel += S * LANES) {
            __m512bh w[S];
            for (int s = 0; s < S; ++s) w[s] = pairs(_mm512_load_si512(panel + s * LANES));
            for (int r = 0; r < R; ++r) {
                const __m512bh a = all(x[r * stride + p]);
                for (int s = 0; s < S; ++s) sum[r][s] = _mm512_dpbf16_ps(sum[r][s], a, w[s]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s)
                _mm512_storeu_ps(out + r * out_stride + s * LANES, sum[r][s]);
        }
    }

    template <class Columns>
    static void multiply(int rows, int column_blocks, const Packed* x, i64 stride,
                         const Panel* panel, i64 K, const Columns*, float* out, i64 out_stride) {
        multiply_tile<Avx512Pairs>(rows, column_blocks, x, stride, panel, (K + 1) / 2, out,
                                   out_stride);
    }
};

}  // namespace
