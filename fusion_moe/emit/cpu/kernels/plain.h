// Weights in one part, the numbers themselves, without scales: [G, N, K] of T.
#pragma once

#include "weight.h"

namespace {

template <class T>
struct PlainWeight : PortableWeight {
    static constexpr double BYTES = sizeof(T);

    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        const T* row = static_cast<const T*>(p.parts[0]) + (g * p.N + n) * p.K + k;
        for (i64 i = 0; i < count; ++i) out[i] = widen(row[i]);
    }
};

}  // namespace
