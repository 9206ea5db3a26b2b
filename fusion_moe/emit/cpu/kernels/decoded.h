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

    // RUN activations of each row, then the next; zeros at the end. Whole rows may lie a power of two apart, and would meet in few places of
    // the first-level cache.
    static void pack_few(const float* x, i64 r, Packed* packed, i64, i64 K) {
        for (i64 k = 0; k < K; k += RUN) {
            float* at = packed + k * FEW + r * RUN;
            std::fill(std::copy(x + k, x + std::min(k + RUN, K), at), at + RUN, 0.f);
        }
    }

    static void few(int rows, const Columns& c, const Columns&, const Packed* x, i64, i64 K, float* out, i64 out_stride) {
        switch (rows) {
            case 1: return few_rows<1, 1>(c, x, K, out, out_stride);
            case 2: return few_rows<2, 2>(c, x, K, out, out_stride);
            case 3: return few_rows<3, 2>(c, x, K, out, out_stride);
            default: return few_rows<4, 2>(c, x, K, out, out_stride);
        }
    }

  private:
    // Sixteen sums, in as many registers as they take. Written as vectors, since compilers may not change the order of a sum.
    typedef float Sums __attribute__((vector_size(4 * LANES)));

    // AT_ONCE rows of the weight, which share what is loaded of the activations.
    template <int R, int AT_ONCE>
    static void few_rows(const Columns& c, const Packed* x, i64 K, float* out, i64 out_stride) {
        alignas(64) float w[AT_ONCE][RUN];
        for (int n = 0; n < LANES; n += AT_ONCE) {
            Sums sum[2][AT_ONCE][R] = {};  // two chains: a sum waits for the one before in its chain
            for (i64 k = 0; k < K; k += RUN) {
                const i64 count = std::min(RUN, K - k);
                for (int j = 0; j < AT_ONCE; ++j) {
                    Weight::decode(*c.problem, c.g, c.n[n + j], k, count, w[j]);
                    std::fill(w[j] + count, w[j] + RUN, 0.f);
                }
                for (i64 i = 0; i < count; i += 2 * LANES) {
                    add(w, x + k * FEW, i, sum[0]);
                    add(w, x + k * FEW, i + LANES, sum[1]);
                }
            }
            for (int j = 0; j < AT_ONCE; ++j) {
                for (int r = 0; r < R; ++r) out[r * out_stride + n + j] = total(sum[0][j][r] + sum[1][j][r]);
            }
        }
    }

    template <int R, int AT_ONCE>
    static void add(const float (&w)[AT_ONCE][RUN], const Packed* x, i64 i, Sums (&sum)[AT_ONCE][R]) {
        for (int r = 0; r < R; ++r) {
            Sums a, b;
            std::memcpy(&a, x + r * RUN + i, sizeof a);
            for (int j = 0; j < AT_ONCE; ++j) {
                std::memcpy(&b, w[j] + i, sizeof b);
                sum[j][r] += a * b;
            }
        }
    }

    static float total(const Sums& sums) {
        float half[8];
        for (int i = 0; i < 8; ++i) half[i] = sums[i] + sums[i + 8];
        return ((half[0] + half[4]) + (half[1] + half[5])) + ((half[2] + half[6]) + (half[3] + half[7]));
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
