// Small-M grouped products: bound by the reading of weights, which go from memory to registers and
// there become fragments.
//
// A block computes a tile of 8 * TILES_M rows of one group and 16 * TILES_PER_WARP * SPLIT_N rows
// of its matrix; SPLIT_K warps share K of each of these. The matrix is on the side of mma's 16
// rows, the activations on that of its 8 columns. A tile that is half full or less is computed as
// one of half the height. There are blocks for as many tiles as there may be; those past the last
// are idle, and so take halves of the last ones, in half the time with twice the split-K: WAVE
// blocks run at once, and the last wave would leave most multiprocessors idle.
//
// Groups of many rows can be left to a large-M kernel, launched before this one, for which blocks
// don't wait: it does for what came before both. But the last block does when it is done, and so
// what waits for this launch waits for both.
//
// A lane has the weights of at least IN_FLIGHT K blocks in flight, and requests those of BATCH more
// at a time: memory likes bytes that follow each other. A barrier of the warp after each K block
// keeps loads where they stand: the compiler would collect them at the end of the loop, with copies
// of the registers that they are for.
#pragma once

#include "codes.cuh"
#include "mma.cuh"
#include "split_k.cuh"
#include "timeline.cuh"
#include "weights/reader.cuh"

namespace {

template <class Segment, int TILES_M, int TILES_PER_WARP, int SPLIT_K, int IN_FLIGHT, int BATCH,
          int WARPS, int WAVE, bool ROW_ORDER = false>
class SmallM {
    template <class, int, int, int, int, int, int, int, bool>
    friend class SmallM;

    static_assert(WARPS <= SMALL_M_WARPS);
    static constexpr int SPLIT_N = WARPS / SPLIT_K, TILE_M = 8 * TILES_M,
                         WEIGHT_TILES = TILES_PER_WARP * SPLIT_N;
    static constexpr int K_BLOCKS = (Segment::K + 63) / 64;
    static constexpr int BUFFERS = IN_FLIGHT + BATCH;  // K blocks that a lane has weights of

    // K blocks that activations are requested ahead. In row order a warp has all of K, and few
    // others beside it.
    static constexpr int AHEAD = ROW_ORDER && IN_FLIGHT >= 3 ? 3 : 1, ROW_BUFFERS = AHEAD + 1;

    // K blocks after which all is in the same registers again: buffers come round, loads begin,
    // activations alternate.
    __device__ static constexpr int unroll(int n) {
        return n % BATCH == 0 && n % ROW_BUFFERS == 0 ? n : unroll(n + BUFFERS);
    }
    static constexpr int UNROLL = unroll(BUFFERS);
    // Whether activations are requested before others may start. The compiler puts the first use
    // of weights, which waits for memory, before loads that follow there. It pays with few tiles.
    static constexpr bool ROWS_FIRST = IN_FLIGHT == 2 && TILES_PER_WARP == 1;
    // Whether it rounds rows to e4m3: all of a block do it once, and keep them in shared memory,
    // apart so that two rows lie in different banks.
    static constexpr bool ROUNDS = Segment::ROUNDS;
    static constexpr i32 PIECES = (Segment::K + 127) / 128 * 16, ROW_BYTES = 16 * PIECES + 16;
    // Whether others may start only when the products are done. With long K the next product may
    // have few blocks, and they would crowd where multiprocessors are free first.
    static constexpr bool LAUNCHES_LATE = ROW_ORDER && Segment::K >= 4096;

    static constexpr bool SPLITS_LAST_WAVE =
        WAVE > 0 && 2 * SPLIT_K <= WARPS&& WEIGHT_TILES % (2 * Segment::BLOCK_TILES) ==
                        0;  // half the tiles make whole columns
    using HalfN =
        SmallM<Segment, TILES_M, TILES_PER_WARP, 2 * SPLIT_K, IN_FLIGHT, BATCH, WARPS, WAVE>;

    using Epilogue = SplitKEpilogue<Segment, TILE_M, WEIGHT_TILES, SPLIT_K, 32 * WARPS>;
    using HalfNEpilogue =
        SplitKEpilogue<Segment, TILE_M, SPLITS_LAST_WAVE ? WEIGHT_TILES / 2 : WEIGHT_TILES,
                       SPLITS_LAST_WAVE ? 2 * SPLIT_K : SPLIT_K, 32 * WARPS>;
    using Weights = typename Segment::Weights;
    using Packed = typename Weights::Packed;

    const Segment& s;
    Weights readers[TILES_PER_WARP];
    Packed packed[BUFFERS][TILES_PER_WARP];
    const u8* x[TILES_M];  // where the activations of a lane lie; those of K blocks, in halves
    uint4 activations[ROW_BUFFERS][TILES_M][2];
    bool in_range[TILES_M];
    i32 k_left;

  public:
    __device__ static __forceinline__ void run(const Segment& s, const SizeClass& size_class) {
        __shared__ float partials[HalfNEpilogue::PARTIALS];
        if (!size_class.reads_before_wait) griddepcontrol_wait();
        const TilePlace place =
            s.template find<TILE_M, Epilogue::N_TILES, SPLITS_LAST_WAVE ? WAVE : 0>(blockIdx.x,
                                                                                    size_class);
        const i32 column = place.n_tile * Epilogue::TILE_N;
        if constexpr (SPLITS_LAST_WAVE) {
            if (place.half != TilePlace::BOTH_HALVES)
                return HalfN::run_lowest(s, size_class, place.m_tile,
                                         column + place.half * HalfNEpilogue::TILE_N, partials);
        }
        run_lowest(s, size_class, place.m_tile, column, partials);
    }

  private:
    // One tile, as one of half the height if that will do.
    __device__ static __forceinline__ void run_lowest(const Segment& s, const SizeClass& size_class,
                                                      const MTile& m_tile, i32 column,
                                                      float* partials) {
        if constexpr (TILES_M % 2 == 0) {
            using HalfM = SmallM<Segment, TILES_M / 2, TILES_PER_WARP, SPLIT_K, IN_FLIGHT, BATCH,
                                 WARPS, WAVE, ROW_ORDER>;
            if (m_tile.end - m_tile.first <= TILE_M / 2)
                return HalfM::run_tile(s, size_class, m_tile, column, partials);
        }
        run_tile(s, size_class, m_tile, column, partials);
    }

    // One tile.
    __device__ static __forceinline__ void run_tile(const Segment& s, const SizeClass& size_class,
                                                    const MTile& m_tile, i32 column,
                                                    float* partials) {
        const bool in_group = m_tile.group < Segment::GROUPS && m_tile.first < m_tile.end;
        SmallM tile(s);
        if (in_group) tile.prefetch_weights(m_tile, column);
        if (size_class.reads_before_wait && !size_class.concurrent_with_previous)
            griddepcontrol_wait();
        if (ROWS_FIRST && in_group) tile.prefetch_activations(m_tile, size_class.routes);
        if (!LAUNCHES_LATE) griddepcontrol_launch_dependents();
        if (in_group) {
            mark_tile(threadIdx.x == 0, false);
            if (!ROWS_FIRST) tile.prefetch_activations(m_tile, size_class.routes);
            tile.multiply(partials);
            if (LAUNCHES_LATE) griddepcontrol_launch_dependents();
            __syncthreads();
            Epilogue::store(s, m_tile, column, partials);
            mark_tile(threadIdx.x == 0, true);
        } else {
            Epilogue::store_ungrouped_rows(s, m_tile, column);
        }
        if (size_class.concurrent_with_previous && blockIdx.x == gridDim.x - 1)
            griddepcontrol_wait();
    }

    __device__ __forceinline__ explicit SmallM(const Segment& s) : s(s) {}

    // Of a thread: its warp's number along K and along N, its row and its pair of columns of a
    // fragment.
    __device__ static __forceinline__ i32 k_warp() { return threadIdx.x / 32 % SPLIT_K; }
    __device__ static __forceinline__ i32 n_warp() { return threadIdx.x / 32 / SPLIT_K; }
    __device__ static __forceinline__ i32 row() { return threadIdx.x % 32 / 4; }
    __device__ static __forceinline__ i32 lane_column() { return threadIdx.x % 4; }

    // The K blocks of its warp: the first, and how many.
    __device__ static __forceinline__ i32 begin() {
        return k_warp() * (K_BLOCKS / SPLIT_K) +
               (K_BLOCKS % SPLIT_K == 0 ? 0 : min(k_warp(), K_BLOCKS % SPLIT_K));
    }
    __device__ static __forceinline__ i32 count() {
        return K_BLOCKS / SPLIT_K + (K_BLOCKS % SPLIT_K == 0 ? 0 : k_warp() < K_BLOCKS % SPLIT_K);
    }

    // Begins to read the weights of a tile.
    __device__ __forceinline__ void prefetch_weights(const MTile& m_tile, i32 column) {
#pragma unroll
        for (int r = 0; r < TILES_PER_WARP; ++r) {
            const i32 tile = n_warp() * TILES_PER_WARP + r;
            const i32 block = min(column / Segment::BLOCK + tile / Segment::BLOCK_TILES,
                                  (Segment::WIDTH - 1) / Segment::BLOCK);
            readers[r].open(s, m_tile.group, Segment::first_row(block, tile % Segment::BLOCK_TILES),
                            begin(), i32(threadIdx.x % 32));
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
#pragma unroll
            for (int r = 0; r < TILES_PER_WARP; ++r)
                if (u < count()) packed[u][r] = readers[r].load(u);
        }
    }

    // The place of a tile's row that is rounded.
    __device__ static __forceinline__ u8* rounded_row(i32 row) {
        extern __shared__ __align__(16) u8 rows[];
        return rows + row * ROW_BYTES;
    }

    // Rounds the rows of a tile. A thread reads all its pieces of a row before it needs one.
    __device__ __forceinline__ void round_rows(const MTile& m_tile, bool routed) {
        constexpr int STEP = 32 * WARPS, EACH = (PIECES + STEP - 1) / STEP;
        const i32 first = threadIdx.x;
        for (i32 m = m_tile.first; m < m_tile.end; ++m) {
            const auto* row = s.row(m, routed);
            uint4 x[EACH] = {};
#pragma unroll
            for (int v = 0; v < EACH; ++v)
                load_if(x[v], row + 8 * (first + v * STEP), 8 * (first + v * STEP) < Segment::K);
#pragma unroll
            for (int v = 0; v < EACH; ++v) {
                x[v] = rounded_to_codes<typename Segment::RowScale>(x[v]);
                if (first + v * STEP < PIECES)
                    reinterpret_cast<uint4*>(rounded_row(m - m_tile.first))[first + v * STEP] =
                        x[v];
            }
        }
        __syncthreads();
    }

    // Begins to read its activations, which the kernel before may have made. routed: whether it has
    // sorted their rows.
    __device__ __forceinline__ void prefetch_activations(const MTile& m_tile, bool routed) {
        if constexpr (ROUNDS) round_rows(m_tile, routed);
#pragma unroll
        for (int t = 0; t < TILES_M; ++t) {
            const i32 m = m_tile.first + 8 * t + row();
            in_range[t] = m < m_tile.end;
            x[t] = ROUNDS
                       ? rounded_row(8 * t + row())
                       : reinterpret_cast<const u8*>(s.row(in_range[t] ? m : m_tile.first, routed));
            x[t] += begin() * 128 + lane_column() * 32;
#pragma unroll
            for (int u = 0; u < ROW_BUFFERS; ++u)
                activations[u][t][0] = activations[u][t][1] = make_uint4(0, 0, 0, 0);
        }
        k_left = Segment::K - 64 * begin() - 16 * lane_column();
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (u < count()) load_activations(u);
    }

    // The activations of K block u; zeros where K ends before them.
    __device__ __forceinline__ void load_activations(int u) {
        const bool there = Segment::K % 64 == 0 || k_left > 64 * u;
#pragma unroll
        for (int t = 0; t < TILES_M; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!there) activations[u % ROW_BUFFERS][t][half] = make_uint4(0, 0, 0, 0);
                load_if<ROUNDS>(activations[u % ROW_BUFFERS][t][half], x[t] + 128 * u + 16 * half,
                                in_range[t] && there);
            }
        }
    }

    // Multiplies by K block u of the unrolled ones, of which `left` are left before the first;
    // loads activations and weights further on.
    __device__ __forceinline__ void step(float (&sum)[TILES_PER_WARP][TILES_M][4], int u,
                                         i32 left) {
#pragma unroll
        for (int next = u + IN_FLIGHT; next < u + BUFFERS; ++next) {
#pragma unroll
            for (int r = 0; r < TILES_PER_WARP; ++r)
                if (u % BATCH == 0 && next < left)
                    packed[next % BUFFERS][r] = readers[r].load(next);
        }
        if (u + AHEAD < left) load_activations(u + AHEAD);
#pragma unroll
        for (int r = 0; r < TILES_PER_WARP; ++r)
            multiply(sum[r], packed[u % BUFFERS][r], activations[u % ROW_BUFFERS]);
        __syncwarp();
    }

    __device__ static __forceinline__ void multiply(float (&sum)[TILES_M][4], const Packed& now,
                                                    const uint4 (&activations)[TILES_M][2]) {
        const typename Weights::Scales scales = Weights::scales(now);
        // A product reads activations from registers that follow each other: so it reads one half
        // each of two words of codes. In row order it reads both halves of a word, as in large-M
        // kernels, which takes moves of activations. Tensor cores add up the 16 columns of a
        // product in one step: their order there changes no bit, nor does mma or wgmma, as measured
        // on an H100.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int v = ROW_ORDER ? i : i % 2 * 2, half = ROW_ORDER ? 0 : i / 2,
                      next_v = ROW_ORDER ? i : v + 1, next_half = ROW_ORDER ? 1 : half;
            u32 fragment[4];
            Weights::dequantize(now, scales, v, half, fragment);
            Weights::dequantize(now, scales, next_v, next_half, fragment + 2);
#pragma unroll
            for (int t = 0; t < TILES_M; ++t)
                mma_16x8x16<typename Segment::Activation>(
                    sum[t], fragment, word_of(activations[t][half], v),
                    word_of(activations[t][next_half], next_v));
        }
    }

    // The mainloop of the tile that was prefetched: its partial sums.
    __device__ __forceinline__ void multiply(float* partials) {
        float sum[TILES_PER_WARP][TILES_M][4] = {};
        const i32 rounds = count() >= UNROLL + IN_FLIGHT ? (count() - IN_FLIGHT) / UNROLL : 0,
                  left = count() - UNROLL * rounds;
        for (i32 i = 0; i < rounds; ++i) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) step(sum, u, UNROLL + IN_FLIGHT);
#pragma unroll
            for (int r = 0; r < TILES_PER_WARP; ++r) readers[r].advance(UNROLL);
#pragma unroll
            for (int t = 0; t < TILES_M; ++t) x[t] += 128 * UNROLL;
            k_left -= 64 * UNROLL;
        }
#pragma unroll
        for (int u = 0; u < UNROLL + IN_FLIGHT - 1; ++u)
            if (u < left) step(sum, u, left);
#pragma unroll
        for (int r = 0; r < TILES_PER_WARP; ++r)
#pragma unroll
            for (int t = 0; t < TILES_M; ++t)
                Epilogue::write_partial(partials, sum[r][t], k_warp(),
                                        n_warp() * TILES_PER_WARP + r, 8 * t);
    }
};

}  // namespace
