// Kernels made of the smaller parts that a tier has for the vectors of its CPU and weights that are read by a reader `Weight`, a struct
// `Vectors` with
//
//     pack_few          row r of a few, wherever `few` wants it
//     few               rows x Columns straight from the weight, up to FEW rows; FEW_NAME says how, for people
//     pack, decode      Columns -> a panel of weights, up to SUBS of them
//     multiply          rows x a panel, up to ROWS rows
//
// SMALLEST and LARGEST are those of `usual` activations.
#pragma once

#include <vector>

#include "tiles.h"

namespace {

// Few rows, straight from the codes.
template <class Vectors>
struct FewRows {
    using Activation = typename Vectors::Activation;
    using Packed = typename Vectors::Packed;
    using Columns = typename Vectors::Weight::Columns;
    static constexpr auto NAME = Vectors::FEW_NAME;
    static constexpr i64 MOST = Vectors::FEW;
    static constexpr int SMALLEST = Vectors::SMALLEST, LARGEST = Vectors::LARGEST;

    static void pack(const Activation* const* x, i64 rows, Packed* packed, i64 stride, i64 K) {
        for (i64 r = 0; r < rows; ++r) Vectors::pack_few(x[r], r, packed, stride, K);
    }

    static void multiply(const Item& item, const Packed* packed, i64 stride, Scratch& scratch) {
        const i64 F = item.p->F;
        float* tile = scratch.tile.get<float>(MOST * F * LANES);
        Columns columns[2] = {item.columns<typename Vectors::Weight>(0), {}};
        for (i64 sub = 0; sub < item.subs(); ++sub) {
            const Columns& now = columns[sub % 2];
            Columns& then = columns[(sub + 1) % 2];
            then = item.columns<typename Vectors::Weight>(sub + 1);
            Vectors::few(int(item.rows), now, then, packed, stride, item.p->K, tile + sub % F * LANES, F * LANES);
            if (sub % F == F - 1) item.store(0, item.rows, sub, tile, F * LANES);
        }
    }
};

// Weights decoded to panels of as many blocks as fill one, all that one of them is made of at least.
template <class Vectors>
struct Panels {
    using Activation = typename Vectors::Activation;
    using Packed = typename Vectors::Packed;
    using Columns = typename Vectors::Weight::Columns;
    static constexpr auto NAME = "by panels of decoded weights";
    static constexpr i64 MOST = CHUNK, ROWS = Vectors::ROWS, SUBS = Vectors::SUBS;
    static constexpr int SMALLEST = Vectors::SMALLEST, LARGEST = Vectors::LARGEST;

    static void pack(const Activation* const* x, i64 rows, Packed* packed, i64 stride, i64 K) {
        for (i64 r = 0; r < rows; ++r) Vectors::pack(x[r], packed + r * stride, K);
    }

    static void multiply(const Item& item, const Packed* packed, i64 stride, Scratch& scratch) {
        const i64 F = item.p->F, K = item.p->K, most = std::max<i64>(1, SUBS / F) * F, of_panel = K * SUBS * LANES, of_row = most * LANES;
        auto* panel = scratch.panel.get<typename Vectors::Panel>((most + SUBS - 1) / SUBS * of_panel);
        float* tile = scratch.tile.get<float>(ROWS * of_row);
        const i64 tiles = (item.rows + ROWS - 1) / ROWS, of_tile = (item.rows + tiles - 1) / tiles;
        std::vector<Columns> c(most), then(most);
        const auto fill = [&](std::vector<Columns>& c, i64 first) {
            for (i64 s = 0; s < most; ++s) c[s] = item.columns<typename Vectors::Weight>(first + s);
        };
        fill(then, 0);
        for (i64 first = 0; first < item.subs(); first += most) {
            const i64 subs = std::min(most, item.subs() - first);
            c.swap(then);
            fill(then, first + most);
            for (i64 s = 0; s < subs; s += SUBS) {
                Vectors::decode(&c[s], &then[s], int(std::min(SUBS, subs - s)), K, panel + s / SUBS * of_panel);
            }
            for (i64 r = 0; r < item.rows; r += of_tile) {
                const i64 some = std::min(of_tile, item.rows - r);
                for (i64 s = 0; s < subs; s += SUBS) {
                    Vectors::multiply(int(some), int(std::min(SUBS, subs - s)), packed + r * stride, stride, panel + s / SUBS * of_panel, K,
                                      &c[s], tile + s * LANES, of_row);
                }
                for (i64 s = 0; s < subs; s += F) item.store(r, some, first + s, tile + s * LANES, of_row);
            }
        }
    }
};

}  // namespace
