// The reader of an encoding, from what its descriptor says (readers.py writes that as a `Format`):
//
//     BYTES         of an element in memory, its share of the scales included
//     BITS          of a code: 1, 2, 4 or 8
//     FLIP, FIRST   the number of a code is (code ^ FLIP) + FIRST, an integer; or, if there is one,
//     TABLE         is what each code stands for
//     SHIFT, FACTOR of floats of 8 bits: those but the sign, so much further left, are of a float16
//                   that makes the number times FACTOR. Codes of ones may be NaN
//     Scales        Levels of the parts after the codes, in their order
//
// element = (code - zero point) * (scale * scale * ...), every operation one of float32.
#pragma once

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include <tuple>
#include <type_traits>

#include "order.h"
#include "weight.h"

namespace {

struct e4m3 {
    u8 bits;
};

struct e8m0 {
    u8 bits;
};

inline float widen(u8 x) { return float(x); }
inline float widen(e4m3 x) { return e4m3_(x.bits); }
inline float widen(e8m0 x) { return e8m0_(x.bits); }

// One number, where nothing is made vectors of.
template <class T>
inline float one(T x) {
    return widen(x);
}
#if defined(__F16C__)
inline float one(f16 x) { return _cvtsh_ss(x.bits); }
#endif

enum class Role { MULTIPLIER, DIVISOR, ZERO_POINT };

constexpr i64 OF_ROW = -1, OF_MATRIX = 0;  // in place of a block

// One scale, or zero point, for every BLOCK_ elements of a row; or one for a row: in an order.
template <class T, i64 BLOCK_, Role ROLE_, class Order = LinearOrder>
struct Level {
    static constexpr i64 BLOCK = BLOCK_;
    static constexpr Role ROLE = ROLE_;
    static_assert(BLOCK <= 0 || BLOCK % LANES == 0,
                  "sixteen elements of a row share each of their scales");

    const T* first;  // of row n of matrix g

    Level(const void* part, const Problem& p, i64 g, i64 n) : first(static_cast<const T*>(part)) {
        if constexpr (!IS_LINEAR<Order>) {
            const i64 blocks = BLOCK > 0 ? (p.K + BLOCK - 1) / BLOCK : 1;
            first += g * Order::size(p.N, blocks) + Order::of_row(n, blocks);
            return;
        }
        const i64 row = g * p.N + n;
        first += BLOCK > 0         ? row * ((p.K + BLOCK - 1) / BLOCK)
                 : BLOCK == OF_ROW ? row
                                   : g * p.runs + n / (p.N / p.runs);
    }

    // That of element k.
    float at(i64 k) const {
        const float x = one(first[Order::of_column(BLOCK > 0 ? i64(u64(k) / u64(BLOCK)) : 0)]);
        return ROLE == Role::DIVISOR ? 1.f / x : x;
    }

    // Whether all of a row, multiplied after products are added, leave those among the normal
    // numbers.
    bool in_range(i64 K) const {
        constexpr u32 LEAST = 0x21800000u, MOST = 0x49800000u;  // 2^-60, 2^20; or zero
        const i64 count = BLOCK > 0 ? (K + BLOCK - 1) / BLOCK : 1;
        u32 most = 0;
#pragma omp simd reduction(max : most)
        for (i64 i = 0; i < count; ++i) {
            const u32 size = as_bits(widen(first[Order::of_column(i)])) & 0x7FFFFFFFu;
            most = std::max(most, size == 0 ? 0 : size - LEAST);
        }
        return most <= MOST - LEAST;
    }
};

// Those of a row, from the finest to the coarsest.
template <class... Each>
struct Levels {
    static_assert(sizeof...(Each) < PARTS, "a problem has a place for each part");
    static constexpr bool HAS_ZERO_POINT = ((Each::ROLE == Role::ZERO_POINT) || ...);
    static constexpr bool IS_FACTOR =
        sizeof...(Each) == 1 && ((Each::ROLE == Role::MULTIPLIER) && ...);
    // How many elements of a row share all of their scales, in equal pieces of a run.
    static constexpr i64 LEAST = std::min({RUN, (Each::BLOCK > 0 ? Each::BLOCK : RUN)...}),
                         SHARED = RUN % LEAST == 0 ? LEAST : LANES;

    std::tuple<Each...> each;

    static Levels of(const Problem& p, i64 g, i64 n) {
        int part = 0;
        return {std::tuple<Each...>{Each(p.parts[++part], p, g, n)...}};
    }

    float scale(i64 k) const {
        float product = 1.f;  // 1 times the first is the first
        std::apply(
            [&](const Each&... level) {
                ((product *= level.ROLE == Role::ZERO_POINT ? 1.f : level.at(k)), ...);
            },
            each);
        return product;
    }

    bool in_range(i64 K) const {
        return std::apply([&](const Each&... level) { return (level.in_range(K) && ...); }, each);
    }

    float zero_point(i64 k) const {
        float found = 0.f;
        std::apply(
            [&](const Each&... level) {
                ((found = level.ROLE == Role::ZERO_POINT ? level.at(k) : found), ...);
            },
            each);
        return found;
    }
};

// Each byte's lower and upper BITS, which are all that it has -> two bytes.
template <int BITS>
inline void pairs_of(const u8* bytes, i64 count, u8* codes) {
    u16 pairs[RUN / 2];
    for (i64 i = 0; i < count; ++i)
        pairs[i] = u16((bytes[i] | bytes[i] << (8 - BITS)) & ((1 << BITS) - 1) * 0x0101);
    std::memcpy(codes, pairs, std::size_t(2 * count));
}

// Bytes of several codes each -> one code a byte, in halves, by arithmetic that compilers make
// vectors of.
template <int BITS>
inline void spread(const u8* packed, i64 bytes, u8* codes) {
    if constexpr (BITS < 4) {
        u8 wider[RUN];
        spread<2 * BITS>(packed, bytes, wider);
        pairs_of<BITS>(wider, bytes * (4 / BITS), codes);
    } else {
        pairs_of<BITS>(packed, bytes, codes);
    }
}

template <class Format, class = void>
constexpr bool HAS_TABLE = false;
template <class Format>
constexpr bool HAS_TABLE<Format, std::void_t<decltype(Format::TABLE)>> = true;

template <class Format, class = void>
constexpr bool IS_FLOAT = false;
template <class Format>
constexpr bool IS_FLOAT<Format, std::void_t<decltype(Format::SHIFT)>> = true;

#if defined(__AVX512F__)
// The numbers of sixteen codes, one in each lane. A table of sixteen fits in a register, floats of
// 8 bits are moved to where float16 has them: compilers would read either from memory, one by one.
template <class Format>
inline __m512 numbers_of(__m512i code) {
    if constexpr (!HAS_TABLE<Format>) {
        const auto integers = [](__m512i x) {
            const __m512i order = _mm512_xor_si512(x, _mm512_set1_epi32(Format::FLIP));
            return _mm512_cvtepi32_ps(_mm512_add_epi32(order, _mm512_set1_epi32(Format::FIRST)));
        };
        if constexpr (Format::BITS > 4) return integers(code);
        return _mm512_permutexvar_ps(code, integers(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                                                                      10, 11, 12, 13, 14, 15)));
    } else if constexpr (!IS_FLOAT<Format>) {
        return _mm512_permutexvar_ps(code, _mm512_loadu_ps(Format::TABLE));
    } else {
        const __m512i size = _mm512_and_si512(code, _mm512_set1_epi32(127)),
                      sign = _mm512_slli_epi32(_mm512_xor_si512(code, size), 8),
                      half = _mm512_or_si512(sign, _mm512_slli_epi32(size, Format::SHIFT));
        const __m512 found = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)),
                                           _mm512_set1_ps(Format::FACTOR));
        if constexpr (Format::TABLE[127] == Format::TABLE[127]) return found;
        return _mm512_mask_mov_ps(found, _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(127)),
                                  _mm512_set1_ps(Format::TABLE[127]));
    }
}

template <class Format>
inline __m512 scaled(__m512i codes, float zero, float scale) {
    const __m512 x = _mm512_sub_ps(numbers_of<Format>(codes), _mm512_set1_ps(zero));
    return _mm512_mul_ps(x, _mm512_set1_ps(scale));
}
#endif

// Sixteen elements: the numbers of their codes, less the zero point, times the scale.
template <class Format>
inline void elements_of(const u8* code, float zero, float scale, float* out) {
#if defined(__AVX512F__)
    if constexpr (IS_FLOAT<Format> || !HAS_TABLE<Format> || Format::BITS < 8) {
        const __m512i each =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code)));
        return _mm512_storeu_ps(out, scaled<Format>(each, zero, scale));
    }
#endif
    u8 codes[LANES];  // `code` may lie in `out`, for all that a compiler knows
    std::memcpy(codes, code, sizeof codes);
    for (int i = 0; i < LANES; ++i) {
        float x;
        if constexpr (HAS_TABLE<Format>) {
            x = Format::TABLE[codes[i]];
        } else {
            x = float(i32(codes[i] ^ Format::FLIP) + Format::FIRST);
        }
        out[i] = (x - zero) * scale;
    }
}

// Elements: the order of pieces of LANES elements.
template <class Format, class Elements = LinearOrder>
struct DerivedWeight : PortableWeight {
    using Codes = Format;
    using Scales = typename Format::Scales;
    static constexpr double BYTES = Format::BYTES;
    static constexpr i64 ALIGNED = LANES, SHARED = Scales::SHARED;
    static constexpr bool ARE_BYTES =
        IS_FLOAT<Format> && Scales::IS_FACTOR && SHARED % 128 == 0 && IS_LINEAR<Elements>;

    // Row n of matrix g, of codes of 8 bits.
    static const u8* codes(const Problem& p, i64 g, i64 n) {
        return static_cast<const u8*>(p.parts[0]) + (g * p.N + n) * p.K;
    }

    // What bytes.h asks; other kernels of derived readers take every scale.
    static bool scales_in_range(const WorkTile& work_tile) {
        bool good = true;
        for (i64 s = 0; ARE_BYTES && s < work_tile.column_blocks(); ++s) {
            const Columns c = work_tile.columns<DerivedWeight>(s);
            for (int i = 0; i < LANES; ++i)
                good = good && Scales::of(*c.problem, c.g, c.at[i]).in_range(c.problem->K);
        }
        return good;
    }

    // `out` is written up to a multiple of LANES.
    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        const auto scales = Scales::of(p, g, n);
        const u8* packed = static_cast<const u8*>(p.parts[0]) + ((g * p.N + n) * p.K + k) / EACH;
        u8 together[IS_LINEAR<Elements> ? 1 : RUN];
        if constexpr (!IS_LINEAR<Elements>) {
            const i64 of_row = p.K / LANES;
            packed = static_cast<const u8*>(p.parts[0]) +
                     (g * Elements::size(p.N, of_row) + Elements::of_row(n, of_row)) * PIECE;
            for (i64 i = 0; i < count / LANES; ++i)
                std::memcpy(together + i * PIECE,
                            packed + Elements::of_column(k / LANES + i) * PIECE, PIECE);
            packed = together;
        }
        const u64 inside = u64(k) % SHARED;
        if (inside == 0 && count == RUN) {  // loops of known length
            dequantize(scales, packed, k, 0, RUN, out);
        } else {
            dequantize(scales, packed, k, inside, count, out);
        }
    }

  private:
    static constexpr int EACH = 8 / Format::BITS;           // codes of a byte
    static constexpr i64 PIECE = LANES * Format::BITS / 8;  // bytes

    __attribute__((always_inline)) static void dequantize(const Scales& scales, const u8* packed,
                                                          i64 k, u64 inside, i64 count,
                                                          float* out) {
        float scale[RUN / SHARED + 1], zero[RUN / SHARED + 1] = {};
        for (i64 block = 0; block * SHARED < i64(inside) + count; ++block) {
            const i64 at = k - i64(inside) + block * SHARED;
            scale[block] = scales.scale(at);
            if (Scales::HAS_ZERO_POINT) zero[block] = scales.zero_point(at);
        }
#if defined(__AVX512VBMI__)
        if (Format::BITS == 4 && count % LANES == 0) {
            for (i64 i = 0; i < count; i += LANES) {
                const u64 block = (inside + u64(i)) / SHARED;
                _mm512_storeu_ps(
                    out + i, scaled<Format>(nibbles_of(packed + i / 2), zero[block], scale[block]));
            }
            return;
        }
#endif
        u8 held[RUN];
        const u8* codes = held;
        if constexpr (EACH > 1) {
            spread<Format::BITS>(packed, count / EACH, held);
        } else if (count % LANES == 0) {
            codes = packed;
        } else {
            std::memcpy(held, packed, std::size_t(count));
        }
        for (i64 i = 0; i < count; i += LANES) {
            const u64 block = (inside + u64(i)) / SHARED;
            elements_of<Format>(codes + i, zero[block], scale[block], out + i);
        }
    }
};

}  // namespace
