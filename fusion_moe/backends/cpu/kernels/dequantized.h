// Kernels for any reader: the weight dequantized to float32 by its `dequantize`, products by the
// vectors of an ISA level.
#pragma once

#include "panels.h"
#include "plain.h"
#include "words.h"

namespace {

// Small M: dot products with what is dequantized, which stays in the first-level cache.
template <class Weight_>
struct DequantizedRows {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Activation = float;
    using Packed = float;
    static constexpr int SMALL_M = 4, MIN_EXPONENT = -127, MAX_EXPONENT = 128;  // whatever they are

    // RUN activations of each row, then the next; zeros at the end. Whole rows may lie a power of
    // two apart, and would meet in few places of the first-level cache.
    static void pack_small_m(const float* x, i64 r, Packed* packed, i64, i64 K) {
        for (i64 k = 0; k < K; k += RUN) {
            float* at = packed + k * SMALL_M + r * RUN;
            std::fill(std::copy(x + k, x + std::min(k + RUN, K), at), at + RUN, 0.f);
        }
    }

    static void small_m(int rows, const Columns& c, const Columns&, const Packed* x, i64, i64 K,
                        float* out, i64 out_stride) {
        with_constant<1, 2, 3, 4>(
            rows, [&](auto r) { small_m_rows<r, r == 1 ? 1 : 2>(c, x, K, out, out_stride); });
    }

  private:
    // Sixteen sums, in as many registers as they take. Written as vectors, since compilers may not
    // change the order of a sum.
    typedef float Sums __attribute__((vector_size(4 * LANES)));

    // WEIGHT_ROWS rows of the weight, which share what is loaded of the activations.
    template <int R, int WEIGHT_ROWS>
    static void small_m_rows(const Columns& c, const Packed* x, i64 K, float* out, i64 out_stride) {
        alignas(64) float w[WEIGHT_ROWS][RUN];
        for (int n = 0; n < LANES; n += WEIGHT_ROWS) {
            Sums sum[2][WEIGHT_ROWS][R] =
                {};  // two chains: a sum waits for the one before in its chain
            for (i64 k = 0; k < K; k += RUN) {
                const i64 count = std::min(RUN, K - k);
                for (int j = 0; j < WEIGHT_ROWS; ++j) {
                    Weight::dequantize(*c.problem, c.g, c.at[n + j], k, count, w[j]);
                    std::fill(w[j] + count, w[j] + RUN, 0.f);
                }
                for (i64 i = 0; i < count; i += 2 * LANES) {
                    add(w, x + k * SMALL_M, i, sum[0]);
                    add(w, x + k * SMALL_M, i + LANES, sum[1]);
                }
            }
            for (int j = 0; j < WEIGHT_ROWS; ++j) {
                for (int r = 0; r < R; ++r)
                    out[r * out_stride + n + j] = total(sum[0][j][r] + sum[1][j][r]);
            }
        }
    }

    template <int R, int WEIGHT_ROWS>
    static void add(const float (&w)[WEIGHT_ROWS][RUN], const Packed* x, i64 i,
                    Sums (&sum)[WEIGHT_ROWS][R]) {
        for (int r = 0; r < R; ++r) {
            Sums a, b;
            std::memcpy(&a, x + r * RUN + i, sizeof a);
            for (int j = 0; j < WEIGHT_ROWS; ++j) {
                std::memcpy(&b, w[j] + i, sizeof b);
                sum[j][r] += a * b;
            }
        }
    }

    static float total(const Sums& sums) {
        float half[8];
        for (int i = 0; i < 8; ++i) half[i] = sums[i] + sums[i + 8];
        return ((half[0] + half[4]) + (half[1] + half[5])) +
               ((half[2] + half[6]) + (half[3] + half[7]));
    }
};

// Panels of the words of an ISA level: of float32, which the reader makes, or of pairs of bfloat16,
// which the weight has.
template <class V, class Weight_>
struct Dequantized : V {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Panel = typename V::Panel;

    static void dequantize(const Columns* c, const Columns*, int column_blocks, i64 K,
                           Panel* panel) {
        alignas(64) Panel w[LANES][RUN / V::DEPTH];
        const i64 stride = column_blocks * LANES;
        for (i64 k = 0; k < K; k += RUN) {
            const i64 count = std::min(RUN, K - k), words = words_of<V>(count);
            for (int s = 0; s < column_blocks; ++s) {
                for (int i = 0; i < LANES; ++i) {
                    const Problem& p = *c[s].problem;
                    if constexpr (V::DEPTH == 1)
                        Weight::dequantize(p, c[s].g, c[s].at[i], k, count, w[i]);
                    else
                        V::pack(Weight::matrix(p, c[s].g) + c[s].at[i] * K + k, w[i], count);
                }
                Panel* out = panel + (k / V::DEPTH * column_blocks + s) * LANES;
                i64 j = 0;
                for (; j + LANES <= words; j += LANES)
                    V::transpose(w[0] + j, RUN / V::DEPTH, out + j * stride, stride);
                for (; j < words; ++j) {
                    for (int i = 0; i < LANES; ++i) out[j * stride + i] = w[i][j];
                }
            }
        }
    }
};

template <class F32, class Pairs, class Weight>
struct DequantizedIsa : VectorIsa {
    using Wide = Panels<Dequantized<F32, Weight>>;
    template <class A>
    using Fast = Kernels<
        SmallM<DequantizedRows<Weight>>,
        std::conditional_t<ARE_PAIRS<Pairs, Weight, A>, Panels<Dequantized<Pairs, Weight>>, Wide>>;
};

// A reader of codes without what kernels for codes read by.
template <class Weight>
struct OnlyDequantized : PortableWeight {
    static constexpr double BYTES = Weight::BYTES;
    static constexpr i64 ALIGNED = Weight::ALIGNED;

    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        Weight::dequantize(p, g, n, k, count, out);
    }
};

}  // namespace
