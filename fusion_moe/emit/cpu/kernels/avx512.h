// AVX-512 (F, BW, VL, DQ, VBMI), products in float32.
//
// One 64-byte load is 128 codes of one row. Sixteen rows of the weight, transposed as 4-byte words, give vectors whose lane i holds 8 codes
// of row i: k .. k+7, of one block of 16. In such a vector v a look-up by 16-bit halves of v, v >> 4, v >> 8, v >> 12 makes the pairs
// (k, k+4), (k+1, k+5), (k+2, k+6), (k+3, k+7): what vdpbf16ps takes (avx512_bf16.h). Activations are packed once in that order of pairs,
// so no weight is ever moved.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "panels.h"

namespace {

// The tables that vectors are looked up in.
struct alignas(64) Tables {
    u16 bf16_of_code[32];                 // twice: look-ups take five bits, of which the fifth belongs to the next code
    float f32_of_code[16];
    u8 low_of_scale[128], high_of_scale[128];  // of the bfloat16 of an e4m3 byte without its sign
    u8 of_words[4][64], of_run[4][64];    // see `Scales`
    i32 even[16], odd[16];
    i32 order_of_sums[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};  // see `Avx512Dots`

    constexpr Tables() : bf16_of_code(), f32_of_code(), low_of_scale(), high_of_scale(), of_words(), of_run(), even(), odd() {
        for (int i = 0; i < 32; ++i) bf16_of_code[i] = E2M1_BF16[i & 15];
        for (int i = 0; i < 16; ++i) f32_of_code[i] = E2M1[i], even[i] = 2 * i, odd[i] = 2 * i + 1;
        for (int i = 0; i < 128; ++i) low_of_scale[i] = u8(E4M3_VALUES.bits[i]), high_of_scale[i] = u8(E4M3_VALUES.bits[i] >> 8);
        for (int part = 0; part < 4; ++part) {
            for (int lane = 0; lane < 16; ++lane) {
                of_words[part][4 * lane + 2] = u8(4 * lane + part), of_words[part][4 * lane + 3] = u8(64 + 4 * lane + part);
                of_run[part][4 * lane + 2] = u8(16 * part + lane), of_run[part][4 * lane + 3] = u8(64 + 16 * part + lane);
            }
        }
    }
};

constexpr Tables TABLES{};

inline __m512i bf16_table() { return _mm512_load_si512(TABLES.bf16_of_code); }
inline __m512i f32_table() { return _mm512_load_si512(TABLES.f32_of_code); }

// 64 e4m3 bytes, as the low and the high bytes of their bfloat16; from there sixteen at a time as float32.
struct Scales {
    __m512i low, high;

    static Scales of(__m512i bytes) {
        const __m512i sign = _mm512_and_si512(bytes, _mm512_set1_epi8(char(0x80)));
        const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.high_of_scale), bytes, _mm512_load_si512(TABLES.high_of_scale + 64));
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.low_of_scale), bytes, _mm512_load_si512(TABLES.low_of_scale + 64));
        return {low, _mm512_or_si512(high, sign)};
    }

    __m512 of_words(int part) const { return pick(TABLES.of_words[part]); }  // byte `part` of each of 16 words
    __m512 of_run(int part) const { return pick(TABLES.of_run[part]); }      // bytes 16 part .. 16 part + 15

    __m512 pick(const u8* index) const {
        return _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(0xCCCCCCCCCCCCCCCCull, low, _mm512_load_si512(index), high));
    }
};

// Bytes at .. at + 63 of `size`, those past it zero.
inline __m512i load_some(const u8* bytes, i64 at, i64 size) {
    const i64 left = size - at;
    const __mmask64 mask = left >= 64 ? ~0ull : left <= 0 ? 0 : (1ull << left) - 1;
    return _mm512_maskz_loadu_epi8(mask, bytes + at);
}

// Sixteen rows of sixteen words -> word w of every row, for each w.
inline void transpose(__m512i (&a)[16], __m512i* out) {
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
        const __m512i p = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44), q = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xEE);
        const __m512i r = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44), s = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xEE);
        out[i] = _mm512_shuffle_i32x4(p, r, 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(p, r, 0xDD);
        out[8 + i] = _mm512_shuffle_i32x4(q, s, 0x88);
        out[12 + i] = _mm512_shuffle_i32x4(q, s, 0xDD);
    }
}

// Bytes at .. at + 63 of sixteen rows of `size`, those past it zero -> 16 vectors: word w of every row.
inline void words_of(const u8* const* row, i64 at, i64 size, __m512i* out) {
    __m512i a[16];
    if (size - at >= 64) {
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(row[i] + at);
    } else {
        for (int i = 0; i < 16; ++i) a[i] = load_some(row[i], at, size);
    }
    transpose(a, out);
}

// Calls body(words, b, block scales) for every block b of 16 codes: words[0] and words[1] are its 8 + 8 codes of each of the 16 rows. What
// `next` will read is brought to the second-level cache: rows lie a power of two apart, and would fall into the same few places of the
// first.
template <class Body>
inline void for_blocks(const Columns& c, const Columns& next, i64 K, Body body) {
    for (i64 k1 = 0; k1 < K; k1 += 1024) {
        alignas(64) __m512i scale[16];
        words_of(c.scales, k1 / 16, K / 16, scale);
        for (int i = 0; i < LANES; ++i) _mm_prefetch(reinterpret_cast<const char*>(next.scales[i] + k1 / 16), _MM_HINT_T1);
        for (i64 k0 = k1; k0 < k1 + 1024 && k0 < K; k0 += 128) {
            alignas(64) __m512i word[16];
            words_of(c.codes, k0 / 2, K / 2, word);
            for (int i = 0; i < LANES; ++i) _mm_prefetch(reinterpret_cast<const char*>(next.codes[i] + k0 / 2), _MM_HINT_T1);
            const int blocks = int(std::min<i64>(8, (K - k0) / 16));
            for (int half = 0; 4 * half < blocks; ++half) {
                const Scales four = Scales::of(scale[(k0 - k1) / 64 + half]);
                for (int b = 4 * half; b < 4 * half + 4 && b < blocks; ++b) body(word + 2 * b, k0 / 16 + b, four.of_words(b % 4));
            }
        }
    }
}

// A tile of as many rows and Columns as there are.
template <class Vectors, int S>
inline void multiply_rows(int rows, const typename Vectors::Packed* x, i64 stride, const typename Vectors::Panel* panel, i64 K, float* out, i64 out_stride) {
    switch (rows) {
        case 1: return Vectors::template tile<1, S>(x, stride, panel, K, out, out_stride);
        case 2: return Vectors::template tile<2, S>(x, stride, panel, K, out, out_stride);
        case 3: return Vectors::template tile<3, S>(x, stride, panel, K, out, out_stride);
        case 4: return Vectors::template tile<4, S>(x, stride, panel, K, out, out_stride);
        case 5: return Vectors::template tile<5, S>(x, stride, panel, K, out, out_stride);
        default: return Vectors::template tile<6, S>(x, stride, panel, K, out, out_stride);
    }
}

template <class Vectors>
inline void multiply_tile(int rows, int subs, const typename Vectors::Packed* x, i64 stride, const typename Vectors::Panel* panel, i64 K, float* out, i64 out_stride) {
    switch (subs) {
        case 1: return multiply_rows<Vectors, 1>(rows, x, stride, panel, K, out, out_stride);
        case 2: return multiply_rows<Vectors, 2>(rows, x, stride, panel, K, out, out_stride);
        case 3: return multiply_rows<Vectors, 3>(rows, x, stride, panel, K, out, out_stride);
        default: return multiply_rows<Vectors, 4>(rows, x, stride, panel, K, out, out_stride);
    }
}

struct Avx512 {
    using Activation = float;
    using Packed = float;
    using Panel = float;  // [K][subs][16]
    static constexpr int FEW = 16, ROWS = 6, SUBS = 4;

    static void pack(const float* x, Packed* packed, i64 K) { std::memcpy(packed, x, std::size_t(K) * sizeof(float)); }
    static void pack_few(const float* x, i64 r, Packed* packed, i64 stride, i64 K) { pack(x, packed + r * stride, K); }

    template <int R>
    static void few_rows(const Columns& c, const Columns& next, const Packed* x, i64 stride, i64 K, float* out, i64 out_stride) {
        const __m512i table = f32_table();
        __m512 sum[R];
        for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
        for_blocks(c, next, K, [&](const __m512i* words, i64 block, __m512 scale) {
            for (int half = 0; half < 2; ++half) {
                __m512 w[8];
                for (int j = 0; j < 8; ++j) w[j] = _mm512_castsi512_ps(_mm512_permutexvar_epi32(_mm512_srli_epi32(words[half], 4 * j), table));
                const float* at = x + 16 * block + 8 * half;
                for (int r = 0; r < R; ++r) {
                    __m512 p = _mm512_mul_ps(w[0], _mm512_set1_ps(at[r * stride]));
                    for (int j = 1; j < 8; ++j) p = _mm512_fmadd_ps(w[j], _mm512_set1_ps(at[r * stride + j]), p);
                    sum[r] = _mm512_fmadd_ps(p, scale, sum[r]);
                }
            }
        });
        const __m512 decode = _mm512_load_ps(c.decode);
        for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * out_stride, _mm512_mul_ps(sum[r], decode));
    }

    static void few(int rows, const Columns& c, const Columns& next, const Packed* x, i64 stride, i64 K, float* out, i64 out_stride) {
        switch (rows) {
            case 1: case 2: return few_rows<2>(c, next, x, stride, K, out, out_stride);
            case 3: case 4: return few_rows<4>(c, next, x, stride, K, out, out_stride);
            case 5: case 6: case 7: case 8: return few_rows<8>(c, next, x, stride, K, out, out_stride);
            default: return few_rows<16>(c, next, x, stride, K, out, out_stride);
        }
    }

    static void decode(const Columns* c, const Columns* next, int subs, i64 K, Panel* panel) {
        const __m512i table = f32_table();
        for (int s = 0; s < subs; ++s) {
            const __m512 decode = _mm512_load_ps(c[s].decode);
            for_blocks(c[s], next[s], K, [&](const __m512i* words, i64 block, __m512 scale) {
                const __m512 step = _mm512_mul_ps(scale, decode);
                float* out = panel + (16 * block * subs + s) * LANES;
                for (int j = 0; j < 16; ++j) {
                    const __m512i code = _mm512_srli_epi32(words[j / 8], 4 * (j % 8));
                    _mm512_store_ps(out + j * subs * LANES, _mm512_mul_ps(_mm512_castsi512_ps(_mm512_permutexvar_epi32(code, table)), step));
                }
            });
        }
    }

    template <int R, int S>
    static void tile(const Packed* x, i64 stride, const Panel* panel, i64 K, float* out, i64 out_stride) {
        __m512 sum[R][S];
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s) sum[r][s] = _mm512_setzero_ps();
        }
        for (i64 k = 0; k < K; ++k, panel += S * LANES) {
            __m512 w[S];
            for (int s = 0; s < S; ++s) w[s] = _mm512_load_ps(panel + s * LANES);
            for (int r = 0; r < R; ++r) {
                const __m512 a = _mm512_set1_ps(x[r * stride + k]);
                for (int s = 0; s < S; ++s) sum[r][s] = _mm512_fmadd_ps(a, w[s], sum[r][s]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < S; ++s) _mm512_storeu_ps(out + r * out_stride + s * LANES, sum[r][s]);
        }
    }

    static void multiply(int rows, int subs, const Packed* x, i64 stride, const Panel* panel, i64 K, const Columns*, float* out, i64 out_stride) {
        multiply_tile<Avx512>(rows, subs, x, stride, panel, K, out, out_stride);
    }
};


// 16 blocks of a row of the weight by one row of activations, in float32.
struct Avx512Run {
    using Activation = float;
    using Packed = float;
    static constexpr i64 STEP = 256;

    // Of 256 activations: sixteen vectors, the same one of each block, in lane i that of block i; zeros up to a multiple of 256. From one
    // 256 to the next `step`.
    static void pack(const float* x, Packed* packed, i64 step, i64 K) {
        for (i64 k0 = 0; k0 < K; k0 += 256, packed += step) {
            for (int j = 0; j < 16; ++j) {
                const int at = j / 8 * 8 + code_of(j % 8);
                for (int i = 0; i < 16; ++i) packed[16 * j + i] = k0 + 16 * i < K ? x[k0 + 16 * i + at] : 0.f;
            }
        }
    }

    // Vector j of a half of the blocks, and a product with that of the activations. Of each 32 bits two codes are looked up without another
    // shift: that of the lowest four bits as float32, and that of the lowest four of the upper half as its own upper half.
    static constexpr int VECTORS = 8;
    static constexpr int code_of(int j) { return j / 2 + j % 2 * 4; }
    static __m512i weights(__m512i half, int j) {
        const __m512i shifted = _mm512_srli_epi32(half, 4 * (j / 2));
        return j % 2 == 0 ? _mm512_permutexvar_epi32(shifted, f32_table()) : _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, shifted, bf16_table());
    }
    static __m512 multiply(__m512i w, __m512i x, __m512 sum) { return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum); }
};

// Few rows of activations, up to MOST. The weight is read as it lies in memory: one of its rows after the other, or AT_ONCE of them, which
// share the vectors of activations that are loaded and make as many more chains of products.
template <class Run, int MOST>
struct Avx512Dots {
    using Activation = typename Run::Activation;
    using Packed = typename Run::Packed;
    static constexpr int FEW = MOST, VECTORS = Run::VECTORS;

    // 256 activations of each row, then the next: whole rows lie a power of two apart, and would meet in few places of the first-level cache.
    static void pack_few(const Activation* x, i64 r, Packed* packed, i64, i64 K) { Run::pack(x, packed + r * Run::STEP, MOST * Run::STEP, K); }

    static void few(int rows, const Columns& c, const Columns& next, const Packed* x, i64, i64 K, float* out, i64 out_stride) {
        if constexpr (MOST == 1) {
            few_rows<1, 1>(c, next, x, K, out, out_stride);
        } else {
            switch (rows) {
                case 1: return few_rows<1, 1>(c, next, x, K, out, out_stride);
                case 2: return few_rows<2, 2>(c, next, x, K, out, out_stride);
                case 3: return few_rows<3, 2>(c, next, x, K, out, out_stride);
                default: return few_rows<4, 2>(c, next, x, K, out, out_stride);
            }
        }
    }

    template <int R, int AT_ONCE>
    static void few_rows(const Columns& c, const Columns& next, const Packed* x, i64 K, float* out, i64 out_stride) {
        alignas(64) __m512 sums[R][LANES];
        for (int n = 0; n < LANES; n += AT_ONCE) {
            __m512 sum[AT_ONCE][R];
            for (int i = 0; i < AT_ONCE; ++i) {
                for (int r = 0; r < R; ++r) sum[i][r] = _mm512_setzero_ps();
            }
            for (i64 k = 0; k < K; k += 1024) {
                Scales four[AT_ONCE];
                for (int i = 0; i < AT_ONCE; ++i) {
                    _mm_prefetch(reinterpret_cast<const char*>(next.scales[n + i] + k / 16), _MM_HINT_T1);  // a line of them
                    four[i] = Scales::of(load_some(c.scales[n + i], k / 16, K / 16));
                }
                const int whole = int(std::min<i64>(4, (K - k) / 256));
                for (int part = 0; part < whole; ++part) {
                    const i64 at = k / 2 + 128 * part;
                    __m512i codes[AT_ONCE][2];
                    for (int i = 0; i < AT_ONCE; ++i) {
                        for (int j = 0; j < 2; ++j) {
                            _mm_prefetch(reinterpret_cast<const char*>(next.codes[n + i] + at + 64 * j), _MM_HINT_T1);
                            codes[i][j] = _mm512_loadu_si512(c.codes[n + i] + at + 64 * j);
                        }
                    }
                    add(codes, x + at / 128 * (MOST * Run::STEP), four, part, sum);
                }
                if (whole < 4 && k + 256 * whole < K) {
                    const i64 at = k / 2 + 128 * whole;
                    __m512i codes[AT_ONCE][2];
                    for (int i = 0; i < AT_ONCE; ++i) {
                        for (int j = 0; j < 2; ++j) codes[i][j] = load_some(c.codes[n + i], at + 64 * j, K / 2);
                    }
                    add(codes, x + at / 128 * (MOST * Run::STEP), four, whole, sum);
                }
            }
            for (int i = 0; i < AT_ONCE; ++i) {
                for (int r = 0; r < R; ++r) sums[r][n + i] = sum[i][r];
            }
        }
        const __m512 decode = _mm512_load_ps(c.decode);
        for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * out_stride, _mm512_mul_ps(total(sums[r]), decode));
    }

    // 256 codes of each row of the weight: the products of each block, times its scale.
    template <int R, int AT_ONCE>
    [[gnu::always_inline]] static void add(const __m512i (&codes)[AT_ONCE][2], const Packed* x, const Scales (&scales)[AT_ONCE], int part,
                                           __m512 (&sum)[AT_ONCE][R]) {
        constexpr int CHAINS = R == 1 ? 2 : 1;  // products wait for the one before in their chain
        __m512i halves[2][AT_ONCE];             // of block i in lane i the first 8 codes, the last
        __m512 p[CHAINS][AT_ONCE][R];
        for (int i = 0; i < AT_ONCE; ++i) {
            halves[0][i] = _mm512_permutex2var_epi32(codes[i][0], _mm512_load_si512(TABLES.even), codes[i][1]);
            halves[1][i] = _mm512_permutex2var_epi32(codes[i][0], _mm512_load_si512(TABLES.odd), codes[i][1]);
            for (int r = 0; r < R; ++r) p[0][i][r] = p[CHAINS - 1][i][r] = _mm512_setzero_ps();
        }
        for (int step = 0; step < 2 * VECTORS; ++step) {
            const int chain = step % CHAINS, half = CHAINS == 2 ? chain : step / VECTORS, j = CHAINS == 2 ? step / 2 : step % VECTORS;
            __m512i w[AT_ONCE];
            for (int i = 0; i < AT_ONCE; ++i) w[i] = Run::weights(halves[half][i], j);
            for (int r = 0; r < R; ++r) {
                const __m512i a = _mm512_load_si512(x + r * Run::STEP + 16 * (VECTORS * half + j));
                for (int i = 0; i < AT_ONCE; ++i) p[chain][i][r] = Run::multiply(w[i], a, p[chain][i][r]);
            }
        }
        for (int i = 0; i < AT_ONCE; ++i) {
            const __m512 scale = scales[i].of_run(part);
            for (int r = 0; r < R; ++r) {
                const __m512 products = CHAINS == 2 ? _mm512_add_ps(p[0][i][r], p[CHAINS - 1][i][r]) : p[0][i][r];
                sum[i][r] = _mm512_fmadd_ps(products, scale, sum[i][r]);
            }
        }
    }

    // Sixteen vectors -> the sums of their lanes: each step adds halves of two vectors and makes them one.
    static __m512 total(__m512 (&sums)[16]) {
        for (int i = 0; i < 8; ++i) {
            const __m512 a = sums[i], b = sums[i + 8];
            sums[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
        }
        for (int i = 0; i < 4; ++i) {
            const __m512 a = sums[i], b = sums[i + 4];
            sums[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
        }
        for (int i = 0; i < 2; ++i) {
            const __m512d a = _mm512_castps_pd(sums[i]), b = _mm512_castps_pd(sums[i + 2]);
            sums[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
        const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(sums[0], sums[1], 0x88), _mm512_shuffle_ps(sums[0], sums[1], 0xDD));
        return _mm512_permutexvar_ps(_mm512_load_si512(TABLES.order_of_sums), all);
    }
};

struct Avx512Tier {
    using Wide = Panels<Avx512>;
    template <class A>
    using Fast = Kernels<FewRows<Avx512Dots<Avx512Run, 1>>, FewRows<Avx512>, Panels<Avx512>>;
    struct Thread {};
    static constexpr double ROWS_OF_DECODING = 8;
};

}  // namespace
