// e2m1 codes by AVX-512 (F, BW, VL, DQ, VBMI), products in float32.
//
// One 64-byte load is 128 codes of one row. Sixteen rows of the weight, transposed as 4-byte words,
// give vectors whose lane i holds 8 codes of row i: k .. k+7, of one block of 16. In such a vector
// v a look-up by 16-bit halves of v, v >> 4, v >> 8, v >> 12 makes the pairs (k, k+4), (k+1, k+5),
// (k+2, k+6), (k+3, k+7): what vdpbf16ps takes (avx512_bf16.h). Activations are packed once in that
// order of pairs, so no weight is ever moved.
#pragma once

#include "avx512_f32.h"
#include "e2m1.h"

namespace {

// The tables that vectors are looked up in.
struct alignas(64) Tables {
    u16 bf16_of_code[32];  // twice: look-ups take five bits, of which the fifth belongs to the next
                           // code
    float f32_of_code[16];
    i32 even[16], odd[16];
    i32 order_of_sums[16] = {0, 2, 1, 3, 8,  10, 9,  11,
                             4, 6, 5, 7, 12, 14, 13, 15};  // see `Avx512Dots`

    constexpr Tables() : bf16_of_code(), f32_of_code(), even(), odd() {
        for (int i = 0; i < 32; ++i) bf16_of_code[i] = E2M1_BF16[i & 15];
        for (int i = 0; i < 16; ++i) f32_of_code[i] = E2M1[i], even[i] = 2 * i, odd[i] = 2 * i + 1;
    }
};

constexpr Tables TABLES{};

inline __m512i bf16_table() { return _mm512_load_si512(TABLES.bf16_of_code); }
inline __m512i f32_table() { return _mm512_load_si512(TABLES.f32_of_code); }

// Which of 64 scales, each of BLOCK codes, are picked: see `Scales`.
template <i64 BLOCK>
struct alignas(64) Picks {
    u8 of_words[4][64], of_run[BLOCK / 4][64];

    constexpr Picks() : of_words(), of_run() {
        for (int lane = 0; lane < 16; ++lane) {
            for (int part = 0; part < 4; ++part) set(of_words[part], lane, 4 * lane + part);
            for (int part = 0; part < BLOCK / 4; ++part)
                set(of_run[part], lane, (16 * part + lane) * 16 / int(BLOCK));
        }
    }

    static constexpr void set(u8* pick, int lane, int scale) {
        pick[4 * lane + 2] = u8(scale), pick[4 * lane + 3] = u8(64 + scale);
    }
};

template <i64 BLOCK>
constexpr Picks<BLOCK> PICKS{};

// 64 scales, as the low and the high bytes of their bfloat16; from there sixteen at a time as
// float32.
template <class Weight>
struct Scales {
    __m512i low, high;

    static Scales of(__m512i bytes) {
        Scales s;
        Weight::halves(bytes, s.low, s.high);
        return s;
    }

    __m512 of_words(int part) const {
        return pick(PICKS<Weight::BLOCK>.of_words[part]);
    }  // byte `part` of each of 16 words
    __m512 of_run(int part) const {
        return pick(PICKS<Weight::BLOCK>.of_run[part]);
    }  // those of 16 codes each, from 256 part on

    __m512 pick(const u8* index) const {
        return _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(0xCCCCCCCCCCCCCCCCull, low,
                                                                  _mm512_load_si512(index), high));
    }
};

// Bytes at .. at + 63 of sixteen rows of `size`, those past it zero -> 16 vectors: word w of every
// row.
inline void words_of(const u8* const* row, i64 at, i64 size, __m512i* out) {
    __m512i a[16];
    if (size - at >= 64) {
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(row[i] + at);
    } else {
        for (int i = 0; i < 16; ++i) a[i] = load_some(row[i], at, size);
    }
    transpose_vectors(a, out);
}

// Calls body(words, b, scales) for every b, 16 codes: words[0] and words[1] are its 8 + 8 codes of
// each of the 16 rows. What `next` will read is brought to the second-level cache: rows lie a power
// of two apart, and would fall into the same few places of the first.
template <class Weight, class Columns, class Body>
inline void for_blocks(const Columns& c, const Columns& next, i64 K, Body body) {
    constexpr i64 BLOCK = Weight::BLOCK,
                  OF_WORD =
                      BLOCK / 4;  // OF_WORD: how many times 16 codes have the scales of a word
    for (i64 k1 = 0; k1 < K; k1 += 64 * BLOCK) {
        alignas(64) __m512i scale[16];
        words_of(c.scales, k1 / BLOCK, K / BLOCK, scale);
        for (int i = 0; i < LANES; ++i) Weight::fetch_line(next.scales[i] + k1 / BLOCK);
        for (i64 k0 = k1; k0 < k1 + 64 * BLOCK && k0 < K; k0 += 128) {
            alignas(64) __m512i word[16];
            words_of(c.codes, k0 / 2, K / 2, word);
            for (int i = 0; i < LANES; ++i)
                _mm_prefetch(reinterpret_cast<const char*>(next.codes[i] + k0 / 2), _MM_HINT_T1);
            const int blocks = int(std::min<i64>(8, (K - k0) / 16));
            for (int part = 0; OF_WORD * part < blocks; ++part) {
                const auto scales = Scales<Weight>::of(scale[(k0 - k1) / (4 * BLOCK) + part]);
                for (int b = OF_WORD * part; b < OF_WORD * part + OF_WORD && b < blocks; ++b) {
                    body(word + 2 * b, k0 / 16 + b, scales.of_words(b % OF_WORD * 16 / BLOCK));
                }
            }
        }
    }
}

// Codes and activations as float32. What `weights` makes of the first or the last 8 codes of
// blocks, in VECTORS steps, meets words of activations in the order `word_of`.
struct Avx512Run : Avx512F32 {
    static constexpr i64 STEP = 256;

    // 256 activations, or `count` and zeros: sixteen vectors, the same one of each block, in lane i
    // that of block i.
    static void pack_run(const float* x, Packed* packed, i64 count) {
        __m512i blocks[16], lanes[16];
        for (i64 i = 0; i < 16; ++i)
            blocks[i] = 16 * i < count ? _mm512_loadu_si512(x + 16 * i) : _mm512_setzero_si512();
        transpose_vectors(blocks, lanes);
        for (int j = 0; j < 16; ++j)
            _mm512_store_si512(packed + 16 * j, lanes[j / 8 * 8 + word_of(j % 8)]);
    }

    // Of each 32 bits two codes are looked up without another shift: that of the lowest four bits
    // as float32, and that of the lowest four of the upper half as its own upper half.
    static constexpr int VECTORS = 8;
    static constexpr int word_of(int j) { return j / 2 + j % 2 * 4; }
    static __m512i weights(__m512i half, int j) {
        const __m512i shifted = _mm512_srli_epi32(half, 4 * (j / 2));
        return j % 2 == 0 ? _mm512_permutexvar_epi32(shifted, f32_table())
                          : _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, shifted, bf16_table());
    }
};

// Small M: up to twelve rows by sixteen columns, of which a vector has a code each.
template <class Run, class Weight_>
struct Avx512Codes : Run {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Packed = typename Run::Packed;
    static constexpr int SMALL_M = 12, MIN_EXPONENT = F32_MIN_EXPONENT<Weight>,
                         MAX_EXPONENT = F32_MAX_EXPONENT<Weight>;

    // Words between rows. A power of two apart, they would meet in few places of the first-level
    // cache.
    static i64 row_size(i64 stride) { return stride * Run::STEP / 256 + LANES; }

    template <int R>
    static void small_m_rows(const Columns& c, const Columns& next, const Packed* x, i64 stride,
                             i64 K, float* out, i64 out_stride) {
        constexpr int VECTORS = Run::VECTORS, HALVES = 8 / VECTORS;  // of a block, in registers
        __m512 sum[R];
        for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
        for_blocks<Weight>(c, next, K, [&](const __m512i* words, i64 block, __m512 scale) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half += HALVES) {
                __m512i w[HALVES][VECTORS];
                for (int j = 0; j < VECTORS; ++j) {
                    for (int i = 0; i < HALVES; ++i)
                        w[i][Run::word_of(j)] = Run::weights(words[half + i], j);
                }
                const Packed* at = x + VECTORS * (2 * block + half);
                for (int r = 0; r < R; ++r, at += stride) {
                    __m512 p[HALVES] = {};
                    for (int j = 0; j < VECTORS; ++j) {
                        for (int i = 0; i < HALVES; ++i)
                            p[i] = Run::add(w[i][j], Run::all(at[i * VECTORS + j]), p[i]);
                    }
                    for (int i = 1; i < HALVES; ++i) p[0] = _mm512_add_ps(p[0], p[i]);
                    sum[r] = _mm512_fmadd_ps(p[0], scale, sum[r]);
                }
            }
        });
        const __m512 factor = _mm512_load_ps(c.factor);
        for (int r = 0; r < R; ++r)
            _mm512_storeu_ps(out + r * out_stride, _mm512_mul_ps(sum[r], factor));
    }

    static void small_m(int rows, const Columns& c, const Columns& next, const Packed* x,
                        i64 stride, i64 K, float* out, i64 out_stride) {
        with_constant<1, 2, 3, 4, 6, 8, 12>(rows, [&](auto r) {
            small_m_rows<r>(c, next, x, row_size(stride), K, out, out_stride);
        });
    }
};

template <class Weight>
struct Avx512 : Avx512Codes<Avx512Run, Weight> {
    using typename Avx512F32::Packed, typename Avx512F32::Panel;
    using typename Avx512Codes<Avx512Run, Weight>::Columns;

    static void pack_small_m(const float* x, i64 r, Packed* packed, i64 stride, i64 K) {
        Avx512::pack(x, packed + r * Avx512::row_size(stride), K);
    }

    static void dequantize(const Columns* c, const Columns* next, int column_blocks, i64 K,
                           Panel* panel) {
        const __m512i table = f32_table();
        for (int s = 0; s < column_blocks; ++s) {
            const __m512 factor = _mm512_load_ps(c[s].factor);
            for_blocks<Weight>(
                c[s], next[s], K, [&](const __m512i* words, i64 block, __m512 scale) {
                    const __m512 step = _mm512_mul_ps(scale, factor);
                    float* out = panel + (16 * block * column_blocks + s) * LANES;
                    for (int j = 0; j < 16; ++j) {
                        const __m512i code = _mm512_srli_epi32(words[j / 8], 4 * (j % 8));
                        const __m512 w = _mm512_castsi512_ps(_mm512_permutexvar_epi32(code, table));
                        _mm512_store_ps(out + j * column_blocks * LANES, _mm512_mul_ps(w, step));
                    }
                });
        }
    }
};

// Small M: up to MAX_ROWS rows. The weight is read as it lies in memory: one of its rows after the
// other, or WEIGHT_ROWS of them, which share the vectors of activations that are loaded and make as
// many more chains of products.
template <class Run, int MAX_ROWS, class Weight_>
struct Avx512Dots {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Activation = typename Run::Activation;
    using Packed = typename Run::Packed;
    static constexpr int SMALL_M = MAX_ROWS, VECTORS = Run::VECTORS;
    static constexpr int MIN_EXPONENT = F32_MIN_EXPONENT<Weight>,
                         MAX_EXPONENT = F32_MAX_EXPONENT<Weight>;
    static constexpr i64 BLOCK = Weight::BLOCK,
                         RUNS = BLOCK / 4;  // RUNS: how many times 256 codes have 64 scales

    static void pack_small_m(const Activation* x, i64 r, Packed* packed, i64, i64 K) {
        for (i64 k = 0; k < K; k += 256) Run::pack_run(x + k, packed + place(k / 256, r), K - k);
    }

    static void small_m(int rows, const Columns& c, const Columns& next, const Packed* x, i64,
                        i64 K, float* out, i64 out_stride) {
        const auto of = [&](auto r) {
            small_m_rows<r, r == 1 ? 1 : 2>(c, next, x, K, out, out_stride);
        };
        if constexpr (MAX_ROWS == 1) {
            of(std::integral_constant<int, 1>());
        } else {
            with_constant<1, 2, 3, 4>(rows, of);
        }
    }

    template <int R, int WEIGHT_ROWS>
    static void small_m_rows(const Columns& c, const Columns& next, const Packed* x, i64 K,
                             float* out, i64 out_stride) {
        alignas(64) __m512 sums[R][LANES];
        for (int n = 0; n < LANES; n += WEIGHT_ROWS) {
            __m512 sum[WEIGHT_ROWS][R];
            for (int i = 0; i < WEIGHT_ROWS; ++i) {
                for (int r = 0; r < R; ++r) sum[i][r] = _mm512_setzero_ps();
            }
            for (i64 k = 0; k < K; k += 64 * BLOCK) {
                Scales<Weight> scales[WEIGHT_ROWS];
                for (int i = 0; i < WEIGHT_ROWS; ++i) {
                    Weight::fetch_line(next.scales[n + i] + k / BLOCK);
                    scales[i] =
                        Scales<Weight>::of(load_some(c.scales[n + i], k / BLOCK, K / BLOCK));
                }
                const auto run = [&](int part, auto whole) __attribute__((always_inline)) {
                    const i64 first = k / 2 + 128 * part;
                    __m512i codes[WEIGHT_ROWS][2];
                    for (int i = 0; i < WEIGHT_ROWS; ++i) {
                        for (int j = 0; j < 2; ++j) {
                            const i64 at = first + 64 * j;
                            const u8* then =
                                next.codes[n + i] + (whole ? at : std::min(at, K / 2 - 1));
                            _mm_prefetch(reinterpret_cast<const char*>(then), _MM_HINT_T1);
                            codes[i][j] = whole ? _mm512_loadu_si512(c.codes[n + i] + at)
                                                : load_some(c.codes[n + i], at, K / 2);
                        }
                    }
                    add(codes, x, first / 128, scales, part, sum);
                };
                const int parts = int(std::min<i64>(RUNS, (K - k) / 256));
                for (int part = 0; part < parts; ++part) run(part, std::true_type());
                if (parts < RUNS && k + 256 * parts < K) run(parts, std::false_type());
            }
            for (int i = 0; i < WEIGHT_ROWS; ++i) {
                for (int r = 0; r < R; ++r) sums[r][n + i] = sum[i][r];
            }
        }
        const __m512 factor = _mm512_load_ps(c.factor);
        for (int r = 0; r < R; ++r)
            _mm512_storeu_ps(out + r * out_stride, _mm512_mul_ps(total(sums[r]), factor));
    }

    // Where 256 activations of a row are, of the run-th 256. Those of all rows follow each other,
    // each time one row later: whole rows would lie a power of two apart, and a row alone would
    // too, and meet in few places of the first-level cache.
    static i64 place(u64 run, u64 r) {
        return i64((run * MAX_ROWS + (run + r) % MAX_ROWS) * Run::STEP);
    }

    // The run-th 256 codes of each row of the weight: the products of each block, times its scale.
    template <int R, int WEIGHT_ROWS>
    [[gnu::always_inline]] static void add(const __m512i (&codes)[WEIGHT_ROWS][2], const Packed* x,
                                           i64 run, const Scales<Weight> (&scales)[WEIGHT_ROWS],
                                           int part, __m512 (&sum)[WEIGHT_ROWS][R]) {
        constexpr int CHAINS = R == 1 ? 2 : 1;  // products wait for the one before in their chain
        __m512i halves[2][WEIGHT_ROWS];         // of block i in lane i the first 8 codes, the last
        __m512 p[CHAINS][WEIGHT_ROWS][R];
        for (int i = 0; i < WEIGHT_ROWS; ++i) {
            halves[0][i] =
                _mm512_permutex2var_epi32(codes[i][0], _mm512_load_si512(TABLES.even), codes[i][1]);
            halves[1][i] =
                _mm512_permutex2var_epi32(codes[i][0], _mm512_load_si512(TABLES.odd), codes[i][1]);
            for (int r = 0; r < R; ++r) p[0][i][r] = p[CHAINS - 1][i][r] = _mm512_setzero_ps();
        }
        for (int step = 0; step < 2 * VECTORS; ++step) {
            const int chain = step % CHAINS, half = CHAINS == 2 ? chain : step / VECTORS,
                      j = CHAINS == 2 ? step / 2 : step % VECTORS;
            __m512i w[WEIGHT_ROWS];
            for (int i = 0; i < WEIGHT_ROWS; ++i) w[i] = Run::weights(halves[half][i], j);
            for (int r = 0; r < R; ++r) {
                const __m512i a = _mm512_load_si512(x + place(run, r) + 16 * (VECTORS * half + j));
                for (int i = 0; i < WEIGHT_ROWS; ++i)
                    p[chain][i][r] = Run::add(w[i], a, p[chain][i][r]);
            }
        }
        for (int i = 0; i < WEIGHT_ROWS; ++i) {
            const __m512 scale = scales[i].of_run(part);
            for (int r = 0; r < R; ++r) {
                const __m512 products =
                    CHAINS == 2 ? _mm512_add_ps(p[0][i][r], p[CHAINS - 1][i][r]) : p[0][i][r];
                sum[i][r] = _mm512_fmadd_ps(products, scale, sum[i][r]);
            }
        }
    }

    // Sixteen vectors -> the sums of their lanes: each step adds halves of two vectors and makes
    // them one.
    static __m512 total(__m512 (&sums)[16]) {
        for (int i = 0; i < 8; ++i) {
            const __m512 a = sums[i], b = sums[i + 8];
            sums[i] =
                _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
        }
        for (int i = 0; i < 4; ++i) {
            const __m512 a = sums[i], b = sums[i + 4];
            sums[i] =
                _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
        }
        for (int i = 0; i < 2; ++i) {
            const __m512d a = _mm512_castps_pd(sums[i]), b = _mm512_castps_pd(sums[i + 2]);
            sums[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
        const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(sums[0], sums[1], 0x88),
                                         _mm512_shuffle_ps(sums[0], sums[1], 0xDD));
        return _mm512_permutexvar_ps(_mm512_load_si512(TABLES.order_of_sums), all);
    }
};

// What stays in the first-level cache beside codes.
template <class Run, int MAX_ROWS, class Weight>
constexpr i64 MOST_OF_ROWS<Avx512Dots<Run, MAX_ROWS, Weight>> = i64(1) << 14;

template <class Weight>
struct Avx512Isa : VectorIsa {
    using Wide = Panels<Avx512<Weight>>;
    template <class A>
    using Fast = Kernels<SmallM<Avx512Dots<Avx512Run, 1, Weight>>,
                         OfAllRows<SmallM<Avx512<Weight>>>, Panels<Avx512<Weight>>>;
};

}  // namespace
