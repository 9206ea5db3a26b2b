// AVX-512: products of pairs of bfloat16. Numbers below 2^-126 count as zero, in sums too.
#pragma once

#include "avx512_f32.h"
#include "e2m1.h"

namespace {

inline __m512bh pairs(__m512i v) { return reinterpret_cast<__m512bh>(v); }

struct Avx512Pairs : Avx512Words<Avx512Pairs, u32> {
    using Activation = bf16;
    using Packed = u32;  // elements k and k + 1
    using Panel = u32;
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

    static void pack(const bf16* x, Packed* packed, i64 K) {
        std::memcpy(packed, x, std::size_t(K) * sizeof(bf16));
        if (K % 2 == 1) packed[K / 2] = x[K - 1].bits;
    }

    static __m512i all(u32 pair) { return _mm512_set1_epi32(int(pair)); }
    static __m512 add(__m512i w, __m512i x, __m512 sum) {
        return _mm512_dpbf16_ps(sum, pairs(w), pairs(x));
    }
};

}  // namespace
