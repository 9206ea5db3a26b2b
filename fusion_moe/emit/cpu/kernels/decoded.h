// Kernels for any reader: the weight decoded to float32 by its `decode`, products by the vectors of a tier.
#pragma once

#include "panels.h"
#include "weight.h"

namespace {

// A few rows: dot products with what is decoded, which stays in the first-level cache.
template <class Weight_>
struct DecodedRows {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Activation = float;
    using Packed = float;
    static constexpr auto FEW_NAME = "by dot products with decoded weights";
    static constexpr int FEW = 4, SMALLEST = -127, LARGEST = 128;  // whatever they are

    static void pack_few(const float* x, i64 r, Packed* packed, i64 stride, i64 K) {
        std::memcpy(packed + r * stride, x, std::size_t(K) * sizeof(float));
    }

    static void few(int rows, const Columns& c, const Columns&, const Packed* x, i64 stride, i64 K, float* out, i64 out_stride) {
        alignas(64) float w[RUN];
        for (int n = 0; n < LANES; ++n) {
            float sum[FEW] = {};
            for (i64 k = 0; k < K; k += RUN) {
                const i64 count = std::min(RUN, K - k);
                Weight::decode(*c.problem, c.g, c.n[n], k, count, w);
                for (int r = 0; r < rows; ++r) sum[r] += dot(w, x + r * stride + k, count);
            }
            for (int r = 0; r < rows; ++r) out[r * out_stride + n] = sum[r];
        }
    }

    static float dot(const float* a, const float* b, i64 count) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (i64 i = 0; i < count; ++i) sum += a[i] * b[i];
        return sum;
    }
};

// Panels of decoded weights. F32: a tier's `pack` and `multiply` of float32.
template <class F32, class Weight_>
struct Decoded : F32 {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    static constexpr int SMALLEST = -127, LARGEST = 128;  // whatever they are

    static void decode(const Columns* c, const Columns*, int subs, i64 K, float* panel) {
        alignas(64) float w[LANES][RUN];
        for (i64 k = 0; k < K; k += RUN) {
            const i64 count = std::min(RUN, K - k);
            for (int s = 0; s < subs; ++s) {
                for (int i = 0; i < LANES; ++i) Weight::decode(*c[s].problem, c[s].g, c[s].n[i], k, count, w[i]);
                float* out = panel + (k * subs + s) * LANES;
                for (i64 j = 0; j < count; ++j) {
                    for (int i = 0; i < LANES; ++i) out[j * subs * LANES + i] = w[i][j];
                }
            }
        }
    }
};

template <class F32, class Weight>
struct DecodedTier {
    using Wide = Panels<Decoded<F32, Weight>>;
    template <class A>
    using Fast = Kernels<FewRows<DecodedRows<Weight>>, Wide>;
    struct Thread {};
    static constexpr double ROWS_OF_DECODING = 8;
};

}  // namespace
