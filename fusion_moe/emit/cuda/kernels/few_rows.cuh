// Grouped products of few rows a group: bound by the reading of weights, which go from memory to registers and there become fragments.
//
// A block makes a tile of 8 * NT rows of one group and 16 * R * WR rows of its matrix; WK warps share each of these, along K. The matrix is
// on the side of mma's 16 rows, the activations on that of its 8 columns. A lane has U blocks of 64 k in flight. There are blocks for as many
// tiles as there may be; those past the last have nothing to do.
#pragma once

#include "fp4.cuh"
#include "mma.cuh"
#include "order.cuh"
#include "ragged.cuh"

namespace {

template <class Segment, int NT, int R, int WK, int U>
class FewRows {
    static constexpr int WARPS = 8, THREADS = 32 * WARPS, WR = WARPS / WK, HEIGHT = 8 * NT;
    static constexpr int TILES = R * WR, COLUMNS = Segment::B * (TILES / Segment::TILES);  // of the product; of the result
    static constexpr int ACROSS = (Segment::W + COLUMNS - 1) / COLUMNS;
    static constexpr int STRIDE = 16 * TILES + 4;  // of partial sums: no two of a warp's stores meet in a bank
    static constexpr int KB = (Segment::K + 63) / 64, V = 2;
    static_assert(TILES % Segment::TILES == 0 && U % 2 == 0, "a block's tiles make whole columns, and activations alternate");
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
        __shared__ float partial[WK * HEIGHT * STRIDE];
        if (!Segment::EARLY) wait_for_previous();
        const Span span = s.template find<HEIGHT>(blockIdx.x / ACROSS);
        const i32 column = blockIdx.x % ACROSS * COLUMNS;
        const bool whole = span.group < Segment::G && span.first < span.end;
        FewRows tile(s);
        if (whole) tile.open(span, column);
        if (Segment::EARLY) wait_for_previous();
        let_next_start();
        if (whole) {
            tile.open_activations(span);
            tile.multiply(partial);
            __syncthreads();
            finish(s, span, column, partial);
        } else {
            fill(s, span, column);
        }
    }

private:
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
    __device__ __forceinline__ void multiply(float* partial) {
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
            for (int t = 0; t < NT; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    partial[(wk() * HEIGHT + 8 * t + 2 * quarter() + i % 2) * STRIDE + 16 * (wr() * R + r) + row() + i / 2 * 8] = sum[r][t][i];
    }

    // Adds what the warps have along K, and stores.
    __device__ static __forceinline__ void finish(const Segment& s, const Span& span, i32 at, const float* partial) {
        for (i32 i = threadIdx.x; i < HEIGHT * COLUMNS / V; i += THREADS) {
            const i32 token = i / (COLUMNS / V), column = i % (COLUMNS / V) * V, j = at + column, m = span.first + token;
            if (m >= span.end || j >= Segment::W) continue;
            const float* row = partial + token * STRIDE + column / Segment::B * (16 * Segment::TILES);
            float p[Segment::F][V];
#pragma unroll
            for (int f = 0; f < Segment::F; ++f) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const float* one = row + Segment::local(f, column % Segment::B + v);
                    float total = 0;
#pragma unroll
                    for (int k = 0; k < WK; ++k) total += one[k * HEIGHT * STRIDE];
                    p[f][v] = total * (Weights::FACTOR * s.decode[span.group * Segment::RUNS + Segment::run(f, min(j + v, Segment::W - 1))]);
                }
            }
            put(s, m, span.group, j, p);
        }
    }

    // Rows that belong to no group.
    __device__ static void fill(const Segment& s, const Span& span, i32 at) {
        for (i32 i = threadIdx.x; i < (span.end - span.first) * COLUMNS / V; i += THREADS) {
            const i32 j = at + i % (COLUMNS / V) * V;
            const float zero[Segment::F][V] = {};
            if (j < Segment::W) put(s, span.first + i / (COLUMNS / V), Segment::G, j, zero);
        }
    }

    __device__ static __forceinline__ void put(const Segment& s, i32 m, i32 g, i32 j, const float (&p)[Segment::F][V]) {
        if constexpr (Segment::W % V == 0) {
            s.template store<V>(m, g, InTurn{j}, p);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                float one[Segment::F][1];
#pragma unroll
                for (int f = 0; f < Segment::F; ++f) one[f][0] = p[f][v];
                if (j + v < Segment::W) s.template store<1>(m, g, InTurn{j + v}, one);
            }
        }
    }
};

}  // namespace
