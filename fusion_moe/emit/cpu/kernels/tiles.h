// What the tiers share: sixteen columns of a product, work on some of them, and how a kernel and a tier are spelled.
//
// A result has W columns; each is a function of F columns of the product (two, where gate and up become one). A block is 16 columns of the
// result; it reads F times 16 rows of the weight, wherever these lie: the `Columns` of a reader (weight.h) for each.
//
// A kernel is a struct with
//
//     Activation, Packed  the type of the activations that it takes, and of what it makes of them
//     NAME                what it does, for people
//     MOST                how many rows it takes
//     SMALLEST, LARGEST   what activations must be to be `usual`; the weight must be `usual` too (unless the kernel is `Wide`)
//     pack                some rows of activations -> rows of `Packed`, `stride` apart
//     multiply            an `Item` of work, its rows packed: makes and stores its results
//
// and a tier one with
//
//     Wide                a kernel on float32 for everything. It decodes to the reference's numbers, for every input there is
//     Fast<A>             kernels for activations of type A, of which the first that takes so many rows is used
//     Thread              what a thread has while it multiplies
//     ROWS_OF_DECODING    how many rows take as long as decoding the weight
#pragma once

#include <algorithm>

#include "scratch.h"

namespace {

constexpr i64 PACK = 16;    // rows that `pack` is given, at most
constexpr i64 CHUNK = 256;  // rows of an item, at most
constexpr i64 BLOCKS = 4;   // that items of several threads are made of

template <class... Kernel>
struct Kernels {};

// Rows of one group times blocks of its columns.
struct Item {
    const Problem* p;
    i64 group, first, rows, first_block, last_block;
    const Item* then = nullptr;  // what the thread does next

    // How many times sixteen rows its blocks are made of, F of each block.
    i64 subs() const { return (last_block - first_block) * p->F; }

    // Those at `sub`; past the end what is read next, or the last ones again. Past W the last row again.
    template <class Weight>
    typename Weight::Columns columns(i64 sub) const {
        if (sub >= subs() && then != nullptr) return then->columns<Weight>(std::min(sub - subs(), then->subs() - 1));
        const i64 s = std::min(sub, subs() - 1), f = s % p->F;
        const i32* column = p->columns + f * p->W;
        const i64 first = (first_block + s / p->F) * LANES;
        return Weight::open(*p, group, [&](i64 i) -> i64 { return column[first + i < p->W ? first + i : p->W - 1]; });
    }

    // Stores rows r .. r + count - 1 of `blocks` blocks, the first that which `sub` belongs to.
    void store(i64 r, i64 count, i64 sub, const float* tile, i64 stride, i64 blocks = 1) const {
        const i64 column = (first_block + sub / p->F) * LANES;
        p->store(p->segment, first + r, count, group, column, std::min(LANES * blocks, p->W - column), tile, stride);
    }
};

// The size of an activation as bits, which order as sizes do; infinity and NaN are the largest.
inline u16 size_of(bf16 x) { return x.bits & 0x7FFF; }
inline u32 size_of(float x) { return as_bits(x) & 0x7FFFFFFFu; }
inline u32 size_of(f16 x) { return size_of(widen(x)); }

// Whether the largest of K activations lies between 2^SMALLEST and 2^(LARGEST + 1), or all are zero: no sum of their products overflows,
// and what may be flushed to zero is 2^36 times smaller than the largest.
template <class Kernel, class A>
inline bool usual(const A* x, i64 K) {
    using Size = decltype(size_of(x[0]));
    constexpr int EXPONENT = sizeof(Size) == 2 ? 7 : 23;
    Size largest = 0;
    for (i64 k = 0; k < K; ++k) largest = std::max(largest, size_of(x[k]));
    const int exponent = int(largest >> EXPONENT) - 127;
    return largest == 0 || (exponent >= Kernel::SMALLEST && exponent <= Kernel::LARGEST);
}

}  // namespace
