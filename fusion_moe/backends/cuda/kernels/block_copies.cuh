// Copies of numbers in e4m3 codes with a scale for 128 of them in a row, 128 in a column, or 128 x
// 128; all from one read.
//
// A block of threads has a tile of 128 x 128. A warp has 16 of its rows, a lane eight columns of
// every second one of these. Rows of groups are in tiles that no group shares.
#pragma once

#include "mxfp8.cuh"

namespace {

// The scale of numbers whose largest magnitude has the bits `most`, as it is stored and as a
// number; over: what they are multiplied by to become codes.
struct E8m0Scale {
    using Stored = u8;
    u8 stored;
    float scale, over;

    __device__ __forceinline__ explicit E8m0Scale(u32 most)
        : stored(u8(e8m0_of(most))), scale(e8m0_(stored)), over(over_e8m0(stored)) {}
};

// 448 over the magnitude, or the power of two below that; 1 for zeros, NaN for what is not finite.
template <bool POWER_OF_TWO>
struct FloatScale {
    using Stored = float;
    float stored, scale, over;

    __device__ __forceinline__ explicit FloatScale(u32 most) {
        const float whole = fminf(__fdiv_rn(448.f, __uint_as_float(most)), 0x1.FEp127f),
                    finite =
                        POWER_OF_TWO ? __uint_as_float(__float_as_uint(whole) & 0xFF800000) : whole;
        over = most == 0 ? 1.f : most >= 0x7F800000 ? __uint_as_float(0x7FC00000) : finite;
        stored = scale = __fdiv_rn(1.f, over);
    }
};

using PowerOfTwoScale = FloatScale<true>;
using Float32Scale = FloatScale<false>;

// Where a copy is stored, null where it is not needed. numbers: those that codes and scales stand
// for.
template <class Scale_>
struct BlockCopy {
    using Scale = Scale_;
    static constexpr bool MADE = true;
    u8* codes;
    typename Scale::Stored* scales;
    bf16* numbers;

    // Eight of a row, from place `at` on; of(v): the scale of each.
    template <class T, class Of>
    __device__ __forceinline__ void store(i64 at, const Bits<T>& x, Of of) const {
        Vector<u16, 4> made;
        Vector<u32, 4> wide;
#pragma unroll
        for (int v = 0; v < 8; v += 2) {
            const Scale low = of(v), high = of(v + 1);
            made.at[v / 2] = e4m3_pair(x.number(v) * low.over, x.number(v + 1) * high.over);
            wide.at[v / 2] = numbers_of(made.at[v / 2], low.scale, high.scale);
        }
        if (codes) store_vector<4>(reinterpret_cast<u16*>(codes + at), made);
        if (numbers) store_vector<4>(reinterpret_cast<u32*>(numbers + at), wide);
    }
};

struct NoCopy {
    static constexpr bool MADE = false;
};

// Rows of matrices of N rows, each of which begins with a tile of its own.
template <i32 N>
struct MatrixTiles {
    static constexpr i32 EACH = (N + 127) / 128;
    i64 matrices;

    __device__ __forceinline__ i64 tiles() const { return matrices * EACH; }
    __device__ __forceinline__ i64 blocks() const { return tiles(); }
    __device__ __forceinline__ RowTile at(i64 tile) const {
        const i32 top = i32(tile % EACH) * 128;
        return {tile / EACH * N + top, min(N - top, 128), true};
    }
};

// A lane's place in a tile.
template <i32 K>
struct Square {
    static constexpr i32 ACROSS = (K + 127) / 128;  // tiles
    static constexpr i32 STEPS = 8;                 // rows of a lane

    __device__ __forceinline__ static i32 column(i32 across) {
        return 128 * across + threadIdx.x % 16 * 8;
    }
    __device__ __forceinline__ static i32 row(int s) {
        return threadIdx.x / 32 * 16 + 2 * s + threadIdx.x % 32 / 16;
    }

    // Eight columns of a lane's row, if there are any, and their scale.
    template <class Copy, class T>
    __device__ __forceinline__ static void store_row(const Copy& copy, const RowTile& tile, int s,
                                                     i32 across, const Bits<T>& x,
                                                     const typename Copy::Scale& by) {
        const i64 m = tile.first + row(s);
        const i32 j0 = column(across);
        if (row(s) >= tile.rows || (K % 128 != 0 && j0 >= K)) return;
        if (copy.scales && threadIdx.x % 16 == 0) copy.scales[m * ACROSS + across] = by.stored;
        copy.store(m * K + j0, x, [&](int) { return by; });
    }

    // Calls body(tile, its number, tiles before it in its rows) on all threads of a block.
    template <class Tiles, class Body>
    __device__ __forceinline__ static void for_all(const Tiles& tiles, Body body) {
        for (i64 i = blockIdx.x; i < tiles.tiles() * ACROSS; i += gridDim.x)
            body(tiles.at(i / ACROSS), i / ACROSS, i32(i % ACROSS));
    }
};

// The largest magnitude of a lane's numbers, as bits.
template <class T, int COUNT>
__device__ __forceinline__ u32 largest_of(const Bits<T>* x) {
    u32 most = 0;
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
#pragma unroll
        for (int w = 0; w < Bits<T>::WORDS; ++w)
            most = x[s].larger(most, x[s].magnitude(x[s].at[w]));
    }
    return Bits<T>::largest(most);
}

// Copies of [rows, K] numbers of type T, by blocks of 256 threads. row(m)(j0, x): columns j0 .. j0
// + 7 of row m.
template <class T, i32 K, class Tiles, class Row, class InRows, class InColumns, class InSquares>
__device__ __forceinline__ void make_block_copies(const Tiles& tiles, Row row,
                                                  const InRows& in_rows,
                                                  const InColumns& in_columns,
                                                  const InSquares& in_squares) {
    using S = Square<K>;
    __shared__ __align__(16) u32 of_warp[8][128], of_all[128];
    S::for_all(tiles, [&](const RowTile& tile, i64 number, i32 across) {
        const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, j0 = S::column(across);
        const bool there = K % 128 == 0 || j0 < K;
        const auto store_column_scales = [&](const u32* most) {
            if constexpr (InColumns::MADE) {
                if (!in_columns.scales || threadIdx.x >= 16 || !there || number >= tiles.blocks())
                    return;
#pragma unroll
                for (int v = 0; v < 8; ++v)
                    in_columns.scales[number * K + j0 + v] =
                        typename InColumns::Scale(most ? most[v] : 0).stored;
            }
        };
        if (tile.rows == 0) {
            store_column_scales(nullptr);
            return;
        }
        Bits<T> x[S::STEPS] = {};
        if (there) {
            const auto at = [&](int s) { return row(tile.first + min(S::row(s), tile.rows - 1)); };
            const decltype(at(0)) rows[8] = {at(0), at(1), at(2), at(3),
                                             at(4), at(5), at(6), at(7)};
#pragma unroll
            for (int s = 0; s < S::STEPS; ++s) {
                float wide[8];
                rows[s](j0, wide);
                x[s] = Bits<T>(wide);
            }
        }
        if constexpr (InRows::MADE) {
#pragma unroll
            for (int s = 0; s < S::STEPS; ++s) {
                u32 most = largest_of<T, 1>(&x[s]);
#pragma unroll
                for (int lanes = 1; lanes < 16; lanes *= 2)
                    most = max(most, __shfl_xor_sync(WHOLE_WARP, most, lanes));
                S::store_row(in_rows, tile, s, across, x[s], typename InRows::Scale(most));
            }
        }
        if constexpr (InSquares::MADE) {
            const u32 most = __reduce_max_sync(WHOLE_WARP, largest_of<T, S::STEPS>(x));
            if (lane == 0) of_warp[warp][0] = most;
            __syncthreads();
            u32 of_tile = 0;
#pragma unroll
            for (int w = 0; w < 8; ++w) of_tile = max(of_tile, of_warp[w][0]);
            const typename InSquares::Scale by(of_tile);
#pragma unroll
            for (int s = 0; s < S::STEPS; ++s) S::store_row(in_squares, tile, s, across, x[s], by);
            __syncthreads();  // the next tile writes what this one read
        }
        if constexpr (InColumns::MADE) {
            if (!tile.in_group) {
#pragma unroll
                for (int s = 0; s < S::STEPS; ++s) x[s] = {};
            }
            Bits<T> most{};
#pragma unroll
            for (int w = 0; w < Bits<T>::WORDS; ++w) {
#pragma unroll
                for (int s = 0; s < S::STEPS; ++s)
                    most.at[w] = most.larger(most.at[w], most.magnitude(x[s].at[w]));
                most.at[w] = most.larger(most.at[w], __shfl_xor_sync(WHOLE_WARP, most.at[w], 16));
            }
            if (lane < 16) {
#pragma unroll
                for (int v = 0; v < 8; ++v)
                    of_warp[warp][8 * lane + v] = __float_as_uint(most.number(v));
            }
            __syncthreads();
            if (threadIdx.x < 128) {
                u32 of_column = 0;
#pragma unroll
                for (int w = 0; w < 8; ++w) of_column = max(of_column, of_warp[w][threadIdx.x]);
                of_all[threadIdx.x] = of_column;
            }
            __syncthreads();
            const u32* const mine = of_all + lane % 16 * 8;
            store_column_scales(mine);
#pragma unroll
            for (int s = 0; s < S::STEPS; ++s) {
                if (S::row(s) < tile.rows && there)
                    in_columns.store((tile.first + S::row(s)) * K + j0, x[s],
                                     [&](int v) { return typename InColumns::Scale(mine[v]); });
            }
            __syncthreads();
        }
    });
}

// Codes [G, N, K] and scales [G, N, K / 128] of blocks of 128 x 128 -> those of the transposed
// matrices.
template <i32 N, i32 K, class Scale>
__device__ __forceinline__ void turn_blocks(i64 groups, const u8* codes, const Scale* scales,
                                            u8* turned, Scale* turned_scales) {
    constexpr i32 DOWN = N / 128, ACROSS = K / 128;
    // words of rows; four more after each 16, so that 8 of these are in banks of their own
    __shared__ __align__(16) u32 words[128 * 32 + 8 * 4];
    const auto word = [&](i32 n, i32 w) { return words + n * 32 + n / 16 * 4 + w; };
    for (i64 i = blockIdx.x; i < groups * DOWN * ACROSS; i += gridDim.x) {
        const i64 g = i / (DOWN * ACROSS);
        const i32 n0 = i32(i / ACROSS % DOWN) * 128, k0 = i32(i % ACROSS) * 128;
        const u8* from = codes + (g * N + n0) * K + k0;
        u8* to = turned + (g * K + k0) * N + n0;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const i32 n = threadIdx.x / 8 + 32 * v, w = threadIdx.x % 8 * 4;
            *reinterpret_cast<Vector<u32, 4>*>(word(n, w)) =
                load_vector<4>(reinterpret_cast<const u32*>(from + i64(n) * K + 4 * w));
        }
        if (threadIdx.x < 128)
            turned_scales[(g * K + k0 + threadIdx.x) * DOWN + n0 / 128] =
                scales[(g * N + n0) * ACROSS + k0 / 128];
        __syncthreads();
        const i32 n = threadIdx.x % 8 * 16, k = threadIdx.x / 8;  // 16 rows, a word of columns
        Vector<u32, 4> made[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            u32 x[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) x[r] = *word(n + 4 * q + r, k);
            const u32 low[2] = {__byte_perm(x[0], x[1], 0x5140), __byte_perm(x[2], x[3], 0x5140)},
                      high[2] = {__byte_perm(x[0], x[1], 0x7362), __byte_perm(x[2], x[3], 0x7362)};
            made[0].at[q] = __byte_perm(low[0], low[1], 0x5410);
            made[1].at[q] = __byte_perm(low[0], low[1], 0x7632);
            made[2].at[q] = __byte_perm(high[0], high[1], 0x5410);
            made[3].at[q] = __byte_perm(high[0], high[1], 0x7632);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            store_vector<4>(reinterpret_cast<u32*>(to + i64(4 * k + c) * N + n), made[c]);
        __syncthreads();  // the next block writes what this one read
    }
}

// The bf16 numbers of a copy [rows, K] in blocks along rows of groups, whose scales are powers of
// two; zeros in rows of none.
template <i32 K, i32 GROUPS>
__device__ __forceinline__ void read_block_copy(const GroupedRows<GROUPS, 128>& tiles,
                                                const u8* codes, const float* scales,
                                                bf16* numbers) {
    using S = Square<K>;
    S::for_all(tiles, [&](const RowTile& tile, i64 number, i32 across) {
        const i32 j0 = S::column(across);
        if (tile.rows == 0 || j0 >= K) return;
        Eight<float> scale = {};
        Vector<u16, 4> x[S::STEPS] = {};
        if (tile.in_group) {
            scale = load_eight(scales + number * K + j0);
#pragma unroll
            for (int s = 0; s < S::STEPS; ++s) {
                const i64 m = tile.first + min(S::row(s), tile.rows - 1);
                x[s] = load_vector<4>(reinterpret_cast<const u16*>(codes + m * K + j0));
            }
        }
#pragma unroll
        for (int s = 0; s < S::STEPS; ++s) {
            Vector<u32, 4> wide;
#pragma unroll
            for (int v = 0; v < 8; v += 2)
                wide.at[v / 2] = numbers_of(x[s].at[v / 2], scale.at[v], scale.at[v + 1]);
            const i64 m = tile.first + S::row(s);
            if (S::row(s) < tile.rows)
                store_vector<4>(reinterpret_cast<u32*>(numbers + m * K + j0), wide);
        }
    });
}

}  // namespace
