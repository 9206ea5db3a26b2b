// Words of four bytes, which all products of floats take: a float32, or a pair of bfloat16 of
// consecutive contracted elements. The vectors of an ISA level, `V` here, have
//
//     Packed, Panel  the type of a word
//     DEPTH          how many contracted elements are in one
//     word           of element j of DEPTH rows; `first` is that of the first row alone; `words`
//     makes sixteen transpose      sixteen rows of sixteen words -> word w of every row, for each w
#pragma once

#include "tiles.h"

namespace {

template <class V>
constexpr i64 words_of(i64 contracted) {
    return (contracted + V::DEPTH - 1) / V::DEPTH;
}

// Calls body(N), N the constant that is n: 1 .. MOST.
template <int MOST, class Body>
[[gnu::always_inline]] inline void up_to(int n, const Body& body) {
    if constexpr (MOST > 1) {
        if (n < MOST) return up_to<MOST - 1>(n, body);
    }
    body(std::integral_constant<int, MOST>());
}

// Products of words, in tiles of up to ROWS rows and COLUMN_BLOCKS blocks. V has
//
//     Sums  a vector of float32
//     load  as many words of a panel
//     all   a word in each lane
//     add   products of such words, added to sums
//
// Panels are [words][column_blocks][16].
template <class V, class Word, int ROWS_, int COLUMN_BLOCKS_>
struct WordTiles {
    static constexpr int ROWS = ROWS_, COLUMN_BLOCKS = COLUMN_BLOCKS_;

    template <class Columns>
    static void multiply(int rows, int column_blocks, const Word* x, i64 stride, const Word* panel,
                         i64 K, const Columns*, float* out, i64 out_stride) {
        up_to<COLUMN_BLOCKS>(column_blocks, [&](auto s) {
            up_to<ROWS>(rows, [&](auto r) {
                tile<r, s>(x, stride, panel, words_of<V>(K), out, out_stride);
            });
        });
    }

  private:
    // x [R][stride] of so many words times the panel -> out [R][out_stride]
    template <int R, int S>
    static void tile(const Word* x, i64 stride, const Word* panel, i64 count, float* out,
                     i64 out_stride) {
        using Sums = typename V::Sums;
        typedef Sums Unaligned __attribute__((aligned(4), may_alias));
        constexpr int WIDTH = sizeof(Sums) / sizeof(float), VECTORS = S * LANES / WIDTH;
        Sums sum[R][VECTORS];
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < VECTORS; ++s) sum[r][s] = Sums{};
        }
        for (i64 p = 0; p < count; ++p, panel += S * LANES) {
            decltype(V::load(panel)) w[VECTORS];
            for (int s = 0; s < VECTORS; ++s) w[s] = V::load(panel + s * WIDTH);
            for (int r = 0; r < R; ++r) {
                const auto a = V::all(x[r * stride + p]);
                for (int s = 0; s < VECTORS; ++s) sum[r][s] = V::add(w[s], a, sum[r][s]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int s = 0; s < VECTORS; ++s)
                *reinterpret_cast<Unaligned*>(out + r * out_stride + s * WIDTH) = sum[r][s];
        }
    }
};

// Float32.
struct F32Words {
    using Activation = float;
    using Packed = float;
    using Panel = float;
    static constexpr i64 DEPTH = 1;
    static constexpr int MIN_EXPONENT = -127, MAX_EXPONENT = 128;  // whatever they are

    static void pack(const float* x, Packed* packed, i64 K) {
        std::memcpy(packed, x, std::size_t(K) * sizeof(float));
    }

    template <class T>
    static float word(const T* row, const T*, i64 j) {
        return widen(row[j]);
    }
    static float first(float word) { return word; }

    template <class T>
    static void words(const T* row, const T*, float* out) {
#pragma omp simd
        for (int i = 0; i < LANES; ++i) out[i] = widen(row[i]);
    }

    static void transpose(const float* in, i64 in_stride, float* out, i64 out_stride) {
        for (int j = 0; j < LANES; ++j) {
            for (int i = 0; i < LANES; ++i) out[j * out_stride + i] = in[i * in_stride + j];
        }
    }
};

// Elements j .. j + count - 1 of rows r .. r + DEPTH - 1, of which there are `rows`, as words;
// row(r) is where row r lies.
template <class V, class Row>
inline void words_of_rows(const Row& row, i64 r, i64 rows, i64 j, i64 count,
                          typename V::Panel* out) {
    const auto *a = row(r), *b = row(std::min(r + V::DEPTH, rows) - 1);
    if (r + V::DEPTH <= rows && count == LANES) {
        V::words(a + j, b + j, out);
    } else {
        for (i64 i = 0; i < count; ++i)
            out[i] = r + V::DEPTH <= rows ? V::word(a, b, j + i) : V::first(V::word(a, b, j + i));
    }
}

}  // namespace
