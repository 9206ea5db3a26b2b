// What the ISA levels share: sixteen columns of a product, work on some of them, and how a kernel
// and an ISA level are spelled.
//
// A result has W columns; each is a function of F columns of the product (two, where gate and up
// become one). A block is 16 columns of the result, made of F column blocks of the product; each of
// these is 16 rows of the weight, wherever they lie: the `Columns` of a reader (weight.h).
//
// A kernel is a struct with
//
//     Activation, Packed  the type of the activations that it takes, and of what it makes of them
//     MAX_ROWS            how many rows it takes
//     MIN_EXPONENT,
//     MAX_EXPONENT        what activations must be to be `in_range`; the weight must be
//     `scales_in_range` too (unless the kernel is `Wide`) pack                some rows of
//     activations -> rows of `Packed`, `stride` apart multiply            a `WorkTile`, its rows
//     packed: makes and stores its results
//
// and an ISA level one with
//
//     Wide             a kernel on float32 for everything. It dequantizes to the reference's
//     numbers, for every input there is Fast<A>          kernels for activations of type A, of
//     which the first that takes so many rows is used Thread           what a thread has while it
//     multiplies DEQUANTIZE_ROWS  how many rows take as long as dequantizing the weight
#pragma once

#include <algorithm>

#include "scratch.h"

namespace {

constexpr i64 PACK_ROWS = 16;  // rows that `pack` is given, at most
constexpr i64 TILE_M = 256;    // rows of a work tile, at most
constexpr i64 BLOCKS = 4;      // that work tiles of many rows are made of

template <class... Kernel>
struct Kernels {};

// Which kernel of a list is used for all rows if none may change the bits of another one's results:
// the one in this frame, or else the last. A work tile then has no more rows than it takes.
template <class Kernel>
struct OfAllRows : Kernel {};

template <class List>
struct RowOrder;
template <class Last>
struct RowOrder<Kernels<Last>> {
    using Kernel = Last;
};
template <class Framed, class... Others>
struct RowOrder<Kernels<OfAllRows<Framed>, Others...>> {
    using Kernel = OfAllRows<Framed>;
};
template <class First, class... Others>
struct RowOrder<Kernels<First, Others...>> : RowOrder<Kernels<Others...>> {};

// Rows of a work tile, at most, of K activations each: fewer than TILE_M where an ISA level's
// kernels for activations of type A want all of them in the second-level cache.
template <class Isa, class A>
struct TileM {
    static constexpr i64 of(i64) { return TILE_M; }
};

// Calls body(N), N a constant: the first number that is not below n, or the last one.
template <int FIRST, int... MORE, class Body>
[[gnu::always_inline]] inline void with_constant(int n, const Body& body) {
    if constexpr (sizeof...(MORE) > 0) {
        if (n > FIRST) return with_constant<MORE...>(n, body);
    }
    body(std::integral_constant<int, FIRST>());
}

// Rows of one group times blocks of its columns.
struct WorkTile {
    const Problem* p;
    i64 group, first, rows, first_block, last_block;
    const WorkTile* then = nullptr;  // what the thread does next

    // How many of the product its blocks are made of, F for each.
    i64 column_blocks() const { return (last_block - first_block) * p->F; }

    // Those at `column_block`; past the end what is read next, or the last ones again. Past W the
    // last row again.
    template <class Weight>
    typename Weight::Columns columns(i64 column_block) const {
        if (column_block >= column_blocks() && then != nullptr) {
            return then->columns<Weight>(
                std::min(column_block - column_blocks(), then->column_blocks() - 1));
        }
        const i64 s = std::min(column_block, column_blocks() - 1), f = s % p->F;
        const i32* column = p->columns + f * p->W;
        const i64 first = (first_block + s / p->F) * LANES;
        return Weight::open(*p, group, [&](i64 i) -> i64 {
            return column[first + i < p->W ? first + i : p->W - 1];
        });
    }

    // Stores rows r .. r + count - 1 of `blocks` blocks, the first that which `column_block`
    // belongs to.
    void store(i64 r, i64 count, i64 column_block, const float* tile, i64 stride,
               i64 blocks = 1) const {
        const i64 column = (first_block + column_block / p->F) * LANES;
        p->store(p->segment, first + r, count, group, column,
                 std::min(LANES * blocks, p->W - column), tile, stride);
    }
};

// The size of an activation as bits, which order as sizes do; infinity and NaN are the largest.
inline u16 size_of(bf16 x) { return x.bits & 0x7FFF; }
inline u32 size_of(float x) { return as_bits(x) & 0x7FFFFFFFu; }
inline u32 size_of(f16 x) { return size_of(widen(x)); }

// Whether the largest of K activations lies between 2^MIN_EXPONENT and 2^(MAX_EXPONENT + 1), or all
// are zero: no sum of their products overflows, and what may be flushed to zero is 2^36 times
// smaller than the largest.
template <class Kernel, class A>
inline bool in_range(const A* x, i64 K) {
    using Size = decltype(size_of(x[0]));
    constexpr int EXPONENT = sizeof(Size) == 2 ? 7 : 23;
    Size largest = 0;
    for (i64 k = 0; k < K; ++k) largest = std::max(largest, size_of(x[k]));
    const int exponent = int(largest >> EXPONENT) - 127;
    return largest == 0 || (exponent >= Kernel::MIN_EXPONENT && exponent <= Kernel::MAX_EXPONENT);
}

}  // namespace
