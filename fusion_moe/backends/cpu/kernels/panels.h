// Kernels made of the smaller parts that an ISA level has for the vectors of its CPU and weights
// that are read by a reader `Weight`, a struct `Vectors` with
//
//     pack_small_m      row r of a few, wherever `small_m` wants it
//     small_m           rows x Columns straight from the weight, up to SMALL_M rows
//     pack, dequantize  Columns -> a panel of weights, up to COLUMN_BLOCKS of them
//     multiply          rows x a panel, up to ROWS rows
//
// MIN_EXPONENT and MAX_EXPONENT are those of activations that are `in_range`.
#pragma once

#include <vector>

#include "tiles.h"

namespace {

// How many activations of three rows or more `small_m` takes at most.
template <class Vectors>
constexpr i64 MOST_OF_ROWS = i64(1) << 62;

// Small M: products straight from the codes.
template <class Vectors>
struct SmallM {
    using Activation = typename Vectors::Activation;
    using Packed = typename Vectors::Packed;
    using Columns = typename Vectors::Weight::Columns;
    static constexpr i64 MAX_ROWS = Vectors::SMALL_M;
    static bool takes(i64 rows, i64 K) {
        return rows <= MAX_ROWS && (rows <= 2 || rows * K <= MOST_OF_ROWS<Vectors>);
    }
    static constexpr int MIN_EXPONENT = Vectors::MIN_EXPONENT, MAX_EXPONENT = Vectors::MAX_EXPONENT;

    static void pack(const Activation* const* x, i64 rows, Packed* packed, i64 stride, i64 K) {
        for (i64 r = 0; r < rows; ++r) Vectors::pack_small_m(x[r], r, packed, stride, K);
    }

    static void multiply(const WorkTile& work_tile, const Packed* packed, i64 stride,
                         Scratch& scratch) {
        const i64 F = work_tile.p->F;
        float* tile = scratch.tile.get<float>(MAX_ROWS * F * LANES);
        Columns columns[2] = {work_tile.columns<typename Vectors::Weight>(0), {}};
        for (i64 column_block = 0; column_block < work_tile.column_blocks(); ++column_block) {
            const Columns& now = columns[column_block % 2];
            Columns& then = columns[(column_block + 1) % 2];
            then = work_tile.columns<typename Vectors::Weight>(column_block + 1);
            Vectors::small_m(int(work_tile.rows), now, then, packed, stride, work_tile.p->K,
                             tile + column_block % F * LANES, F * LANES);
            if (column_block % F == F - 1)
                work_tile.store(0, work_tile.rows, column_block, tile, F * LANES);
        }
    }
};

// Weights dequantized to panels of as many blocks as fill one, all that one of them is made of at
// least.
template <class Vectors>
struct Panels {
    using Activation = typename Vectors::Activation;
    using Packed = typename Vectors::Packed;
    using Columns = typename Vectors::Weight::Columns;
    static constexpr i64 MAX_ROWS = TILE_M, ROWS = Vectors::ROWS,
                         COLUMN_BLOCKS = Vectors::COLUMN_BLOCKS;
    static constexpr int MIN_EXPONENT = Vectors::MIN_EXPONENT, MAX_EXPONENT = Vectors::MAX_EXPONENT;

    static void pack(const Activation* const* x, i64 rows, Packed* packed, i64 stride, i64 K) {
        for (i64 r = 0; r < rows; ++r) Vectors::pack(x[r], packed + r * stride, K);
    }

    static void multiply(const WorkTile& work_tile, const Packed* packed, i64 stride,
                         Scratch& scratch) {
        const i64 F = work_tile.p->F, K = Vectors::Weight::contracted(*work_tile.p),
                  most = std::max<i64>(1, COLUMN_BLOCKS / F) * F;
        const i64 of_panel = K * COLUMN_BLOCKS * LANES, of_row = most * LANES;
        auto* panel = scratch.panel.get<typename Vectors::Panel>((most + COLUMN_BLOCKS - 1) /
                                                                 COLUMN_BLOCKS * of_panel);
        float* tile = scratch.tile.get<float>(ROWS * of_row);
        const i64 tiles = (work_tile.rows + ROWS - 1) / ROWS,
                  of_tile = (work_tile.rows + tiles - 1) / tiles;
        std::vector<Columns> c(most), then(most);
        const auto fill = [&](std::vector<Columns>& c, i64 first) {
            for (i64 s = 0; s < most; ++s)
                c[s] = work_tile.columns<typename Vectors::Weight>(first + s);
        };
        fill(then, 0);
        for (i64 first = 0; first < work_tile.column_blocks(); first += most) {
            const i64 column_blocks = std::min(most, work_tile.column_blocks() - first);
            c.swap(then);
            fill(then, first + most);
            for (i64 s = 0; s < column_blocks; s += COLUMN_BLOCKS) {
                Vectors::dequantize(&c[s], &then[s],
                                    int(std::min(COLUMN_BLOCKS, column_blocks - s)), K,
                                    panel + s / COLUMN_BLOCKS * of_panel);
            }
            for (i64 r = 0; r < work_tile.rows; r += of_tile) {
                const i64 some = std::min(of_tile, work_tile.rows - r);
                for (i64 s = 0; s < column_blocks; s += COLUMN_BLOCKS) {
                    Vectors::multiply(int(some), int(std::min(COLUMN_BLOCKS, column_blocks - s)),
                                      packed + r * stride, stride,
                                      panel + s / COLUMN_BLOCKS * of_panel, K, &c[s],
                                      tile + s * LANES, of_row);
                }
                work_tile.store(r, some, first, tile, of_row, column_blocks / F);
            }
        }
    }
};

// An ISA level without a state of its threads.
struct VectorIsa {
    struct Thread {};
    static constexpr double DEQUANTIZE_ROWS = 8;
};

}  // namespace
