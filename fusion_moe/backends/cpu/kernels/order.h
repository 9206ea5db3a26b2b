// Where the items of a weight's part lie: its block scales, or its elements. `LinearOrder` says
// what an order has; those of other layouts are written from their descriptors (cxx/orders.py) and
// have more: tiles of ROWS rows, of which RUN items follow each other, and the `width` of padded
// rows.
//
// Kernels read rows. Those in another order are copied, a row of tiles at a time, and a thread
// keeps some: so each tile is read once, and kernels need not know.
#pragma once

#ifdef __AVX512VBMI__
#include "avx512_f32.h"
#endif

#include <memory>
#include <type_traits>
#include <vector>

#include "tiles.h"

namespace {

struct LinearOrder {
    static constexpr i64 size(i64 rows, i64 columns) { return rows * columns; }  // of a matrix
    // item (n, b) of one lies at of_row(n, columns) + of_column(b)
    static constexpr i64 of_row(i64 n, i64 columns) { return n * columns; }
    static constexpr i64 of_column(i64 b) { return b; }
};

template <class Order>
constexpr bool IS_LINEAR = std::is_same<Order, LinearOrder>::value;

using Words [[gnu::vector_size(16)]] = u32;

template <int... WHICH>
Words shuffled(Words a, Words b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, WHICH...);
#else
    return __builtin_shuffle(a, b, Words{WHICH...});
#endif
}

// Whether 16 bytes are four words of rows n, n + APART, ...: quarters of a tile's rows.
template <class Order, i64 APART = Order::ROWS / 4>
constexpr bool words_of_quarters() {
    if (Order::RUN != 4 || Order::ROWS % 4 != 0) return false;
    bool found = true;
    for (i64 n = 0; n < Order::ROWS; ++n)
        found = found && Order::of_row(n, 4) == Order::of_row(n % APART, 4) + 4 * (n / APART);
    for (i64 b = 0; b < 64; b += 4)
        found = found && Order::of_column(b) == b / 4 * Order::of_column(4);
    return found;
}

// Whether the quarters of four rows are 64 bytes.
template <class Order>
constexpr bool lines_of_rows() {
    bool found = true;
    for (i64 n = 0; n < Order::ROWS / 4; ++n)
        found = found && Order::of_row(n, 4) == Order::of_row(n / 4 * 4, 4) + 16 * (n % 4);
    return found;
}

// The words of four tiles, 16 bytes of each -> four rows of 16 bytes, `apart`.
inline void transpose_words(const u8* const (&words)[4], u8* out, i64 apart) {
    Words w[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&w[i], words[i], sizeof w[i]);
    const Words low[2] = {shuffled<0, 4, 1, 5>(w[0], w[1]), shuffled<0, 4, 1, 5>(w[2], w[3])},
                high[2] = {shuffled<2, 6, 3, 7>(w[0], w[1]), shuffled<2, 6, 3, 7>(w[2], w[3])};
    const Words rows[4] = {
        shuffled<0, 1, 4, 5>(low[0], low[1]), shuffled<2, 3, 6, 7>(low[0], low[1]),
        shuffled<0, 1, 4, 5>(high[0], high[1]), shuffled<2, 3, 6, 7>(high[0], high[1])};
    for (int i = 0; i < 4; ++i) std::memcpy(out + i * apart, &rows[i], sizeof rows[i]);
}

#ifdef __AVX512VBMI__
// Lines of sixteen tiles, STEP apart, or of `there` and the last of these again; each four words of
// four rows -> sixteen rows of 64 bytes: row 4 q + i at out + i * stride + q * apart.
template <i64 STEP>
[[gnu::always_inline]] inline void transpose_lines(const u8* line, i64 there, u8* out, i64 stride,
                                                   i64 apart) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i)
        a[i] = _mm512_loadu_si512(line + (there >= 16 ? i : std::min<i64>(i, there - 1)) * STEP);
    transpose_vectors(a, b);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i / 4 * stride + i % 4 * apart, b[i]);
}
#endif

// A row of tiles of bytes -> the rows in it, `stride` apart, a multiple of 64. Of words, four rows
// at a time: whole lines of tiles, which lie where few lines of the first-level cache do.
template <class Order>
void copy_tiles(const u8* tiles, i64 columns, u8* out, i64 stride) {
    if constexpr (words_of_quarters<Order>()) {
        constexpr i64 APART = Order::ROWS / 4, STEP = Order::of_column(4);
#ifdef __AVX512VBMI__
        constexpr i64 AT_ONCE = APART % 4 == 0 && lines_of_rows<Order>() ? 4 : 1;
        for (i64 n = 0; AT_ONCE == 4 && n < APART; n += 4) {
            const u8* first = tiles + Order::of_row(n, columns);
            i64 b = 0;
            for (; b + 60 < columns; b += 64)
                transpose_lines<STEP>(first + b / 4 * STEP, 16, out + n * stride + b, stride,
                                      APART * stride);
            if (b < columns)
                transpose_lines<STEP>(first + b / 4 * STEP, (columns - b + 3) / 4,
                                      out + n * stride + b, stride, APART * stride);
        }
        if (AT_ONCE == 4) return;
#endif
        for (i64 n = 0; n < APART; ++n) {
            const u8* row = tiles + Order::of_row(n, columns);
            for (i64 b = 0; b < columns; b += 16) {
                const u8* words[4];
                for (i64 i = 0; i < 4; ++i)
                    words[i] = row + std::min(b / 4 + i, (columns - 1) / 4) * STEP;
                transpose_words(words, out + n * stride + b, APART * stride);
            }
        }
    } else {
        for (i64 n = 0; n < Order::ROWS; ++n) {
            for (i64 b = 0; b < columns; b += Order::RUN)
                std::memcpy(out + n * stride + b,
                            tiles + Order::of_row(n, columns) + Order::of_column(b), Order::RUN);
        }
    }
}

// Rows that a thread has copied.
template <class Order>
class Rows {
    struct Band {
        Buffer rows;
        const u8* tiles = nullptr;  // that were copied
        u64 run = 0, last_call = 0;
    };
    struct Kept {
        std::vector<std::unique_ptr<Band>> bands;
        Band* last = nullptr;
        u64 run = 1, calls = 0;
    };

  public:
    // How many calls of `of` what it returns is kept for: as many Columns as a kernel ever has.
    static constexpr u64 CALLS = 20;

    // Before a product: what was copied for another one may have changed.
    static void forget() { ++kept().run; }

    // Rows at[0 .. LANES - 1] of `columns` bytes of a matrix -> where each one is. What the next
    // row of tiles has for as many rows comes nearer.
    static void of(const u8* matrix, const i64* at, i64 columns, const u8** row) {
        Kept& all = kept();
        ++all.calls;
        const i64 stride = (columns + 63) / 64 * 64 | 64, width = Order::width(columns);
        const auto first_of = [](i64 n) { return i64(u64(n) / Order::ROWS * Order::ROWS); };
        i64 first = first_of(at[0]);
        const u8* rows = band(all, matrix + first * width, columns, stride);
        bool all_there = true;
        for (int i = 0; i < LANES; ++i) {
            const i64 n = at[i] - first;
            all_there &= u64(n) < u64(Order::ROWS);
            row[i] = rows + n * stride;
        }
        for (int i = 0; i < LANES && !all_there; ++i) {
            if (first != first_of(at[i])) {
                first = first_of(at[i]);
                rows = band(all, matrix + first * width, columns, stride);
            }
            row[i] = rows + (at[i] - first) * stride;
        }
        const u8* ahead = matrix + (at[0] + Order::ROWS) * width;
        for (i64 i = 0; i < LANES * width; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    }

  private:
    static Kept& kept() {
        static thread_local Kept all;
        return all;
    }

    static const u8* band(Kept& all, const u8* tiles, i64 columns, i64 stride) {
        if (all.last != nullptr && all.last->tiles == tiles && all.last->run == all.run) {
            all.last->last_call = all.calls;
            return all.last->rows.template get<u8>(0);
        }
        Band* unused = nullptr;
        for (const auto& each : all.bands) {
            if (each->tiles == tiles && each->run == all.run) {
                each->last_call = all.calls, all.last = each.get();
                return each->rows.template get<u8>(0);
            }
            if (each->last_call + CALLS < all.calls) unused = each.get();
        }
        if (unused == nullptr) unused = all.bands.emplace_back(new Band).get();
        unused->tiles = tiles, unused->run = all.run, unused->last_call = all.calls,
        all.last = unused;
        u8* rows = unused->rows.template get<u8>(Order::ROWS * stride);
        copy_tiles<Order>(tiles, columns, rows, stride);
        return rows;
    }
};

// What is in memory row by row is not copied.
template <>
class Rows<LinearOrder> {
  public:
    static void forget() {}
    static void of(const u8*, const i64*, i64, const u8**) {}
};

}  // namespace
