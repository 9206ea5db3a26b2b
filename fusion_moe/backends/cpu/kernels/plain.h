// Weights in one part, the numbers themselves, without scales: [G, N, K] of T.
#pragma once

#include "weight.h"

namespace {

template <class T>
struct PlainWeight : PortableWeight {
    static constexpr double BYTES = sizeof(T);
    static constexpr i64 ALIGNED = 1;

    static const T* matrix(const Problem& p, i64 g) {
        return static_cast<const T*>(p.parts[0]) + g * p.N * p.K;
    }

    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        const T* row = matrix(p, g) + n * p.K + k;
        for (i64 i = 0; i < count; ++i) out[i] = widen(row[i]);
    }
};

// Whether products of activations and weights are products of pairs of bfloat16.
template <class Pairs, class Weight, class A>
constexpr bool ARE_PAIRS =
    !std::is_void<Pairs>::value && std::is_same<Weight, PlainWeight<bf16>>::value &&
    std::is_same<A, bf16>::value;

}  // namespace
