// The grouped product of a tier: which rows meet which columns in which thread and which kernel. Each result is computed by one thread, in
// an order that does not depend on how many there are.
#pragma once

#include <atomic>
#include <string>
#include <type_traits>
#include <vector>

#include "rows.h"
#include "tiles.h"

namespace {

constexpr i64 LEAST_BYTES = 1 << 18;  // of the weight in one item of work

// What a thread has at hand.
struct Hand {
    Scratch scratch;
    i64 group = -1, first = -1;  // whose rows are packed
    bool fast = false;           // for a fast kernel
};

// Which kernels take groups of how many rows.
template <class Kernel, class... Others>
std::string told(Kernels<Kernel, Others...>) {
    if constexpr (sizeof...(Others) > 0) {
        const std::string rows = Kernel::MOST == 1 ? "1 row" : "up to " + std::to_string(Kernel::MOST) + " rows";
        return rows + " " + Kernel::NAME + ", " + told(Kernels<Others...>{});
    } else {
        return std::string("more ") + Kernel::NAME;
    }
}

template <class Tier, class Weight, class A>
class GroupedMM {
  public:
    explicit GroupedMM(const Problem& problem)
        : p_(problem), K(problem.K), F(problem.F), blocks_((problem.W + LANES - 1) / LANES), stride_((K + 255) / 256 * 256) {}

    void run(int threads) {
        const std::vector<Item> items = plan(threads);
        std::atomic<std::size_t> taken{0};
        const auto take = [&] {
            const std::size_t i = taken.fetch_add(1, std::memory_order_relaxed);
            return i < items.size() ? &items[i] : nullptr;
        };
#pragma omp parallel num_threads(threads) if (threads > 1 && items.size() > 1)
        {
            static thread_local Hand hand;
            [[maybe_unused]] const typename Tier::Thread state{};
            hand.group = -1;
            for (const Item *now = take(), *then; now != nullptr; now = then) {
                then = take();
                Item work = *now;
                work.then = then;
                item(work, hand);
            }
        }
        const i64 last = p_.G > 0 ? p_.ends[p_.G - 1] : 0;
        for_rows(p_.rows - last, 16, threads, [&](i64 i) { rest(last + i); });
    }

  private:
    i64 start(i64 g) const { return g == 0 ? 0 : p_.ends[g - 1]; }
    i64 size(i64 g) const { return p_.ends[g] - start(g); }

    // Items of about equal time: by the bytes of the weight, which cost more where they meet many rows.
    std::vector<Item> plan(int threads) const {
        const auto cost = [&](i64 rows) { return double(F) * LANES * double(K) * Weight::BYTES * (1 + double(rows) / Tier::ROWS_OF_DECODING); };
        double total = 0;
        for (i64 g = 0; g < p_.G; ++g) total += size(g) > 0 ? cost(size(g)) * double(blocks_) : 0;
        const double most = std::max(double(LEAST_BYTES), total / (threads * 16.0));
        std::vector<Item> items;
        for (i64 g = 0; g < p_.G; ++g) {
            for (i64 first = start(g); first < p_.ends[g]; first += CHUNK) {
                const i64 rows = std::min(CHUNK, p_.ends[g] - first);
                const i64 step = threads == 1 ? blocks_ : std::max(BLOCKS, i64(most / cost(rows)) / BLOCKS * BLOCKS);
                for (i64 b = 0; b < blocks_; b += step) items.push_back({&p_, g, first, rows, b, std::min(b + step, blocks_)});
            }
        }
        return items;
    }

    // Whole, or where its weight is not usual piece by piece, which are the same however many threads there are.
    void item(const Item& item, Hand& hand) const {
        const bool usual = Weight::usual(item);
        Item piece = item;
        for (i64 b = item.first_block; b < item.last_block; b = piece.last_block) {
            piece.first_block = b, piece.last_block = usual ? item.last_block : std::min(b + BLOCKS, item.last_block);
            const bool fast = (usual || Weight::usual(piece)) && first_that_takes(typename Tier::template Fast<A>{}, piece, hand);
            if (!fast) run<typename Tier::Wide, false>(piece, hand);
        }
    }

    template <class Kernel, class... Others>
    bool first_that_takes(Kernels<Kernel, Others...>, const Item& item, Hand& hand) const {
        if constexpr (sizeof...(Others) > 0) {
            if (item.rows > Kernel::MOST) return first_that_takes(Kernels<Others...>{}, item, hand);
        }
        return run<Kernel, true>(item, hand);
    }

    // False, and nothing stored, if `FAST` and an activation is not usual.
    template <class Kernel, bool FAST>
    bool run(const Item& item, Hand& hand) const {
        auto* packed = hand.scratch.packed.template get<typename Kernel::Packed>((item.rows + PACK - 1) / PACK * PACK * stride_);
        const bool held = hand.group == item.group && hand.first == item.first && hand.fast == FAST;
        if (!held && !pack<Kernel, FAST>(item, packed, hand)) return false;
        Kernel::multiply(item, packed, stride_, hand.scratch);
        return true;
    }

    template <class Kernel, bool FAST>
    bool pack(const Item& item, typename Kernel::Packed* packed, Hand& hand) const {
        using Activation = typename Kernel::Activation;
        A* made = hand.scratch.rows.template get<A>(PACK * K);
        Activation* wide = hand.scratch.wide.template get<Activation>(PACK * K);
        hand.group = -1;
        for (i64 r = 0; r < item.rows; r += PACK) {
            const i64 rows = std::min(PACK, item.rows - r);
            const Activation* x[PACK];
            for (i64 i = 0; i < rows; ++i) {
                const A* row = static_cast<const A*>(p_.row(p_.segment, item.first + r + i, made + i * K));
                if (FAST && !usual<Kernel>(row, K)) return false;
                if constexpr (std::is_same<A, Activation>::value) {
                    x[i] = row;
                } else {
                    for (i64 k = 0; k < K; ++k) wide[i * K + k] = widen(row[k]);
                    x[i] = wide + i * K;
                }
            }
            Kernel::pack(x, rows, packed + r * stride_, stride_, K);
        }
        hand.group = item.group, hand.first = item.first, hand.fast = FAST;
        return true;
    }

    void rest(i64 m) const {
        const std::vector<float> zeros(F * LANES);
        for (i64 block = 0; block < blocks_; ++block) {
            const i64 column = block * LANES;
            p_.store(p_.segment, m, 1, p_.G, column, std::min<i64>(LANES, p_.W - column), zeros.data(), F * LANES);
        }
    }

    const Problem p_;
    const i64 K, F, blocks_, stride_;
};

}  // namespace
