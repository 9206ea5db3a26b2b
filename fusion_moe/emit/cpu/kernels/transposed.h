// A weight as dgrad reads it: the rows of a matrix are contracted, a column of the product is a column of it.
#pragma once

#include "panels.h"
#include "plain.h"
#include "words.h"

namespace {

template <class Weight_>
struct Transposed {
    static constexpr double BYTES = Weight_::BYTES;

    struct Columns {
        const Problem* problem;
        i64 g, k[LANES];

        // Whether they lie one after the other.
        bool consecutive() const {
            bool found = true;
            for (int i = 1; i < LANES; ++i) found = found && k[i] == k[0] + i;
            return found;
        }
    };

    template <class Column>
    static Columns open(const Problem& p, i64 g, Column column) {
        Columns c{&p, g, {}};
        for (int i = 0; i < LANES; ++i) c.k[i] = column(i);
        return c;
    }

    static bool scales_in_range(const WorkTile&) { return true; }
    static i64 contracted(const Problem& p) { return p.N; }
};

// Panels of float32, from any reader.
template <class F32, class Weight_>
struct TransposedPanels : F32 {
    using Weight = Transposed<Weight_>;
    using Columns = typename Weight::Columns;
    static constexpr int MIN_EXPONENT = -127, MAX_EXPONENT = 128;  // whatever they are

    static void dequantize(const Columns* c, const Columns*, int column_blocks, i64 N, float* panel) {
        bool consecutive[F32::COLUMN_BLOCKS];
        for (int s = 0; s < column_blocks; ++s) consecutive[s] = c[s].k[0] % ALIGNED == 0 && LANES % ALIGNED == 0 && c[s].consecutive();
        for (i64 n = 0; n < N; ++n) {
            for (int s = 0; s < column_blocks; ++s, panel += LANES) {
                if (consecutive[s]) {
                    Weight_::dequantize(*c[s].problem, c[s].g, n, c[s].k[0], LANES, panel);
                } else {
                    gather(c[s], n, panel);
                }
            }
        }
    }

  private:
    static constexpr i64 ALIGNED = Weight_::ALIGNED;

    static void gather(const Columns& c, i64 n, float* out) {
        float held[ALIGNED];
        for (i64 i = 0, first = -1; i < LANES; ++i) {
            if (const i64 wanted = c.k[i] / ALIGNED * ALIGNED; wanted != first) {
                first = wanted;
                Weight_::dequantize(*c.problem, c.g, n, first, std::min(ALIGNED, c.problem->K - first), held);
            }
            out[i] = held[c.k[i] - first];
        }
    }
};

// Panels of pairs of bfloat16.
template <class Pairs>
struct TransposedPairs : Pairs {
    using Weight = Transposed<PlainWeight<bf16>>;
    using Columns = typename Weight::Columns;

    static void dequantize(const Columns* c, const Columns* next, int column_blocks, i64 N, typename Pairs::Panel* panel) {
        const i64 K = c->problem->K;
        const bf16* matrix = PlainWeight<bf16>::matrix(*c->problem, c->g);
        const auto row = [&](i64 n) { return matrix + n * K; };
        bool consecutive[Pairs::COLUMN_BLOCKS];
        for (int s = 0; s < column_blocks; ++s) consecutive[s] = c[s].consecutive();
        const bf16* ahead = PlainWeight<bf16>::matrix(*next->problem, next->g);
        for (i64 n = 0; n < N; n += Pairs::DEPTH) {
            for (i64 i = n; i < std::min(n + Pairs::DEPTH, N); ++i) {
                for (int s = 0; s < column_blocks; ++s) __builtin_prefetch(ahead + i * K + next[s].k[0], 0, 2);
            }
            for (int s = 0; s < column_blocks; ++s, panel += LANES) {
                if (consecutive[s]) {
                    words_of_rows<Pairs>(row, n, N, c[s].k[0], LANES, panel);
                } else {
                    for (int i = 0; i < LANES; ++i) words_of_rows<Pairs>(row, n, N, c[s].k[i], 1, panel + i);
                }
            }
        }
    }
};

template <class F32, class Pairs, class Weight>
struct TransposedTier {
    using Wide = Panels<TransposedPanels<F32, Weight>>;
    template <class A>
    using Fast = Kernels<std::conditional_t<ARE_PAIRS<Pairs, Weight, A>, Panels<TransposedPairs<Pairs>>, Wide>>;
    struct Thread {};
    static constexpr double DEQUANTIZE_ROWS = 8;
};

}  // namespace
