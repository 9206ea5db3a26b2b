// What the tiers share: sixteen columns of a product, and how a tier is spelled.
//
// A result has W columns; each is a function of F columns of the product (two, where gate and up become one). A tile of 16 columns of
// the result reads F times 16 rows of the weight, wherever these lie: a `Columns` for each. A tier is a struct with
//
//     few          rows x Columns straight from the codes, block scales in float32, up to FEW rows
//     decode       Columns -> a panel of weights
//     multiply     rows x a panel of up to SUBS Columns, up to ROWS rows
//
// on activations of a type `Packed` of its own: `pack` makes a row of them. The `Wide` ones are float32, weights are decoded as
// `code * (block_scale * decode_scale)`, each product rounded: the reference's numbers, for every input there is. The `Fast` ones may
// ask for activations and decode scales that are `usual`.
#pragma once

#include <algorithm>

#include "product.h"

namespace {

struct Columns {
    const u8* codes[LANES];
    const u8* scales[LANES];
    alignas(64) float decode[LANES];
};

// Rows column[first] .. column[first + 15] of matrix g; past W the last one again.
inline Columns columns_of(const Problem& p, i64 g, const i32* column, i64 first) {
    Columns c;
    const u32 run_rows = u32(p.N / p.runs);
    const u8* codes = p.codes + g * p.N * (p.K / 2);
    const u8* scales = p.scales + g * p.N * (p.K / 16);
    for (int i = 0; i < LANES; ++i) {
        const i64 n = column[first + i < p.W ? first + i : p.W - 1];
        c.codes[i] = codes + n * (p.K / 2);
        c.scales[i] = scales + n * (p.K / 16);
        c.decode[i] = p.decode[g * p.runs + (p.runs == 1 ? 0 : u32(n) / run_rows)];
    }
    return c;
}

// Decode scales that keep products among the normal numbers, whatever the order of multiplications.
inline bool usual_scales(const Problem& p, i64 g) {
    bool good = true;
    for (i64 s = 0; s < p.runs; ++s) {
        const float size = std::fabs(p.decode[g * p.runs + s]);
        good = good && ((size >= 0x1p-60f && size <= 0x1p20f) || size == 0.f);
    }
    return good;
}

// The size of an activation as bits, which order as sizes do; infinity and NaN are the largest.
inline u16 size_of(bf16 x) { return x.bits & 0x7FFF; }
inline u32 size_of(float x) { return as_bits(x) & 0x7FFFFFFFu; }
inline u32 size_of(f16 x) { return size_of(widen(x)); }

// Whether the largest of K activations lies between 2^-80 and 2^90, or all are zero: no sum of their products overflows, and what may be
// flushed to zero is 2^36 times smaller than the largest.
template <class A>
inline bool usual(const A* x, i64 K) {
    using Size = decltype(size_of(x[0]));
    constexpr int EXPONENT = sizeof(Size) == 2 ? 7 : 23;
    Size largest = 0;
    for (i64 k = 0; k < K; ++k) largest = std::max(largest, size_of(x[k]));
    return largest == 0 || (largest >> EXPONENT >= 127 - 80 && largest >> EXPONENT <= 127 + 90);
}

}  // namespace
