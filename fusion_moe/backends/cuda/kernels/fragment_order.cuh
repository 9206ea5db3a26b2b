// Fragment order is an order of the columns of activations in which large-M kernels can read them.
// A K block of 64 columns has four blocks of 16, each of eight pairs. In fragment order every 16
// bytes hold the pairs of one number from all four: first the pairs 0, then 4, 1, 5, 2, 6, 3, 7. A
// lane's fragments of weights are made of the same columns (weights/reader.cuh).
#pragma once

#include "memory.cuh"

namespace {

// The place of column k in a row.
__device__ __forceinline__ constexpr i64 fragment_place(i64 k) {
    return k / 64 * 64 + k / 2 % 4 * 16 + k / 8 % 2 * 8 + k / 16 % 4 * 2 + k % 2;
}

// Returns the four pairs of numbers that stand from place 8 * piece on. Rows have whole K blocks.
template <class Pair, class T>
__device__ __forceinline__ Vector<Pair, 4> fragment_pairs(const T* x, i64 piece) {
    const Pair* pair =
        reinterpret_cast<const Pair*>(x + piece / 8 * 64) + piece % 8 / 2 + piece % 2 * 4;
    return {{pair[0], pair[8], pair[16], pair[24]}};
}

// The same of 16 bits, as eight numbers.
template <class T>
__device__ __forceinline__ Vector<T, 8> fragment_piece(const T* x, i64 piece) {
    const auto pairs = fragment_pairs<u32>(x, piece);
    return reinterpret_cast<const Vector<T, 8>&>(pairs);
}

// Says which V columns of a result a thread has, from j on, and where a row stores them: here
// columns that follow each other.
struct RowMajor {
    static constexpr bool FRAGMENT_ORDER = false;
    i32 j;

    __device__ __forceinline__ i32 column(int v) const { return j + v; }
    __device__ __forceinline__ i64 place() const { return j; }
};

// The same for V columns that follow each other in fragment order, a pair of each block of 16. Only
// the first result is stored so.
struct FragmentOrder {
    static constexpr bool FRAGMENT_ORDER = true;
    i32 j;

    __device__ __forceinline__ i32 column(int v) const { return j + v / 2 * 16 + v % 2; }
    __device__ __forceinline__ i64 place() const { return fragment_place(j); }
};

// Stores those columns of row m, which is of group g, that result I has.
template <int I, int V, class T, class Segment, class Columns>
__device__ __forceinline__ void store_columns_of(const Segment& s, T* row, i32 m, i32 g, Columns at,
                                                 const float (&p)[Segment::COLUMNS_PER_RESULT][V]) {
    const auto element = [&](int v) {
        float one[Segment::COLUMNS_PER_RESULT];
#pragma unroll
        for (int f = 0; f < Segment::COLUMNS_PER_RESULT; ++f) one[f] = p[f][v];
        return s.template result<I>(m, g, at.column(v), one);
    };
    if constexpr (Segment::WIDTH % V == 0) {
        if (at.j >= Segment::WIDTH) return;
        Vector<T, V> made;
#pragma unroll
        for (int v = 0; v < V; ++v) made.at[v] = element(v);
        if constexpr (Columns::FRAGMENT_ORDER && I > 0) {
#pragma unroll
            for (int v = 0; v < V; v += 2)
                store_vector<2>(row + at.column(v), Vector<T, 2>{made.at[v], made.at[v + 1]});
        } else {
            store_vector<V>(row + at.place(), made);
        }
    } else {
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (at.column(v) < Segment::WIDTH) row[at.column(v)] = element(v);
    }
}

// The same for all results.
template <int V, int I = 0, class Segment, class Columns>
__device__ __forceinline__ void store_columns(const Segment& s, i32 m, i32 g, Columns at,
                                              const float (&p)[Segment::COLUMNS_PER_RESULT][V]) {
    if constexpr (I < Segment::RESULTS) {
        store_columns_of<I>(s, s.template array<I>() + i64(m) * Segment::WIDTH, m, g, at, p);
        store_columns<V, I + 1>(s, m, g, at, p);
    }
}

}  // namespace
