// Grouped products of few rows a group: bound by the reading of weights, which go from memory to registers and there become fragments.
//
// A block makes a tile of 8 * NT rows of one group and 16 * R * WR rows of its matrix; WK warps share each of these, along K. The matrix is
// on the side of mma's 16 rows, the activations on that of its 8 columns. A lane has U blocks of 64 k in flight. A tile that is at most half
// full is made as one of half the height. There are blocks for as many tiles as there may be; those past the last have nothing to do.
#pragma once

#include "fp4.cuh"
#include "mma.cuh"
#include "sums.cuh"

namespace {

template <class Segment, int NT, int R, int WK, int U>
class FewRows {
    template <class, int, int, int, int>
    friend class FewRows;

    static constexpr int WARPS = 8, WR = WARPS / WK, HEIGHT = 8 * NT, TILES = R * WR, KB = (Segment::K + 63) / 64;
    static_assert(U % 2 == 0, "activations alternate");
    using Tile = Sums<Segment, HEIGHT, TILES, WK, 32 * WARPS>;
    using Weights = typename Segment::Weights;
    using Held = typename Weights::Held;

    const Segment& s;
    Weights stream[R];
    Held held[U][R];
    const u8* x[NT];  // where the activations of a lane lie; those of two blocks of 64 k, in halves
    uint4 active[2][NT][2];
    bool good[NT];
    i32 left_in_k;

public:
    __device__ static __forceinline__ void run(const Segment& s) {
        __shared__ float sums[Tile::COUNT];
        if (!Segment::EARLY) wait_for_previous();
        const Span span = s.template find<HEIGHT>(blockIdx.x / Tile::ACROSS);
        const i32 column = blockIdx.x % Tile::ACROSS * Tile::COLUMNS;
        if constexpr (NT % 2 == 0) {
            if (span.end - span.first <= HEIGHT / 2) return FewRows<Segment, NT / 2, R, WK, U>::make(s, span, column, sums);
        }
        make(s, span, column, sums);
    }

private:
    // One tile.
    __device__ static __forceinline__ void make(const Segment& s, const Span& span, i32 column, float* sums) {
        const bool whole = span.group < Segment::G && span.first < span.end;
        FewRows tile(s);
        if (whole) tile.open(span, column);
        if (Segment::EARLY) wait_for_previous();
        let_next_start();
        if (whole) {
            tile.open_activations(span);
            tile.multiply(sums);
            __syncthreads();
            Tile::store(s, span, column, sums, Weights::FACTOR);
        } else {
            Tile::fill(s, span, column);
        }
    }

    __device__ __forceinline__ explicit FewRows(const Segment& s) : s(s) {}

    // Of a thread: its warp's number along K and along the tiles of the product, its row and its quarter of a fragment.
    __device__ static __forceinline__ i32 wk() { return threadIdx.x / 32 % WK; }
    __device__ static __forceinline__ i32 wr() { return threadIdx.x / 32 / WK; }
    __device__ static __forceinline__ i32 row() { return threadIdx.x % 32 / 4; }
    __device__ static __forceinline__ i32 quarter() { return threadIdx.x % 4; }

    // The blocks of 64 k of its warp: the first, and how many.
    __device__ static __forceinline__ i32 begin() { return wk() * (KB / WK) + (KB % WK == 0 ? 0 : min(wk(), KB % WK)); }
    __device__ static __forceinline__ i32 count() { return KB / WK + (KB % WK == 0 ? 0 : wk() < KB % WK); }

    // Begins to read the weights of a tile.
    __device__ __forceinline__ void open(const Span& span, i32 column) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const i32 tile = wr() * R + r, block = min(column / Segment::B + tile / Segment::TILES, (Segment::W - 1) / Segment::B);
            stream[r].open(s, span.group, Segment::first_row(block, tile % Segment::TILES), begin(), i32(threadIdx.x % 32));
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
            for (int r = 0; r < R; ++r)
                if (u < count()) held[u][r] = stream[r].load(u);
        }
    }

    // Begins to read its activations, which the kernel before may have made.
    __device__ __forceinline__ void open_activations(const Span& span) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const i32 m = span.first + 8 * t + row();
            good[t] = m < span.end;
            x[t] = reinterpret_cast<const u8*>(s.row(good[t] ? m : span.first)) + begin() * 128 + quarter() * 32;
            active[0][t][0] = active[0][t][1] = active[1][t][0] = active[1][t][1] = make_uint4(0, 0, 0, 0);
        }
        left_in_k = Segment::K - 64 * begin() - 16 * quarter();
        if (count() > 0) fetch(0);
    }

    // The activations of block u; zeros where K ends before them.
    __device__ __forceinline__ void fetch(int u) {
        const bool there = Segment::K % 64 == 0 || left_in_k > 64 * u;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!there) active[u % 2][t][half] = make_uint4(0, 0, 0, 0);
                load_if(active[u % 2][t][half], x[t] + 128 * u + 16 * half, good[t] && there);
            }
        }
    }

    // Multiplies by block u after those that are done; loads the activations of the next one, and the weights of that U further on.
    __device__ __forceinline__ void take(float (&sum)[R][NT][4], int u, bool next, bool refill) {
        if (next) fetch(u + 1);
        Held now[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            now[r] = held[u % U][r];
            if (refill) held[u % U][r] = stream[r].load(u + U);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const u32 low = Weights::low_scale(now[r]), high = Weights::high_scale(now[r]);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                u32 fragment[4];
                Weights::decode(now[r], v, low, high, fragment);
#pragma unroll
                for (int t = 0; t < NT; ++t) {
                    const uint4& half = active[u % 2][t][v / 2];
                    mma_16x8x16(sum[r][t], fragment, v % 2 ? half.z : half.x, v % 2 ? half.w : half.y);
                }
            }
        }
    }

    // The partial sums of the tile that was opened.
    __device__ __forceinline__ void multiply(float* sums) {
        float sum[R][NT][4] = {};
        const i32 rounds = count() >= 2 * U ? count() / U - 1 : 0, left = count() - U * rounds;
        for (i32 round = 0; round < rounds; ++round) {
#pragma unroll
            for (int u = 0; u < U; ++u) take(sum, u, true, true);
#pragma unroll
            for (int r = 0; r < R; ++r) stream[r].advance(U);
#pragma unroll
            for (int t = 0; t < NT; ++t) x[t] += 128 * U;
            left_in_k -= 64 * U;
        }
#pragma unroll
        for (int u = 0; u < 2 * U - 1; ++u)
            if (u < left) take(sum, u, u + 1 < left, u + U < left);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int t = 0; t < NT; ++t) Tile::keep(sums, sum[r][t], wk(), wr() * R + r, 8 * t);
    }
};

}  // namespace
