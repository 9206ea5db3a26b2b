// e2m1 codes by AVX-512 with products of bfloat16.
#pragma once

#include "avx512.h"
#include "avx512_pairs.h"

namespace {

// Codes and activations as pairs of bfloat16.
struct Avx512PairsRun : Avx512Pairs {  // of k and k + 4
    static constexpr i64 STEP = 128;

    // 256 activations, or `count` and zeros: sixteen pairs, the same one of each block, in lane i
    // that of block i.
    static void pack_run(const bf16* x, Packed* packed, i64 count) {
        const __m256i order = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        __m512i blocks[16], words[16];
        for (i64 i = 0; i < 16; ++i) {
            const auto* at = reinterpret_cast<const __m256i*>(x + 16 * i);
            blocks[i] =
                16 * i < count
                    ? _mm512_zextsi256_si512(_mm256_shuffle_epi8(_mm256_loadu_si256(at), order))
                    : _mm512_setzero_si512();
        }
        transpose_vectors(blocks, words);
        for (int part = 0; part < 8; ++part) _mm512_store_si512(packed + 16 * part, words[part]);
    }

    static constexpr int VECTORS = 4;
    static constexpr int word_of(int j) { return j; }
    static __m512i weights(__m512i half, int j) {
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(half, 4 * j), bf16_table());
    }
};

template <class Weight>
struct Avx512Bf16 : Avx512Codes<Avx512PairsRun, Weight> {
    using typename Avx512Pairs::Packed, typename Avx512Pairs::Panel;
    using typename Avx512Codes<Avx512PairsRun, Weight>::Columns;

    // Each 8 activations in the order 0 4 1 5 2 6 3 7.
    static void pack(const bf16* x, Packed* packed, i64 K) {
        const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        const __m512i orders = _mm512_broadcast_i32x4(order);
        i64 k = 0;
        for (; k + 32 <= K; k += 32)
            _mm512_storeu_si512(packed + k / 2,
                                _mm512_shuffle_epi8(_mm512_loadu_si512(x + k), orders));
        for (; k < K; k += 8) {
            const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + k));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + k / 2),
                             _mm_shuffle_epi8(eight, order));
        }
    }

    static void pack_small_m(const bf16* x, i64 r, Packed* packed, i64 stride, i64 K) {
        pack(x, packed + r * Avx512Bf16::row_size(stride), K);
    }

    // Code times a scale in range has at most six significant bits: exact in bfloat16. A product of
    // pairs with (scale, 0) or (0, scale) is the scaled code of one of the two as float32, whose
    // upper half is its bfloat16.
    static void dequantize(const Columns* c, const Columns* next, int column_blocks, i64 K,
                           Panel* panel) {
        const __m512i upper = _mm512_set1_epi32(int(0xFFFF0000));
        for (int s = 0; s < column_blocks; ++s) {
            for_blocks<Weight>(
                c[s], next[s], K, [&](const __m512i* words, i64 block, __m512 scale) {
                    const __m512i of_high = _mm512_castps_si512(scale),
                                  of_low = _mm512_srli_epi32(of_high, 16);
                    u32* out = panel + (8 * block * column_blocks + s) * LANES;
                    for (int j = 0; j < 8; ++j) {
                        const __m512bh w = pairs(Avx512PairsRun::weights(words[j / 4], j % 4));
                        const __m512i high = _mm512_castps_si512(
                            _mm512_dpbf16_ps(_mm512_setzero_ps(), w, pairs(of_high)));
                        const __m512i low = _mm512_castps_si512(
                            _mm512_dpbf16_ps(_mm512_setzero_ps(), w, pairs(of_low)));
                        // the upper half moved down by a multiplication, since the units that shift
                        // have enough to do
                        const __m512i down = _mm512_madd_epi16(low, _mm512_set1_epi32(1 << 16));
                        _mm512_store_si512(out + j * column_blocks * LANES,
                                           _mm512_ternarylogic_epi32(upper, high, down, 0xCA));
                    }
                });
        }
    }

    static void multiply(int rows, int column_blocks, const Packed* x, i64 stride,
                         const Panel* panel, i64 K, const Columns* c, float* out, i64 out_stride) {
        Avx512Pairs::multiply(rows, column_blocks, x, stride, panel, K, c, out, out_stride);
        multiply_by_factors(rows, column_blocks, c, out, out_stride);
    }
};

template <class Weight>
struct Avx512Bf16Isa : VectorIsa {
    using Wide = Panels<Avx512<Weight>>;
    using OfBf16 = Kernels<SmallM<Avx512Dots<Avx512PairsRun, 4, Weight>>,
                           OfAllRows<SmallM<Avx512Bf16<Weight>>>, Panels<Avx512Bf16<Weight>>>;
    template <class A>
    using Fast = std::conditional_t<std::is_same<A, bf16>::value, OfBf16,
                                    typename Avx512Isa<Weight>::template Fast<A>>;
};

}  // namespace
