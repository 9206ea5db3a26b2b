// Grouped products of few rows a group: bound by the reading of weights, which go from memory to registers and there become fragments.
//
// A block makes a tile of 8 * NT rows of one group and 16 * R * WR rows of its matrix; WK warps share each of these, along K. The matrix is
// on the side of mma's 16 rows, the activations on that of its 8 columns. A tile that is half full or less is made as one of half the
// height. There are blocks for as many tiles as there may be; those past the last have nothing to do, and so take halves of the last ones,
// in half the time with twice the warps along K: AT_ONCE blocks run at once, and the last of them would leave most multiprocessors idle.
//
// Groups of more than MOST rows can be left to a kernel of many rows, launched before this one, for which blocks don't wait: it does for what
// came before both. But the last block does when it is done, and so what waits for this launch waits for both.
//
// A lane has the weights of at least U blocks of 64 k on their way, and asks for those of C more at a time: memory likes bytes that follow
// each other. A barrier of the warp after each block keeps loads where they stand: the compiler would collect them at the end of the loop,
// with copies of the registers that they are for.
#pragma once

#include "mma.cuh"
#include "sums.cuh"
#include "weights/reader.cuh"

namespace {

template <class Segment, int NT, int R, int WK, int U, int C, int WARPS, int AT_ONCE>
class FewRows {
    template <class, int, int, int, int, int, int, int>
    friend class FewRows;

    static constexpr int WR = WARPS / WK, HEIGHT = 8 * NT, TILES = R * WR, KB = (Segment::K + 63) / 64;
    static constexpr int SLOTS = U + C;  // blocks that a lane holds weights of
    static_assert(Segment::ABOVE == 0, "groups are left to a kernel of many rows, not to one of fewer");

    // Blocks after which all is in the same registers again: slots come round, loads begin, activations alternate.
    __device__ static constexpr int round(int n) { return n % C == 0 && n % 2 == 0 ? n : round(n + SLOTS); }
    static constexpr int ROUND = round(SLOTS);

    static constexpr bool HALVES = AT_ONCE > 0 && 2 * WK <= WARPS && TILES % (2 * Segment::TILES) == 0;  // half a block makes whole columns
    using Half = FewRows<Segment, NT, R, 2 * WK, U, C, WARPS, AT_ONCE>;

    using Tile = Sums<Segment, HEIGHT, TILES, WK, 32 * WARPS>;
    using HalfTile = Sums<Segment, HEIGHT, HALVES ? TILES / 2 : TILES, HALVES ? 2 * WK : WK, 32 * WARPS>;
    using Weights = typename Segment::Weights;
    using Held = typename Weights::Held;

    const Segment& s;
    Weights stream[R];
    Held held[SLOTS][R];
    const u8* x[NT];  // where the activations of a lane lie; those of two blocks of 64 k, in halves
    uint4 active[2][NT][2];
    bool good[NT];
    i32 left_in_k;

public:
    __device__ static __forceinline__ void run(const Segment& s) {
        __shared__ float sums[HalfTile::COUNT];
        if (!Segment::EARLY) wait_for_previous();
        const Place place = s.template find<HEIGHT, Tile::ACROSS, HALVES ? AT_ONCE : 0>(blockIdx.x);
        const i32 column = place.across * Tile::COLUMNS;
        if constexpr (HALVES) {
            if (place.half != Place::WHOLE) return Half::make_lower(s, place.span, column + place.half * HalfTile::COLUMNS, sums);
        }
        make_lower(s, place.span, column, sums);
    }

private:
    // One tile, as one of half the height if that will do.
    __device__ static __forceinline__ void make_lower(const Segment& s, const Span& span, i32 column, float* sums) {
        if constexpr (NT % 2 == 0) {
            using Lower = FewRows<Segment, NT / 2, R, WK, U, C, WARPS, AT_ONCE>;
            if (span.end - span.first <= HEIGHT / 2) return Lower::make(s, span, column, sums);
        }
        make(s, span, column, sums);
    }

    // One tile.
    __device__ static __forceinline__ void make(const Segment& s, const Span& span, i32 column, float* sums) {
        const bool whole = span.group < Segment::G && span.first < span.end;
        FewRows tile(s);
        if (whole) tile.open(span, column);
        if (Segment::EARLY && !Segment::BESIDE_PREVIOUS) wait_for_previous();
        let_next_start();
        if (whole) {
            tile.open_activations(span);
            tile.multiply(sums);
            __syncthreads();
            Tile::store(s, span, column, sums);
        } else {
            Tile::fill(s, span, column);
        }
        if (Segment::BESIDE_PREVIOUS && blockIdx.x == gridDim.x - 1) wait_for_previous();
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

    // Multiplies by block u of a round that `left` blocks are left at; loads the activations of the next one, and weights further on.
    __device__ __forceinline__ void take(float (&sum)[R][NT][4], int u, i32 left) {
#pragma unroll
        for (int next = u + U; next < u + SLOTS; ++next) {
#pragma unroll
            for (int r = 0; r < R; ++r)
                if (u % C == 0 && next < left) held[next % SLOTS][r] = stream[r].load(next);
        }
        if (u + 1 < left) fetch(u + 1);
#pragma unroll
        for (int r = 0; r < R; ++r) multiply(sum[r], held[u % SLOTS][r], active[u % 2]);
        __syncwarp();
    }

    __device__ static __forceinline__ void multiply(float (&sum)[NT][4], const Held& now, const uint4 (&active)[NT][2]) {
        // A product reads activations from registers that follow each other: so it takes one half each of two words of codes.
        const typename Weights::Scales scales = Weights::scales(now);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int v = 0; v < 4; v += 2) {
                u32 fragment[4];
                Weights::decode(now, scales, v, half, fragment);
                Weights::decode(now, scales, v + 1, half, fragment + 2);
#pragma unroll
                for (int t = 0; t < NT; ++t) {
                    const uint4& pairs = active[t][half];
                    mma_16x8x16<typename Segment::Activation>(sum[t], fragment, v == 0 ? pairs.x : pairs.z, v == 0 ? pairs.y : pairs.w);
                }
            }
    }

    // The partial sums of the tile that was opened.
    __device__ __forceinline__ void multiply(float* sums) {
        float sum[R][NT][4] = {};
        const i32 rounds = count() >= ROUND + U ? (count() - U) / ROUND : 0, left = count() - ROUND * rounds;
        for (i32 i = 0; i < rounds; ++i) {
#pragma unroll
            for (int u = 0; u < ROUND; ++u) take(sum, u, ROUND + U);
#pragma unroll
            for (int r = 0; r < R; ++r) stream[r].advance(ROUND);
#pragma unroll
            for (int t = 0; t < NT; ++t) x[t] += 128 * ROUND;
            left_in_k -= 64 * ROUND;
        }
#pragma unroll
        for (int u = 0; u < ROUND + U - 1; ++u)
            if (u < left) take(sum, u, left);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int t = 0; t < NT; ++t) Tile::keep(sums, sum[r][t], wk(), wr() * R + r, 8 * t);
    }
};

}  // namespace
