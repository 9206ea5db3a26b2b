// wgrad: rows [M, N] and rows [M, K] -> [G, N, K], the sums over the rows of each group, zero for
// an empty one. Each result is computed by one thread, in runs of as many rows however many threads
// there are.
#pragma once

#include <vector>

#include "rows.h"
#include "words.h"

namespace {

constexpr i64 WORDS = 512;  // of four bytes, of a column of an operand that are multiplied at once
constexpr i64 TILE_N = 192, TILE_K = 1024;  // of a matrix that are made at once: what is packed of
                                            // both stays in the second-level cache

// Part of a matrix.
struct MatrixTile {
    i64 group, n, n_end, k, k_end;
};

// V: the vectors of an ISA level; A, B: the types of the operands.
template <class V, class A, class B>
class GroupedOuter {
    using Packed = typename V::Packed;
    using Panel = typename V::Panel;

  public:
    explicit GroupedOuter(const Problem& problem) : p_(problem), N(problem.N), K(problem.K) {}

    void run(ThreadPool& pool) {
        const std::vector<MatrixTile> tiles = plan();
        pool.share(i64(tiles.size()), [&](Items& items) {
            static thread_local Scratch scratch;
            for (i64 i; (i = items.next()) >= 0;) compute(tiles[std::size_t(i)], scratch);
        });
    }

  private:
    static constexpr i64 ROWS = V::ROWS, COLUMNS = V::COLUMN_BLOCKS * LANES;
    static constexpr i64 CHUNK = WORDS * V::DEPTH;  // rows
    static constexpr i64 STRIDE =
        WORDS + LANES;  // between rows of packed words: not a power of two

    std::vector<MatrixTile> plan() const {
        std::vector<MatrixTile> tiles;
        for (i64 g = 0; g < p_.G; ++g) {
            for (i64 k = 0; k < K; k += TILE_K) {
                for (i64 n = 0; n < N; n += TILE_N)
                    tiles.push_back({g, n, std::min(n + TILE_N, N), k, std::min(k + TILE_K, K)});
            }
        }
        return tiles;
    }

    void compute(const MatrixTile& tile, Scratch& scratch) const {
        const i64 start = tile.group == 0 ? 0 : p_.ends[tile.group - 1], end = p_.ends[tile.group];
        const i64 width = (tile.k_end - tile.k + COLUMNS - 1) / COLUMNS * COLUMNS;
        Packed* packed = scratch.packed.get<Packed>(TILE_N * STRIDE);
        Panel* panels = scratch.panel.get<Panel>(WORDS * width);
        float* sums = scratch.sums.get<float>(end - start > CHUNK ? TILE_N * width : 0);
        float* out = scratch.tile.get<float>(ROWS * COLUMNS);
        if (start == end) std::fill(out, out + ROWS * COLUMNS, 0.f);
        i64 first = start;
        do {
            const i64 rows = std::min(CHUNK, end - first), words = words_of<V>(rows);
            pack(tile, first, rows, packed, scratch);
            make_panels(tile, first, rows, width, panels, scratch);
            const bool last = first + rows == end;
            for (i64 k = 0; k < width; k += COLUMNS) {
                for (i64 n = tile.n; n < tile.n_end; n += ROWS) {
                    const i64 some = std::min(ROWS, tile.n_end - n);
                    float* sum = sums + (n - tile.n) * width + k;
                    if (rows > 0)
                        multiply(some, packed + (n - tile.n) * STRIDE, panels + k * WORDS, words,
                                 out);
                    if (first > start) add(some, sum, width, out);
                    if (last) {
                        store(tile, n, some, k, out);
                    } else {
                        for (i64 r = 0; r < some; ++r)
                            std::copy(out + r * COLUMNS, out + (r + 1) * COLUMNS, sum + r * width);
                    }
                }
            }
            first += rows;
        } while (first < end);
    }

    static void multiply(i64 rows, const Packed* x, const Panel* panel, i64 words, float* out) {
        V::multiply(int(rows), V::COLUMN_BLOCKS, x, STRIDE, panel, words * V::DEPTH,
                    static_cast<const void*>(nullptr), out, COLUMNS);
    }

    // The sums so far are the first terms.
    static void add(i64 rows, const float* sums, i64 width, float* out) {
        for (i64 r = 0; r < rows; ++r) {
#pragma omp simd
            for (i64 j = 0; j < COLUMNS; ++j)
                out[r * COLUMNS + j] = sums[r * width + j] + out[r * COLUMNS + j];
        }
    }

    void store(const MatrixTile& tile, i64 n, i64 rows, i64 k, const float* out) const {
        const i64 column = tile.k + k;
        p_.store(p_.segment, n, rows, tile.group, column, std::min(COLUMNS, tile.k_end - column),
                 out, COLUMNS);
    }

    // Columns n .. n_end - 1 of the first operand's rows, transposed: [n][words], STRIDE apart.
    void pack(const MatrixTile& tile, i64 first, i64 rows, Packed* packed, Scratch& scratch) const {
        const auto row = pointers<A>(p_.row, first, rows, N, scratch.rows);
        for (i64 n = tile.n; n < tile.n_end; n += LANES) {
            const i64 count = std::min<i64>(LANES, tile.n_end - n);
            for (i64 r = 0, word = 0; r < rows; r += LANES * V::DEPTH, word += LANES) {
                alignas(64) Panel words[LANES * LANES] = {};
                for (i64 i = 0; i < LANES && r + i * V::DEPTH < rows; ++i) {
                    words_of_rows<V>(row, r + i * V::DEPTH, rows, n, count, words + i * LANES);
                }
                V::transpose(words, LANES, packed + (n - tile.n) * STRIDE + word, STRIDE);
            }
        }
    }

    // Columns k .. k_end - 1 of the second operand's rows: panels [words][COLUMNS], zero past the
    // last column.
    void make_panels(const MatrixTile& tile, i64 first, i64 rows, i64 width, Panel* panels,
                     Scratch& scratch) const {
        const auto row = pointers<B>(p_.other_row, first, rows, K, scratch.wide);
        for (i64 r = 0, word = 0; r < rows; r += V::DEPTH, ++word) {
            for (i64 j = 0; j < width; j += LANES) {
                const i64 count = std::clamp<i64>(tile.k_end - tile.k - j, 0, LANES);
                Panel* at = panels + j / COLUMNS * COLUMNS * WORDS + word * COLUMNS + j % COLUMNS;
                words_of_rows<V>(row, r, rows, tile.k + j, count, at);
                std::fill(at + count, at + LANES, Panel());
            }
        }
    }

    // Where rows first .. first + rows - 1 of `width` numbers lie, in memory or made.
    template <class T, class Row>
    auto pointers(Row row, i64 first, i64 rows, i64 width, Buffer& buffer) const {
        std::vector<const T*> at(static_cast<std::size_t>(rows));
        T* made = buffer.get<T>(CHUNK * width);
        for (i64 r = 0; r < rows; ++r)
            at[std::size_t(r)] =
                static_cast<const T*>(row(p_.segment, first + r, made + r * width));
        return [at = std::move(at)](i64 r) { return at[std::size_t(r)]; };
    }

    const Problem p_;
    const i64 N, K;
};

template <class A, class B>
void wgrad(const Problem& problem, ThreadPool& pool) {
    constexpr bool PAIRS =
        !std::is_void<Pairs>::value && std::is_same<A, bf16>::value && std::is_same<B, bf16>::value;
    GroupedOuter<std::conditional_t<PAIRS, Pairs, F32>, A, B>(problem).run(pool);
}

}  // namespace
