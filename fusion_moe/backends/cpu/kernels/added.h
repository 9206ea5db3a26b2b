// A product that is made beside that of a segment: when a tile of the latter is stored, the same
// rows and columns of this one. Its weight is floats, of which few are contracted: sixteen columns
// of some blocks are a panel in the first-level cache.
#pragma once

#include <atomic>

#include "dequantized.h"
#include "isa.h"
#include "transposed.h"

namespace {

// What multiplies rows by a weight of T, [G, N, K], where K is contracted, or N.
template <class T>
using AddedFprop = Dequantized<F32, PlainWeight<T>>;
template <class T>
using AddedDgrad = TransposedPanels<F32, PlainWeight<T>>;

// What a thread keeps for its next tile: panels, of the columns of which product they are, and
// rows.
struct AddedState {
    Buffer panel, rows, made, tile;
    u64 product = 0;
    i64 group = -1, column = -1, count = -1;
};

// A: the type of the activations. A thread keeps one state for each ID: products of a segment
// differ in it.
template <int ID, class Vectors, class A>
class Added {
  public:
    explicit Added(const Problem& problem)
        : p_(problem), K(Vectors::Weight::contracted(problem)), id_(next_id()) {}

    // Rows m .. m + rows - 1, of group g, of what columns j .. j + count - 1 of the result are made
    // of: F times LANES numbers for each row and each LANES columns. Zeros where g is G.
    const float* tile(i64 m, i64 rows, i64 g, i64 j, i64 count) const {
        static thread_local AddedState state;
        const i64 column_blocks = (count + LANES - 1) / LANES * p_.F,
                  stride = column_blocks * LANES;
        float* out = state.tile.get<float>(rows * stride);
        if (g == p_.G) {
            std::fill(out, out + rows * stride, 0.f);
            return out;
        }
        const float* panel = panels(g, j, count, column_blocks, state);
        for (i64 r = 0; r < rows; r += ROWS) {
            const i64 some = std::min<i64>(ROWS, rows - r);
            const float* x = activations(m + r, some, state);
            for (i64 s = 0; s < column_blocks; s += COLUMN_BLOCKS) {
                Vectors::multiply(int(some), int(std::min(COLUMN_BLOCKS, column_blocks - s)), x, K,
                                  panel + s * K * LANES, K, static_cast<const void*>(nullptr),
                                  out + r * stride + s * LANES, stride);
            }
        }
        return out;
    }

  private:
    static constexpr i64 ROWS = Vectors::ROWS, COLUMN_BLOCKS = Vectors::COLUMN_BLOCKS;

    // Of each call another: what a thread kept of the one before may have changed in memory.
    static u64 next_id() {
        static std::atomic<u64> last{0};
        return ++last;
    }

    const float* panels(i64 g, i64 j, i64 count, i64 column_blocks, AddedState& state) const {
        float* panel = state.panel.get<float>(column_blocks * K * LANES);
        if (state.product == id_ && state.group == g && state.column == j && state.count == count)
            return panel;
        const WorkTile columns{&p_, g, 0, 0, j / LANES, j / LANES + column_blocks / p_.F};
        for (i64 s = 0; s < column_blocks; s += COLUMN_BLOCKS) {
            const i64 some = std::min(COLUMN_BLOCKS, column_blocks - s);
            typename Vectors::Columns c[COLUMN_BLOCKS];
            for (i64 i = 0; i < some; ++i) c[i] = columns.columns<typename Vectors::Weight>(s + i);
            Vectors::dequantize(c, c, int(some), K, panel + s * K * LANES);
        }
        state.product = id_, state.group = g, state.column = j, state.count = count;
        return panel;
    }

    const float* activations(i64 m, i64 rows, AddedState& state) const {
        float* x = state.rows.get<float>(ROWS * K);
        A* made = state.made.get<A>(K);
        for (i64 i = 0; i < rows; ++i) {
            const A* row = static_cast<const A*>(p_.row(p_.segment, m + i, made));
            for (i64 k = 0; k < K; ++k) x[i * K + k] = widen(row[k]);
        }
        return x;
    }

    const Problem p_;
    const i64 K;
    const u64 id_;
};

}  // namespace
