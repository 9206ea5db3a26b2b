// The grouped product of a isa_level: which rows meet which columns in which thread and which
// kernel. Each result is computed by one thread, in an order that does not depend on how many there
// are.
#pragma once

#include <type_traits>
#include <vector>

#include "rows.h"
#include "tiles.h"

namespace {

constexpr i64 MIN_BYTES = 1 << 15;  // of the weight in one work tile
constexpr i64 SHARES = 3;           // a work tile is one of so many for each thread of what is left
constexpr i64 ANY_NUMBER = i64(1) << 62;  // of work tiles: threads find out how many there are

// What a thread keeps between work tiles.
struct ThreadState {
    Scratch scratch;
    i64 group = -1, first = -1;  // whose rows are packed
    bool fast = false;           // for a fast kernel
    const void* row = nullptr;   // where the row lies in memory, if one alone is packed: other
                                 // groups may have the same
    std::vector<WorkTile> work_tiles;
};

template <class Isa, class Weight, class A>
class GroupedMM {
  public:
    explicit GroupedMM(const Problem& problem)
        : p_(problem),
          K(Weight::contracted(problem)),
          F(problem.F),
          blocks_((problem.W + LANES - 1) / LANES),
          stride_((K + 255) / 256 * 256),
          tile_m_(
              std::min(TileM<Isa, A>::of(K), problem.row_order ? RowKernel::MAX_ROWS : TILE_M)) {}

    void run(ThreadPool& pool) {
        const i64 last = p_.G > 0 ? p_.ends[p_.G - 1] : 0;
        pool.share(last == 0 ? 0 : ANY_NUMBER, [&](Items& items) {
            static thread_local ThreadState state;
            [[maybe_unused]] const typename Isa::Thread thread{};
            state.group = -1, state.row = nullptr;
            Weight::begin();
            plan(pool.threads(), state.work_tiles);
            const auto next_work_tile = [&] {
                const i64 i = items.next();
                const WorkTile* found = i >= 0 && i < i64(state.work_tiles.size())
                                            ? &state.work_tiles[std::size_t(i)]
                                            : nullptr;
                if (found != nullptr) Weight::fetch_scales(*found);
                return found;
            };
            for (const WorkTile *now = next_work_tile(), *then; now != nullptr; now = then) {
                then = next_work_tile();
                WorkTile work_tile = *now;
                work_tile.then = then;
                compute(work_tile, state);
            }
        });
        for_rows(p_.rows - last, 16, pool, [&](i64 i) { store_ungrouped_row(last + i); });
    }

  private:
    using RowKernel = typename RowOrder<typename Isa::template Fast<A>>::Kernel;

    // How long so many rows of a group take for a block of columns: by the bytes of the weight,
    // which cost more where they meet many rows.
    double cost(i64 rows) const {
        return double(F) * LANES * double(K) * Weight::BYTES *
               (1 + double(rows) / Isa::DEQUANTIZE_ROWS);
    }

    // Calls body(g, first, rows, cost) for each tile of rows, `cost` that of a block of columns.
    template <class Body>
    void for_row_tiles(Body body) const {
        i64 last_rows = 0;
        double of_block = 0;
        for (i64 g = 0, end = 0; g < p_.G; ++g) {
            for (i64 first = end; first < p_.ends[g]; first += tile_m_) {
                const i64 rows = std::min(tile_m_, p_.ends[g] - first);
                if (rows != last_rows) last_rows = rows, of_block = cost(rows);
                body(g, first, rows, of_block);
            }
            end = p_.ends[g];
        }
    }

    // First large work tiles, which run along memory, then smaller and smaller ones, so that
    // threads end together. Each thread makes all for itself: that takes less time than to get them
    // from the thread that has made them.
    void plan(int threads, std::vector<WorkTile>& work_tiles) const {
        double left = 0;
        for_row_tiles([&](i64, i64, i64, double of_block) { left += of_block * double(blocks_); });
        const double share = 1.0 / double(SHARES * threads);
        work_tiles.clear();
        for_row_tiles([&](i64 g, i64 first, i64 rows, double of_block) {
            const double blocks_of = 1 / of_block;
            const i64 some =
                rows > PACK_ROWS ? BLOCKS : piece();  // a few rows are packed soon, many are worth
                                                      // some blocks; a power of two
            for (i64 b = 0, step; b < blocks_; b += step) {
                const i64 wanted =
                    i64(std::max(double(MIN_BYTES), left * share) * blocks_of) & -some;
                step = threads == 1 ? blocks_ : std::min(blocks_ - b, std::max(some, wanted));
                work_tiles.push_back({&p_, g, first, rows, b, b + step});
                left -= double(step) * of_block;
            }
        });
    }

    // What is computed at once where scales are not in range: two blocks of the product.
    i64 piece() const { return F == 1 ? 2 : 1; }

    // Whole, or where its scales are not in range piece by piece, which are the same however many
    // threads there are.
    void compute(const WorkTile& work_tile, ThreadState& state) const {
        const bool in_range = Weight::scales_in_range(work_tile);
        WorkTile part = work_tile;
        for (i64 b = work_tile.first_block; b < work_tile.last_block; b = part.last_block) {
            part.first_block = b,
            part.last_block =
                in_range ? work_tile.last_block : std::min(b + piece(), work_tile.last_block);
            compute(part, in_range || Weight::scales_in_range(part), state);
        }
    }

    // By the kernel for everything, if scales or some activation are not in range; in row order,
    // only rows that are not.
    void compute(const WorkTile& part, bool scales_in_range, ThreadState& state) const {
        const auto fast = [&] {
            return p_.row_order ? run<RowKernel, true>(part, state)
                                : dispatch(typename Isa::template Fast<A>{}, part, state);
        };
        if (scales_in_range && fast()) return;
        if (!scales_in_range || !p_.row_order || part.rows == 1) {
            run<typename Isa::Wide, false>(part, state);
            return;
        }
        WorkTile row = part;
        for (row.rows = 1; row.first < part.first + part.rows; ++row.first)
            compute(row, true, state);
    }

    template <class Kernel, class... Others>
    bool dispatch(Kernels<Kernel, Others...>, const WorkTile& work_tile, ThreadState& state) const {
        if constexpr (sizeof...(Others) > 0) {
            if (!Kernel::takes(work_tile.rows, K))
                return dispatch(Kernels<Others...>{}, work_tile, state);
        }
        return run<Kernel, true>(work_tile, state);
    }

    // False, and nothing stored, if `FAST` and an activation is not in range.
    template <class Kernel, bool FAST>
    bool run(const WorkTile& work_tile, ThreadState& state) const {
        const i64 rows = (work_tile.rows + PACK_ROWS - 1) / PACK_ROWS * PACK_ROWS;
        auto* packed =
            state.scratch.packed.template get<typename Kernel::Packed>(rows * (stride_ + LANES));
        const bool is_packed =
            state.group == work_tile.group && state.first == work_tile.first && state.fast == FAST;
        if (!is_packed && !pack<Kernel, FAST>(work_tile, packed, state)) return false;
        Kernel::multiply(work_tile, packed, stride_, state.scratch);
        return true;
    }

    template <class Kernel, bool FAST>
    bool pack(const WorkTile& work_tile, typename Kernel::Packed* packed,
              ThreadState& state) const {
        using Activation = typename Kernel::Activation;
        A* made = state.scratch.rows.template get<A>(PACK_ROWS * K);
        Activation* wide = state.scratch.wide.template get<Activation>(PACK_ROWS * K);
        const void *const packed_row = state.fast == FAST ? state.row : nullptr, *alone = nullptr;
        state.group = -1, state.row = nullptr;
        for (i64 r = 0; r < work_tile.rows; r += PACK_ROWS) {
            const i64 rows = std::min(PACK_ROWS, work_tile.rows - r);
            const Activation* x[PACK_ROWS];
            for (i64 i = 0; i < rows; ++i) {
                const A* row = static_cast<const A*>(
                    p_.row(p_.segment, work_tile.first + r + i, made + i * K));
                alone = work_tile.rows == 1 && row != made ? row : nullptr;
                if (alone != nullptr && alone == packed_row)
                    return keep(work_tile, FAST, alone, state);
                if (FAST && !in_range<Kernel>(row, K)) return false;
                if constexpr (std::is_same<A, Activation>::value) {
                    x[i] = row;
                } else {
                    for (i64 k = 0; k < K; ++k) wide[i * K + k] = widen(row[k]);
                    x[i] = wide + i * K;
                }
            }
            Kernel::pack(x, rows, packed + r * stride_, stride_, K);
        }
        return keep(work_tile, FAST, alone, state);
    }

    static bool keep(const WorkTile& work_tile, bool fast, const void* row, ThreadState& state) {
        state.group = work_tile.group, state.first = work_tile.first, state.fast = fast,
        state.row = row;
        return true;
    }

    void store_ungrouped_row(i64 m) const {
        const std::vector<float> zeros(F * LANES);
        for (i64 block = 0; block < blocks_; ++block) {
            const i64 column = block * LANES;
            p_.store(p_.segment, m, 1, p_.G, column, std::min<i64>(LANES, p_.W - column),
                     zeros.data(), F * LANES);
        }
    }

    const Problem p_;
    const i64 K, F, blocks_, stride_, tile_m_;
};

}  // namespace
