// A weight as dgrad reads it: the rows of a matrix are contracted, a column of the product is a
// column of it.
#pragma once

#include "e2m1.h"
#include "panels.h"
#include "plain.h"
#include "words.h"

namespace {

template <class Weight_>
struct Transposed : PortableWeight {
    static constexpr double BYTES = Weight_::BYTES;

    static i64 contracted(const Problem& p) { return p.N; }
    static void begin() { Weight_::begin(); }
};

// Whether `count` columns lie one after the other.
inline bool consecutive(const PortableWeight::Columns* c, i64 count = LANES) {
    bool found = true;
    for (i64 i = 1; i < count; ++i) found = found && c[i / LANES].at[i % LANES] == c->at[0] + i;
    return found;
}

// Panels of float32, from any reader.
template <class F32, class Weight_>
struct TransposedPanels : F32 {
    using Weight = Transposed<Weight_>;
    using Columns = typename Weight::Columns;

    static void dequantize(const Columns* c, const Columns*, int column_blocks, i64 N,
                           float* panel) {
        const i64 count = column_blocks * LANES;
        if (c->at[0] % ALIGNED == 0 && count % ALIGNED == 0 && consecutive(c, count)) {
            for (i64 n = 0; n < N; ++n, panel += count)
                Weight_::dequantize(*c->problem, c->g, n, c->at[0], count, panel);
            return;
        }
        for (i64 n = 0; n < N; ++n) {
            for (int s = 0; s < column_blocks; ++s, panel += LANES) gather(c[s], n, panel);
        }
    }

  private:
    static constexpr i64 ALIGNED = Weight_::ALIGNED;

    static void gather(const Columns& c, i64 n, float* out) {
        float held[ALIGNED];
        for (i64 i = 0, first = -1; i < LANES; ++i) {
            if (const i64 wanted = c.at[i] / ALIGNED * ALIGNED; wanted != first) {
                first = wanted;
                Weight_::dequantize(*c.problem, c.g, n, first,
                                    std::min(ALIGNED, c.problem->K - first), held);
            }
            out[i] = held[c.at[i] - first];
        }
    }
};

// Panels of pairs of bfloat16.
template <class Pairs>
struct TransposedPairs : Pairs {
    using Weight = Transposed<PlainWeight<bf16>>;
    using Columns = typename Weight::Columns;

    static void dequantize(const Columns* c, const Columns* next, int column_blocks, i64 N,
                           typename Pairs::Panel* panel) {
        const i64 K = c->problem->K;
        const bf16* matrix = PlainWeight<bf16>::matrix(*c->problem, c->g);
        const auto row = [&](i64 n) { return matrix + n * K; };
        bool together[Pairs::COLUMN_BLOCKS];
        for (int s = 0; s < column_blocks; ++s) together[s] = consecutive(c + s);
        const bf16* ahead = PlainWeight<bf16>::matrix(*next->problem, next->g);
        for (i64 n = 0; n < N; n += Pairs::DEPTH) {
            for (i64 i = n; i < std::min(n + Pairs::DEPTH, N); ++i) {
                for (int s = 0; s < column_blocks; ++s)
                    __builtin_prefetch(ahead + i * K + next[s].at[0], 0, 2);
            }
            for (int s = 0; s < column_blocks; ++s, panel += LANES) {
                if (together[s]) {
                    words_of_rows<Pairs>(row, n, N, c[s].at[0], LANES, panel);
                } else {
                    for (int i = 0; i < LANES; ++i)
                        words_of_rows<Pairs>(row, n, N, c[s].at[i], 1, panel + i);
                }
            }
        }
    }
};

// Panels of pairs of bfloat16, of e2m1 codes times the scales of their blocks. Rows of a run have
// one factor, which multiplies their sum.
template <class Pairs, class Weight_>
struct TransposedCodes : Pairs {
    using Weight = Transposed<Weight_>;
    using Columns = typename Weight::Columns;
    static constexpr int MIN_EXPONENT = F32_MIN_EXPONENT<Weight_>,
                         MAX_EXPONENT = F32_MAX_EXPONENT<Weight_>;

    static void dequantize(const Columns* c, const Columns* next, int column_blocks, i64 N,
                           typename Pairs::Panel* panel) {
        const i64 of_row = c->problem->K / 2;
        const Matrix matrix(*c->problem, c->g);
        bool together[Pairs::COLUMN_BLOCKS];
        for (int s = 0; s < column_blocks; ++s)
            together[s] = c[s].at[0] % LANES == 0 && consecutive(c + s);
        const u8* ahead = Weight_::codes_of(*next->problem, next->g) + next->at[0] / 2;
        for (i64 n = 0; n < N; n += Pairs::DEPTH) {
            const i64 last = std::min(n + 1, N - 1);
            __builtin_prefetch(ahead + n * of_row, 0, 2);
            __builtin_prefetch(ahead + last * of_row, 0, 2);
            for (int s = 0; s < column_blocks; ++s, panel += LANES) {
                if (together[s]) {
                    const i64 k = c[s].at[0];
                    Pairs::words_of_codes(matrix.codes(n, k), matrix.scale(n, k),
                                          matrix.codes(last, k),
                                          last > n ? matrix.scale(last, k) : 0.f, panel);
                } else {
                    for (int i = 0; i < LANES; ++i)
                        panel[i] = matrix.bits(n, c[s].at[i]) |
                                   (last > n ? matrix.bits(last, c[s].at[i]) << 16 : 0);
                }
            }
        }
    }

    static void multiply(int rows, int column_blocks, const typename Pairs::Packed* x, i64 stride,
                         const typename Pairs::Panel* panel, i64 N, const Columns* c, float* out,
                         i64 out_stride) {
        const Problem& p = *c->problem;
        const auto factor = Weight_::factors(p, c->g);
        const i64 count = column_blocks * LANES, of_run = N / p.runs;
        alignas(64) float sums[Pairs::ROWS * Pairs::COLUMN_BLOCKS * LANES];
        for (i64 first = 0; first < N; first += of_run) {
            Pairs::multiply(rows, column_blocks, x + first / 2, stride, panel + first / 2 * count,
                            of_run, c, sums, count);
            const float of_rows = factor(first);
            for (int r = 0; r < rows; ++r) {
                float* at = out + r * out_stride;
#pragma omp simd
                for (i64 j = 0; j < count; ++j)
                    at[j] = (first == 0 ? 0.f : at[j]) + sums[r * count + j] * of_rows;
            }
        }
    }

  private:
    struct Matrix {
        const u8 *codes_, *scales_;
        i64 K;

        Matrix(const Problem& p, i64 g)
            : codes_(Weight_::codes_of(p, g)), scales_(Weight_::scales_of(p, g)), K(p.K) {}
        const u8* codes(i64 n, i64 k) const { return codes_ + (n * K + k) / 2; }
        float scale(i64 n, i64 k) const { return Weight_::scale_at(scales_, n, k, K); }
        u32 bits(i64 n, i64 k) const {
            return as_bits(E2M1[*codes(n, k) >> 4 * (k % 2) & 15] * scale(n, k)) >> 16;
        }
    };
};

// Whether products of activations and weights are products of pairs of bfloat16, of codes times
// scales.
template <class Pairs, class Weight, class A>
constexpr bool ARE_PAIRS_OF_CODES =
    !std::is_void<Pairs>::value && HAS_E2M1_CODES<Weight> && std::is_same<A, bf16>::value;

// A weight that kernels for pairs read: scales must be in range, and no pair may be of two runs.
template <class Weight_>
struct TransposedInRange : Transposed<Weight_> {
    static bool scales_in_range(const WorkTile& work_tile) {
        const Problem& p = *work_tile.p;
        return (p.runs == 1 || p.N / p.runs % 2 == 0) &&
               Weight_::matrix_in_range(p, work_tile.group);
    }
};

template <class F32, class Pairs, class Weight>
struct TransposedIsa : VectorIsa {
    using Wide = Panels<TransposedPanels<F32, Weight>>;
    template <class A>
    using Vectors = std::conditional_t<ARE_PAIRS_OF_CODES<Pairs, Weight, A>,
                                       TransposedCodes<Pairs, Weight>, TransposedPairs<Pairs>>;
    template <class A>
    using Fast = Kernels<
        std::conditional_t<ARE_PAIRS<Pairs, Weight, A> || ARE_PAIRS_OF_CODES<Pairs, Weight, A>,
                           Panels<Vectors<A>>, Wide>>;
    template <class A>
    using Reader = std::conditional_t<ARE_PAIRS_OF_CODES<Pairs, Weight, A>,
                                      TransposedInRange<Weight>, Transposed<Weight>>;
};

}  // namespace
