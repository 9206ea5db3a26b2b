// The grouped product of a tier: which rows meet which columns in which thread and which kernel. Each result is computed by one thread, in
// an order that does not depend on how many there are.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "rows.h"
#include "tiles.h"

namespace {

constexpr i64 CHUNK = 256;            // rows that are packed at once
constexpr i64 LEAST_BYTES = 1 << 18;  // of the weight in one item of work

class Buffer {
  public:
    // Room for `count`, 4 KiB aligned, kept from call to call; what it held may be lost.
    template <class T>
    T* get(i64 count) {
        const std::size_t bytes = (std::size_t(count) * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size_) {
            data_.reset(static_cast<char*>(std::aligned_alloc(4096, bytes)));
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return reinterpret_cast<T*>(data_.get());
    }

  private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char, Free> data_;
    std::size_t size_ = 0;
};

struct Scratch {
    Buffer row, wide, packed, panel, tile;
};

struct Item {
    i64 group, first_block, last_block;  // of 16 columns of the result
};

template <class Tier, class A>
class GroupedMM {
    using Wide = typename Tier::Wide;
    using Fast = typename Tier::template Fast<A>;

  public:
    explicit GroupedMM(const Problem& problem)
        : p_(problem), K(problem.K), F(problem.F), blocks_((problem.W + LANES - 1) / LANES), stride_((K + 255) / 256 * 256) {}

    void run(int threads) {
        const std::vector<Item> items = plan(threads);
        std::atomic<std::size_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1 && items.size() > 1)
        {
            static thread_local Scratch scratch;
            for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items.size();) item(items[i], scratch);
        }
        const i64 last = p_.G > 0 ? p_.ends[p_.G - 1] : 0;
        for_rows(p_.rows - last, 16, threads, [&](i64 i) { rest(last + i); });
    }

  private:
    i64 start(i64 g) const { return g == 0 ? 0 : p_.ends[g - 1]; }
    i64 size(i64 g) const { return p_.ends[g] - start(g); }

    // Items of about equal time: by the bytes of the weight, which cost more where they meet many rows.
    std::vector<Item> plan(int threads) const {
        const auto cost = [&](i64 rows) { return double(F) * LANES * double(K) * 0.5625 * (1 + double(rows) / 8); };  // of a block
        double total = 0;
        for (i64 g = 0; g < p_.G; ++g) total += size(g) > 0 ? cost(size(g)) * double(blocks_) : 0;
        const double most = std::max(double(LEAST_BYTES), total / (threads * 16.0));
        std::vector<Item> items;
        for (i64 g = 0; g < p_.G; ++g) {
            if (size(g) == 0) continue;
            const i64 step = threads == 1 ? blocks_ : std::max<i64>(4, i64(most / cost(size(g))) / 4 * 4);
            for (i64 b = 0; b < blocks_; b += step) items.push_back({g, b, std::min(b + step, blocks_)});
        }
        return items;
    }

    void item(const Item& item, Scratch& scratch) const {
        const bool good_scales = usual_scales(p_, item.group);
        for (i64 first = start(item.group); first < p_.ends[item.group]; first += CHUNK) {
            const int rows = int(std::min<i64>(CHUNK, p_.ends[item.group] - first));
            if (!good_scales || !chunk<Fast, true>(item, first, rows, scratch)) chunk<Wide, false>(item, first, rows, scratch);
        }
    }

    // False, and nothing stored, if `Usual` and an activation is not.
    template <class Kernels, bool Usual>
    bool chunk(const Item& item, i64 first, int rows, Scratch& scratch) const {
        using Packed = typename Kernels::Packed;
        const bool few = Usual && rows <= Kernels::FEW;
        Packed* packed = scratch.packed.template get<Packed>((rows + 15) / 16 * 16 * stride_);
        for (int r = 0; r < rows; ++r) {
            const A* x = static_cast<const A*>(p_.row(p_.segment, first + r, scratch.row.template get<A>(K)));
            if (Usual && !usual(x, K)) return false;
            if constexpr (std::is_same<Packed, float>::value && !std::is_same<A, float>::value) {
                float* wide = scratch.wide.template get<float>(K);
                for (i64 k = 0; k < K; ++k) wide[k] = widen(x[k]);
                few ? Kernels::pack_few(wide, packed + r * stride_, K, rows) : Kernels::pack(wide, packed + r * stride_, K);
            } else {
                few ? Kernels::pack_few(x, packed + r * stride_, K, rows) : Kernels::pack(x, packed + r * stride_, K);
            }
        }
        few ? few_rows<Kernels>(item, first, rows, packed, scratch) : panels<Kernels>(item, first, rows, packed, scratch);
        return true;
    }

    // The rows of the weight that column f of a block is made of; the last block's are repeated.
    Columns columns(i64 group, i64 block, i64 f) const {
        return columns_of(p_, group, p_.columns + f * p_.W, block * LANES);
    }

    template <class Kernels>
    void few_rows(const Item& item, i64 first, int rows, const typename Kernels::Packed* packed, Scratch& scratch) const {
        float* tile = scratch.tile.get<float>(16 * F * LANES);
        Columns now = columns(item.group, item.first_block, 0), then = now;
        for (i64 block = item.first_block; block < item.last_block; ++block) {
            for (i64 f = 0; f < F; ++f) {
                const i64 next_f = (f + 1) % F, next_block = next_f == 0 ? block + 1 : block;
                const bool more = next_block < item.last_block;
                if (more) then = columns(item.group, next_block, next_f);
                Kernels::few(rows, now, more ? &then : nullptr, packed, stride_, K, tile + f * LANES, F * LANES);
                now = then;
            }
            store(item.group, first, rows, block, tile, F * LANES);
        }
    }

    // As many blocks at a time as fill a panel, all that one of them is made of at least.
    template <class Kernels>
    void panels(const Item& item, i64 first, int rows, const typename Kernels::Packed* packed, Scratch& scratch) const {
        constexpr i64 SUBS = Kernels::SUBS;
        const i64 at_once = std::max<i64>(1, SUBS / F), most = at_once * F, of_panel = K * SUBS * LANES, of_row = most * LANES;
        auto* panel = scratch.panel.template get<typename Kernels::Panel>((most + SUBS - 1) / SUBS * of_panel);
        float* tile = scratch.tile.get<float>(Kernels::ROWS * of_row);
        const i64 tiles = (rows + Kernels::ROWS - 1) / Kernels::ROWS, of_tile = (rows + tiles - 1) / tiles;
        std::vector<Columns> c(most), then(most);
        const auto fill = [&](std::vector<Columns>& c, i64 block) {
            for (i64 s = 0; s < most; ++s) c[s] = columns(item.group, std::min(block + s / F, blocks_ - 1), s % F);
        };
        fill(then, item.first_block);
        for (i64 block = item.first_block; block < item.last_block; block += at_once) {
            const i64 blocks = std::min(at_once, item.last_block - block), subs = blocks * F;
            const bool more = block + at_once < item.last_block;
            c.swap(then);
            if (more) fill(then, block + at_once);
            for (i64 s = 0; s < subs; s += SUBS) {
                Kernels::decode(&c[s], more ? &then[s] : nullptr, int(std::min(SUBS, subs - s)), K, panel + s / SUBS * of_panel);
            }
            for (i64 r = 0; r < rows; r += of_tile) {
                const int some = int(std::min<i64>(of_tile, rows - r));
                for (i64 s = 0; s < subs; s += SUBS) {
                    Kernels::multiply(some, int(std::min(SUBS, subs - s)), packed + r * stride_, stride_, panel + s / SUBS * of_panel, K, &c[s],
                                      tile + s * LANES, of_row);
                }
                for (i64 b = 0; b < blocks; ++b) store(item.group, first + r, some, block + b, tile + b * F * LANES, of_row);
            }
        }
    }

    void store(i64 group, i64 first, i64 rows, i64 block, const float* tile, i64 stride) const {
        p_.store(p_.segment, first, rows, group, block * LANES, std::min<i64>(LANES, p_.W - block * LANES), tile, stride);
    }

    void rest(i64 m) const {
        const std::vector<float> zeros(F * LANES);
        for (i64 block = 0; block < blocks_; ++block) store(p_.G, m, 1, block, zeros.data(), F * LANES);
    }

    const Problem p_;
    const i64 K, F, blocks_, stride_;
};

}  // namespace
