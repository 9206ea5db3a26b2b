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

// Float32.
struct F32Words {
    using Activation = float;
    using Packed = float;
    using Panel = float;
    static constexpr i64 DEPTH = 1;

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
