// Products of int8 operands by AVX-512 with VNNI: int8.h has what is computed.
//
// Sixteen rows of the weight, transposed as 4-byte words, give vectors whose lane i holds 8 codes
// of row i. Look-ups by 16-bit halves of v, v >> 4, v >> 8, v >> 12 make pairs of codes k + j and k
// + 4 + j, as numbers. Their products with the ratio of their scale, rounded to 256, have the
// integers as upper bytes; of those with 128 times as much as numbers, to 2^15, they are the lower
// bytes of the upper half. One of each kind become a vector of bytes: codes k, k + 2, k + 4, k + 6,
// then k + 1, k + 3, k + 5, k + 7. Activations are packed in that order.
//
// Of scales that are powers of two, none of them below an eighth of the largest of its block, two
// bits beside the four of the code say what one look-up of bytes makes of it.
//
// One factor of vpdpbusd must not be negative: weights are 128 larger, and what that adds is taken
// from sums.
#pragma once

#include "avx512.h"
#include "int8.h"

namespace {

struct alignas(64) Int8Tables {
    i16 of_low[32], of_high[32];  // 256 times a code and twice the code, twice: look-ups take five
                                  // bits, the fifth of the next code
    u8 of_power[64];  // a code, and how many times its scale is half of the largest -> the integer
    u8 order[64];     // of activations, for `_mm512_shuffle_epi8`
    u8 each_of_4[4][64];  // byte i of each word, in all of them

    constexpr Int8Tables() : of_low(), of_high(), of_power(), order(), each_of_4() {
        constexpr u8 of_eight[8] = {0, 2, 4, 6, 1, 3, 5, 7};
        for (int i = 0; i < 32; ++i)
            of_low[i] = i16(256 * E2M1[i & 15]), of_high[i] = i16(2 * E2M1[i & 15]);
        for (int i = 0; i < 64; ++i) {
            of_power[i] = u8(int(16 * E2M1[i & 15]) / (1 << i / 16));
            order[i] = u8(i % 16 / 8 * 8 + of_eight[i % 8]);
            for (int b = 0; b < 4; ++b) each_of_4[b][i] = u8(i % 16 / 4 * 4 + b);
        }
    }
};

constexpr Int8Tables INT8_TABLES{};

// The integers of sixteen rows of the weight, block by block in order.
template <class Weight>
class Int8Reader {
  public:
    using Columns = typename Weight::Columns;

    // next: what is read after it, which comes nearer
    Int8Reader(const Columns& c, const Columns& next, i64 K) : c_(c), next_(next), K_(K) {}

    // What the integers of a block are worth, a lane for each row.
    __m512 start(i64 block) {
        constexpr i64 OF_LINE = Weight::BLOCK / 4;  // blocks that 64 scales of a row belong to
        const i64 at = block / OF_LINE * 64;
        if (block % OF_LINE == 0) {
            words_of(c_.scales, at, K_ / Weight::BLOCK, scales_);
            for (int i = 0; i < LANES; ++i) Weight::fetch_line(next_.scales[i] + at);
        }
        if constexpr (Weight::POWERS_OF_TWO) {
            if ((powers_ = start_powers(block % OF_LINE))) return step_;
        }
        constexpr int EACH = int(Weight::BLOCK / INT8_CODES), WORDS = 4 / EACH;
        __m512 scales[INT8_BLOCK / INT8_CODES];
        __m512i most = _mm512_setzero_si512();  // bits of sizes order as sizes do, NaN last
        for (int w = 0; w < WORDS; ++w) {
            const auto four = Scales<Weight>::of(scales_[block % OF_LINE * WORDS + w]);
            for (int i = 0; i < 4; ++i) {
                const __m512 scale = four.of_words(i);
                for (int j = 0; j < EACH; ++j) scales[(4 * w + i) * EACH + j] = scale;
                most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(scale)));
            }
        }
        const __m512 largest = _mm512_castsi512_ps(most);
        const __mmask16 nan = _mm512_cmp_ps_mask(largest, largest, _CMP_UNORD_Q);
        const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(INT8_LEAST), _CMP_GE_OQ);
        const __m512 factor = _mm512_maskz_div_ps(some, _mm512_set1_ps(2048.f), largest);
        for (int b = 0; b < INT8_BLOCK / INT8_CODES; b += EACH) {
            const __m512i ratio = _mm512_maskz_cvtps_epi32(some, _mm512_mul_ps(scales[b], factor));
            const __m512i both =
                _mm512_mask_mov_epi16(_mm512_slli_epi32(ratio, 16), 0x55555555, ratio);
            for (int j = 0; j < EACH; ++j) ratios_[b + j] = both;
        }
        const __m512 step = _mm512_maskz_mul_ps(some, largest, _mm512_set1_ps(0.0625f));
        return _mm512_mask_mov_ps(step, nan, _mm512_set1_ps(as_float(0x7FC00000)));
    }

    // Calls body(i, integers) for words i = 0, 1, ... of four columns each of half a block, as
    // bytes; 128 larger.
    template <class Body>
    [[gnu::always_inline]] void half(i64 block, int half, Body body) {
        const i64 at = (INT8_BLOCK * block + 128 * half) / 2;
        alignas(64) __m512i words[16];
        words_of(c_.codes, at, K_ / 2, words);
        for (int i = 0; i < LANES; ++i)
            _mm_prefetch(reinterpret_cast<const char*>(next_.codes[i] + at), _MM_HINT_T1);
        const int count = int(std::min<i64>(16, (K_ - 2 * at) / 8));
        const __m512i flip = _mm512_set1_epi8(char(0x80));
        if (powers_) {
            const __m512i numbers = _mm512_xor_si512(_mm512_load_si512(INT8_TABLES.of_power), flip);
            const __m512i code = _mm512_set1_epi8(15);
            for (int i = 0; i < 16; ++i) {
                const __m512i halved = ratios_[4 * half + i / 4];
                // of the code its four bits, of the others those of `halved`
                body(2 * i, _mm512_permutexvar_epi8(
                                _mm512_ternarylogic_epi32(code, words[i], halved, 0xCA), numbers));
                const __m512i odd = _mm512_srli_epi32(words[i], 4);
                body(2 * i + 1, _mm512_permutexvar_epi8(
                                    _mm512_ternarylogic_epi32(code, odd, halved, 0xCA), numbers));
            }
            return;
        }
        const __m512i of_low = _mm512_load_si512(INT8_TABLES.of_low),
                      of_high = _mm512_load_si512(INT8_TABLES.of_high);
        const __m512i half_of_256 = _mm512_set1_epi16(128);
        for (int i = 0; i < count; i += 2) {
            const __m512i ratio = ratios_[8 * half + i / 2];
            for (int j = 0; j < 2; ++j) {
                for (int p = 0; p < 2; ++p) {
                    const auto pairs = [&](int shift, __m512i table) {
                        return _mm512_permutexvar_epi16(_mm512_srli_epi16(words[i + j], shift),
                                                        table);
                    };
                    const __m512i low = _mm512_mulhrs_epi16(pairs(4 * p, of_low), ratio);
                    const __m512i high = _mm512_add_epi16(
                        _mm512_mullo_epi16(pairs(4 * p + 8, of_high), ratio), half_of_256);
                    const __m512i bytes = _mm512_mask_mov_epi8(high, 0x5555555555555555ull, low);
                    body(2 * (i + j) + p, _mm512_xor_si512(bytes, flip));
                }
            }
        }
    }

  private:
    // Whether a whole block has no scale below an eighth of the largest of its row, nor NaN: then
    // `ratios_` of 32 codes each are how many times their scale is half of it, 16 times that in
    // each byte.
    bool start_powers(i64 of_line) {
        const __m512i first = scales_[2 * of_line], second = scales_[2 * of_line + 1];
        __m512i largest = _mm512_max_epu8(first, second);
        largest = _mm512_max_epu8(largest, _mm512_rol_epi32(largest, 16));
        largest = _mm512_max_epu8(largest, _mm512_rol_epi32(largest, 8));
        const __m512i halved[2] = {_mm512_sub_epi8(largest, first),
                                   _mm512_sub_epi8(largest, second)};
        const __m512i exponent = _mm512_srli_epi32(largest, 24);
        const __mmask16 bad = _mm512_cmpge_epu32_mask(
            _mm512_sub_epi32(exponent, _mm512_set1_epi32(27)), _mm512_set1_epi32(255 - 27));
        if (bad != 0 ||
            _mm512_cmpgt_epu8_mask(_mm512_max_epu8(halved[0], halved[1]), _mm512_set1_epi8(3)) != 0)
            return false;
        for (int i = 0; i < 8; ++i) {
            const __m512i of_word = _mm512_slli_epi32(halved[i / 4], 4);
            ratios_[i] =
                _mm512_shuffle_epi8(of_word, _mm512_load_si512(INT8_TABLES.each_of_4[i % 4]));
        }
        step_ = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(4)), 23));
        return true;
    }

    const Columns &c_, &next_;
    const i64 K_;
    __m512i scales_[16];  // a line of them: word w of every row
    __m512i ratios_[INT8_BLOCK / INT8_CODES];
    __m512 step_;
    bool powers_ = false;
};

// Activations of a block -> bytes in the order of the weight's integers, zeros behind them; what
// one is worth.
inline float int8_block(const float* x, i64 count, u8* out) {
    alignas(64) float padded[INT8_BLOCK];
    if (count < INT8_BLOCK) {
        std::fill(std::copy(x, x + count, padded), padded + INT8_BLOCK, 0.f);
        x = padded;
    }
    __m512 v[16];
    __m512 most = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int i = 0; i < 16; ++i) {
        v[i] = _mm512_loadu_ps(x + 16 * i);
        most = _mm512_max_ps(most, _mm512_abs_ps(v[i]));
        nan |= _mm512_cmp_ps_mask(v[i], v[i], _CMP_UNORD_Q);
    }
    const float largest = nan != 0 ? as_float(0x7FC00000) : _mm512_reduce_max_ps(most);
    const bool some = is_some(largest);
    const __m512 factor = _mm512_set1_ps(some ? 127.f / largest : 0.f);
    const __mmask16 used = some ? 0xFFFF : 0;
    for (int i = 0; i < 4; ++i) {
        __m512i bytes = _mm512_setzero_si512();
        const auto four = [&](int j) {
            return _mm512_cvtepi32_epi8(
                _mm512_maskz_cvtps_epi32(used, _mm512_mul_ps(v[4 * i + j], factor)));
        };
        bytes = _mm512_inserti32x4(bytes, four(0), 0);
        bytes = _mm512_inserti32x4(bytes, four(1), 1);
        bytes = _mm512_inserti32x4(bytes, four(2), 2);
        bytes = _mm512_inserti32x4(bytes, four(3), 3);
        _mm512_storeu_si512(out + 64 * i,
                            _mm512_shuffle_epi8(bytes, _mm512_load_si512(INT8_TABLES.order)));
    }
    return int8_step(largest, largest / 127.f);
}

template <class Weight_>
struct Avx512Int8 {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Activation = float;
    using Packed = u16;  // in place of an element each: its byte, then the `Block`s
    using Panel = u32;   // of each block the steps [column_blocks][16], then integers of four
                         // columns [64][column_blocks][16]
    static constexpr int SMALL_M = 16, ROWS = 6, COLUMN_BLOCKS = 4, MIN_EXPONENT = -127,
                         MAX_EXPONENT = 128;  // whatever they are

    struct Block {
        float step;
        i32 rest;  // what is added to sums: -128 times that of the integers
    };

    typedef i32 Sums __attribute__((
        vector_size(64)));  // as `__m512i`, eight times 64 bits, g++ would move them about

    static i64 padded(i64 K) { return int8_blocks(K) * INT8_BLOCK; }
    static const u8* integers(const Packed* row) { return reinterpret_cast<const u8*>(row); }
    static const Block* blocks(const Packed* row, i64 K) {
        return reinterpret_cast<const Block*>(row + padded(K) / 2);
    }

    static Block pack_block(const float* x, i64 count, u8* out) {
        const float step = int8_block(x, count, out);
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < 4; ++i)
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_loadu_si512(out + 64 * i));
        return {step, -128 * _mm512_reduce_add_epi32(sum)};
    }

    static void pack(const float* x, Packed* packed, i64 K) {
        u8* out = const_cast<u8*>(integers(packed));
        Block* of = const_cast<Block*>(blocks(packed, K));
        for (i64 k = 0; k < K; k += INT8_BLOCK)
            *of++ = pack_block(x + k, std::min(INT8_BLOCK, K - k), out + k);
    }

    // A block of each row, then the next: whole rows lie a power of two apart, and would meet in
    // few places of the first-level cache.
    static void pack_small_m(const float* x, i64 r, Packed* packed, i64, i64 K) {
        u8* out = const_cast<u8*>(integers(packed)) + r * INT8_BLOCK;
        Block* of = const_cast<Block*>(small_m_blocks(packed, K)) + r;
        for (i64 k = 0; k < K; k += INT8_BLOCK, out += SMALL_M * INT8_BLOCK, of += SMALL_M) {
            *of = pack_block(x + k, std::min(INT8_BLOCK, K - k), out);
        }
    }
    static const Block* small_m_blocks(const Packed* packed, i64 K) {
        return blocks(packed + (SMALL_M - 1) * padded(K) / 2, K);
    }

    template <int R>
    static void small_m_rows(const Columns& c, const Columns& next, const Packed* packed, i64 K,
                             float* out, i64 out_stride) {
        constexpr int CHAINS = R == 1 ? 2 : 1;  // sums wait for the one before in their chain
        __m512 sum[R];
        for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
        Int8Reader<Weight> reader(c, next, K);
        const u8* x = integers(packed);
        const Block* of = small_m_blocks(packed, K);
        for (i64 b = 0; b < int8_blocks(K); ++b, x += SMALL_M * INT8_BLOCK, of += SMALL_M) {
            const __m512 step = reader.start(b);
            Sums of_block[CHAINS][R] = {};
            for (int half = 0; half < 2 && b * INT8_BLOCK + 128 * half < K; ++half) {
                const u8* at = x + 128 * half;
                reader.half(b, half, [&](int i, __m512i w) {
                    for (int r = 0; r < R; ++r) {
                        Sums& to = of_block[i % CHAINS][r];
                        to = Sums(
                            _mm512_dpbusd_epi32(__m512i(to), w, four(at + r * INT8_BLOCK + 4 * i)));
                    }
                });
            }
            for (int r = 0; r < R; ++r) {
                Sums all = of_block[0][r] + of[r].rest;
                if (CHAINS == 2) all += of_block[CHAINS - 1][r];
                sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(__m512i(all)),
                                         _mm512_mul_ps(_mm512_set1_ps(of[r].step), step), sum[r]);
            }
        }
        const __m512 factor = _mm512_load_ps(c.factor);
        for (int r = 0; r < R; ++r)
            _mm512_storeu_ps(out + r * out_stride, _mm512_mul_ps(sum[r], factor));
    }

    static void small_m(int rows, const Columns& c, const Columns& next, const Packed* packed, i64,
                        i64 K, float* out, i64 out_stride) {
        with_constant<1, 2, 4, 8, 16>(
            rows, [&](auto r) { small_m_rows<r>(c, next, packed, K, out, out_stride); });
    }

    static void dequantize(const Columns* c, const Columns* next, int column_blocks, i64 K,
                           Panel* panel) {
        for (int s = 0; s < column_blocks; ++s) {
            Int8Reader<Weight> reader(c[s], next[s], K);
            Panel* block = panel + s * LANES;
            for (i64 b = 0; b < int8_blocks(K); ++b, block += OF_BLOCK * column_blocks) {
                _mm512_store_ps(block, reader.start(b));
                for (int half = 0; half < 2 && b * INT8_BLOCK + 128 * half < K; ++half) {
                    reader.half(b, half, [&](int i, __m512i w) {
                        _mm512_store_si512(block + (1 + 32 * half + i) * column_blocks * LANES, w);
                    });
                }
            }
        }
    }

    static void multiply(int rows, int column_blocks, const Packed* x, i64 stride,
                         const Panel* panel, i64 K, const Columns* c, float* out, i64 out_stride) {
        up_to<COLUMN_BLOCKS>(column_blocks, [&](auto s) {
            up_to<ROWS>(rows, [&](auto r) { tile<r, s>(x, stride, panel, K, out, out_stride); });
        });
        multiply_by_factors(rows, column_blocks, c, out, out_stride);
    }

    template <int R, int S>
    static void tile(const Packed* x, i64 stride, const Panel* panel, i64 K, float* out,
                     i64 out_stride) {
        for (i64 b = 0; b < int8_blocks(K); ++b, panel += OF_BLOCK * S) {
            const int words = int(std::min(INT8_BLOCK, K - b * INT8_BLOCK) / 4);
            add_block<R, S>(integers(x) + b * INT8_BLOCK, blocks(x, K) + b, 2 * stride, panel,
                            words, b == 0, out, out_stride);
        }
    }

    // A block's products, added to those of the blocks before.
    template <int R, int S>
    static void add_block(const u8* x, const Block* of, i64 row_bytes, const Panel* panel,
                          int words, bool first, float* out, i64 out_stride) {
        const u8* first_of = reinterpret_cast<const u8*>(of);
        const auto of_row = [=](int r) -> const Block& {
            return *reinterpret_cast<const Block*>(first_of + r * row_bytes);
        };
        Sums sum[R][S] = {};
        const Panel* at = panel + S * LANES;
        for (int i = 0; i < words; ++i, at += S * LANES) {
            __m512i w[S];
            for (int s = 0; s < S; ++s) w[s] = _mm512_load_si512(at + s * LANES);
            for (int r = 0; r < R; ++r) {
                const __m512i a = four(x + 4 * i + r * row_bytes);
                for (int s = 0; s < S; ++s)
                    sum[r][s] = Sums(_mm512_dpbusd_epi32(__m512i(sum[r][s]), w[s], a));
            }
        }
        for (int r = 0; r < R; ++r) {
            const __m512 step = _mm512_set1_ps(of_row(r).step);
            for (int s = 0; s < S; ++s) {
                float* to = out + r * out_stride + s * LANES;
                const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
                const __m512 both = _mm512_mul_ps(step, _mm512_load_ps(panel + s * LANES));
                _mm512_storeu_ps(
                    to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(__m512i(sum[r][s] + of_row(r).rest)),
                                        both, before));
            }
        }
    }

  private:
    static constexpr i64 OF_BLOCK =
        (1 + INT8_BLOCK / 4) * LANES;  // words of a panel of one column block

    static __m512i four(const u8* at) {
        i32 bytes;
        std::memcpy(&bytes, at, sizeof bytes);
        return _mm512_set1_epi32(bytes);
    }
};

template <class Weight>
struct Avx512Int8Isa : VectorIsa {
    using Wide = Panels<Avx512Int8<Weight>>;
    template <class A>
    using Fast = Kernels<SmallM<Avx512Int8<Weight>>, Wide>;
};

}  // namespace
