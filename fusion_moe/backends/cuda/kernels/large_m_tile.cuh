// What large-M kernels with wgmma (large_m.cuh) and without it (large_mma.cuh) share: the parts of
// a work tile, how its weights and activations are copied to a stage, and its epilogue.
#pragma once

#include "added.cuh"
#include "epilogue_transpose.cuh"
#include "fragment_order.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"
#include "stored_tiles.cuh"
#include "swizzle.cuh"

namespace {

// The weights of one stage for one repeat of a consumer warpgroup: TILES tiles in each of
// STAGE_K_BLOCKS K blocks.
template <int TILES, int STAGE_K_BLOCKS, int ELEMENTS, int SCALES>
struct SharedTiles {
    u8 elements[TILES][STAGE_K_BLOCKS][ELEMENTS], scales[TILES][STAGE_K_BLOCKS][SCALES];

    __device__ __forceinline__ const u8* first_scales(int b) const { return scales[0][b]; }
};

template <int TILES, int STAGE_K_BLOCKS, int ELEMENTS>
struct SharedTiles<TILES, STAGE_K_BLOCKS, ELEMENTS, 0> {
    u8 elements[TILES][STAGE_K_BLOCKS][ELEMENTS];

    __device__ __forceinline__ const u8* first_scales(int) const { return nullptr; }
};

// T, with as many bytes as a result needs that is transposed in its place: a stage of 8-bit codes
// has fewer.
template <class T, int BYTES, bool IS_SMALL = (sizeof(T) < BYTES)>
struct AtLeast : T {};

template <class T, int BYTES>
struct AtLeast<T, BYTES, true> : T {
    u8 padding[BYTES - sizeof(T)];
};

// CONSUMERS warpgroups multiply REPEATS times 64 rows of the matrix each, by up to TILE_M rows of a
// group. COPIERS threads copy a stage of STAGE_K_BLOCKS. BY_LANE: whether a lane's 16 columns of a
// tile are those that follow each other in the activations, or in fragment order (reader.cuh).
// TRANSPOSES: whether results are transposed where a consumer's weights were.
template <class Segment, int TILE_M, int CONSUMERS, int REPEATS, int STAGE_K_BLOCKS, int COPIERS,
          bool BY_LANE, bool TRANSPOSES>
struct LargeMTile {
    static constexpr int WARPGROUP = 128, WARPGROUP_WARPS = 4, COPYING_WARPS = COPIERS / 32;
    static constexpr int WEIGHT_TILES = TILES_OF_K_BLOCK * CONSUMERS * REPEATS;  // in a K block
    static constexpr int TILE_N =
        Segment::BLOCK * WEIGHT_TILES / Segment::BLOCK_TILES;  // columns of the result
    static constexpr int N_TILES = (Segment::WIDTH + TILE_N - 1) / TILE_N, K_STEPS = 4;
    static constexpr int ALL_K_BLOCKS = Segment::K / 64;  // of the matrix
    using Reader = typename Segment::Weights;
    using Columns = typename Segment::Columns;
    static constexpr int ELEMENTS = Reader::ELEMENTS,
                         SCALES = Reader::SCALES;  // bytes of a tile of 16 rows and 64 k
    using Transpose = EpilogueTranspose<Segment, REPEATS>;
    static constexpr int REPEATS_PER_RESULT =
        Transpose::REPEATS;  // that a result's columns are made of
    using Tiles = StoredTiles<Segment, WEIGHT_TILES, REPEATS_PER_RESULT, STAGE_K_BLOCKS, BY_LANE>;
    using SharedWeights = typename Tiles::Shared;
    using Packed = typename SharedWeights::Packed;
    using Scales = typename Tiles::Scales;
    static constexpr int EPILOGUE_ROWS =
        Transpose::EPILOGUE_ROWS;  // that a consumer transposes at a time, in one of the buffers
    using RepeatWeights = AtLeast<SharedTiles<TILES_OF_K_BLOCK, STAGE_K_BLOCKS, ELEMENTS, SCALES>,
                                  TRANSPOSES ? Transpose::BUFFER_BYTES : 0>;
    static_assert(WARPGROUP_WARPS % Segment::BLOCK_TILES == 0,
                  "a consumer's tiles make whole columns");
    static_assert(CONSUMERS <= ConsumerTile<Segment, REPEATS_PER_RESULT>::MAX_CONSUMERS);
    static_assert(COPYING_WARPS % WARPGROUP_WARPS == 0,
                  "a warp copies the same tiles of every repeat");
    static_assert(Segment::K % 64 == 0, "weights are tiled");
    static_assert(!Columns::FRAGMENT_ORDER || Segment::WIDTH % 64 == 0,
                  "fragment order is of whole K blocks");

    // Whether every step-th tile lies at the same distance from the first in every N tile.
    __device__ static constexpr bool equally_spaced(i32 step) {
        for (i32 block = 0; block < N_TILES; ++block)
            for (i32 t = 0; t < WEIGHT_TILES; ++t)
                if (Tiles::at(block, t) - Tiles::at(block, t % step) !=
                    Tiles::at(0, t / step * step) - Tiles::at(0, 0))
                    return false;
        return true;
    }

    __device__ static constexpr int power_of_two(int n) {
        int found = n > 0;
        while (found < n) found *= 2;
        return found;
    }

    // Copies
    // ---------------------------------------------------------------------------------------------

    // The weights of a work tile. A warp copies the elements of every COPYING_WARPS-th tile; a
    // thread copies 16 bytes of the scales of every TILES_PER_STEP-th tile.
    struct Weights {
        static_assert(i64(Segment::N) * Segment::K / 1024 * ELEMENTS < 1ll << 31,
                      "offsets in a matrix");
        static constexpr int TILES_PER_WARP = WEIGHT_TILES / COPYING_WARPS, RUNS = ELEMENTS / RUN;
        static constexpr int BLOCK_PIECES = SCALES / 16,
                             PIECES = power_of_two(
                                 STAGE_K_BLOCKS *
                                 BLOCK_PIECES);  // of the scales of a tile; of a stage's
        static constexpr int TILES_PER_STEP = PIECES > 0 ? COPIERS / PIECES : WARPGROUP_WARPS;
        static constexpr int SCALE_STEPS =
            PIECES > 0 ? (WEIGHT_TILES + TILES_PER_STEP - 1) / TILES_PER_STEP : 0;
        static_assert(TILES_PER_STEP % WARPGROUP_WARPS == 0, "whole repeats in a step");
        static constexpr bool EQUALLY_SPACED =
            equally_spaced(COPYING_WARPS) && equally_spaced(TILES_PER_STEP);
        const u8 *elements,
            *scales;  // of the work tile's matrix; if tiles are equally spaced, the thread's first;
                      // if scales do not follow each other, of the thread's piece of the first tile
        i32 element[TILES_PER_WARP],
            scale[SCALE_STEPS > 0 ? SCALE_STEPS : 1];  // offsets, if they are not

        __device__ __forceinline__ void open(const Segment& s, const WorkTile& work_tile,
                                             i32 thread) {
            const i64 tiles = i64(work_tile.m_tile.group) * (Segment::N / 16) * ALL_K_BLOCKS;
            elements = Reader::elements(s) + tiles * ELEMENTS;
#pragma unroll
            for (int i = 0; i < TILES_PER_WARP; ++i)
                element[i] =
                    Tiles::at(work_tile.n_tile, thread / 32 + COPYING_WARPS * i) * ELEMENTS +
                    thread % 32 * 16;
            if constexpr (SCALES > 0) {
                const i32 piece = thread % PIECES;
                open_scales(s, tiles, piece % BLOCK_PIECES);
#pragma unroll
                for (int i = 0; i < SCALE_STEPS; ++i) {
                    const i32 tile =
                        Tiles::at(work_tile.n_tile,
                                  min(thread / PIECES + TILES_PER_STEP * i, WEIGHT_TILES - 1));
                    const i32 of_piece = tile + piece / BLOCK_PIECES * Tiles::NEXT_K_BLOCK;
                    scale[i] = Reader::SCALES_FOLLOW ? of_piece * SCALES + piece % BLOCK_PIECES * 16
                                                     : i32(tiles) + of_piece;
                }
            }
            if (EQUALLY_SPACED)
                elements += element[0],
                    scales += SCALE_STEPS > 0 && Reader::SCALES_FOLLOW ? scale[0] : 0;
        }

        __device__ static constexpr i32 after_first(int t) {
            return Tiles::at(0, t) - Tiles::at(0, 0);
        }
        __device__ __forceinline__ i32 element_at(int i) const {
            return EQUALLY_SPACED ? after_first(COPYING_WARPS * i) * ELEMENTS : element[i];
        }
        __device__ __forceinline__ i32 scale_at(int i) const {
            return EQUALLY_SPACED ? after_first(TILES_PER_STEP * i) * SCALES : scale[i];
        }
        __device__ __forceinline__ i32 tile_at(int i) const {
            return EQUALLY_SPACED ? scale[0] + after_first(TILES_PER_STEP * i) : scale[i];
        }

        // Copies K blocks to a stage, from the kb-th after the first on. good: if any.
        template <int Blocks, class... If>
        __device__ __forceinline__ void copy(RepeatWeights* to, i32 thread, int kb,
                                             If... good) const {
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
                const i32 repeat = COPYING_WARPS == 4 ? 0 : thread / 128, warp = thread / 32;
                const u32 first_element = shared_address(to[repeat].elements[warp - 4 * repeat]);
                const u32 element_place =
                    first_element + SharedWeights::swizzled_lane(thread % 32, run);
#pragma unroll
                for (int i = 0; i < TILES_PER_WARP; ++i) {
                    const int tile = COPYING_WARPS * i;
                    const int repeat_place = tile / WARPGROUP_WARPS * sizeof(RepeatWeights);
                    const int place = repeat_place +
                                      tile % WARPGROUP_WARPS * STAGE_K_BLOCKS * ELEMENTS +
                                      run * RUN;
#pragma unroll
                    for (int b = 0; b < Blocks; ++b)
                        cp_async_16(element_place + place + b * ELEMENTS,
                                    elements + element_at(i) +
                                        (kb + b) * Tiles::NEXT_K_BLOCK * ELEMENTS + run * RUN,
                                    good...);
                }
            }
            if constexpr (SCALES > 0) copy_scales<Blocks>(to, thread, kb, good...);
        }

        __device__ __forceinline__ void advance(i32 blocks) {
            elements += blocks * (Tiles::NEXT_K_BLOCK * ELEMENTS);
            if constexpr (Reader::SCALES_FOLLOW)
                scales += blocks * (Tiles::NEXT_K_BLOCK * SCALES);
            else
                for (i32& tile : scale) tile += blocks * Tiles::NEXT_K_BLOCK;
        }

      private:
        __device__ __forceinline__ void open_scales(const Segment& s, i64 tiles, i32 piece) {
            if constexpr (Reader::SCALES_FOLLOW) {
                scales = Reader::scales(s) + tiles * SCALES;
            } else {
                asm volatile("" : "+r"(piece));  // else all parts' pointers are kept, and spilled
                scales = Reader::first_piece(s, piece);
            }
        }

        __device__ __forceinline__ const u8* scale_piece(int i, int kb, i32 piece) const {
            if constexpr (Reader::SCALES_FOLLOW)
                return scales + scale_at(i) + kb * Tiles::NEXT_K_BLOCK * SCALES;
            else
                return scales + i64(Reader::piece_of_tile(piece, Tiles::ROW_TILES,
                                                          tile_at(i) + kb * Tiles::NEXT_K_BLOCK)) *
                                    Reader::pieces_apart(piece);
        }

        template <int Blocks, class... If>
        __device__ __forceinline__ void copy_scales(RepeatWeights* to, i32 thread, int kb,
                                                    If... good) const {
            const i32 tile = thread / PIECES, piece = thread % PIECES;
            const u32 scale_place =
                shared_address(to[tile / WARPGROUP_WARPS].scales[tile % WARPGROUP_WARPS]) +
                piece * 16;
#pragma unroll
            for (int i = 0; i < SCALE_STEPS; ++i)
                cp_async_16(
                    scale_place + TILES_PER_STEP / WARPGROUP_WARPS * i * sizeof(RepeatWeights),
                    scale_piece(i, kb, piece % BLOCK_PIECES),
                    (good && ... && (tile + TILES_PER_STEP * i < WEIGHT_TILES)) &&
                        piece < Blocks * BLOCK_PIECES);
        }
    };

    // Which of the block's repeats a consumer's repeat h is, and which of its tiles a warp has
    // there.
    __device__ static __forceinline__ i32 repeat_of(int h) {
        return (CONSUMERS == 1 ? 0 : threadIdx.x / WARPGROUP) * REPEATS + h;
    }
    __device__ static __forceinline__ i32 weight_tile_of(int h) {
        return repeat_of(h) * WARPGROUP_WARPS + threadIdx.x / 32 % WARPGROUP_WARPS;
    }

    // Rescales the sums of one run of contracted rows before the next run: see ScaleRuns.
    template <int HEIGHT>
    __device__ static __forceinline__ void rescale(float (&sum)[REPEATS][TILE_M / 2],
                                                   float factor) {
#pragma unroll
        for (int h = 0; h < REPEATS; ++h)
#pragma unroll
            for (int i = 0; i < HEIGHT / 2; ++i) sum[h][i] *= factor;
    }

    // Epilogue
    // ---------------------------------------------------------------------------------------------

    // Stores the results that are made of the repeats from h on. mainloop.epilogue_buffer(i):
    // where the consumer may write Transpose::BUFFER_BYTES, i < BUFFERS.
    template <int BUFFERS, class Mainloop>
    __device__ static __forceinline__ void store(float (*sum)[TILE_M / 2], const float (*outer)[2],
                                                 const Segment& s, const Mainloop& mainloop,
                                                 const WorkTile& work_tile, int h) {
        const i32 column =
            work_tile.n_tile * TILE_N + repeat_of(h) / REPEATS_PER_RESULT * Transpose::COLUMNS;
        ConsumerTile<Segment, REPEATS_PER_RESULT>::sync();  // all have read their weights
        ConsumerTile<Segment, REPEATS_PER_RESULT> tile{s, work_tile, column};
#pragma unroll
        for (int i = 0; i < REPEATS_PER_RESULT; ++i)
#pragma unroll
            for (int upper = 0; upper < 2; ++upper)
                tile.factor[i][upper] = Reader::RESCALE * outer[i][upper];
        if constexpr (Segment::ADDED > 0) add(sum, tile, h);
        const Transpose transpose(tile);
        transpose.write(mainloop.epilogue_buffer(0), sum, 0);
        store_rows<BUFFERS, 0>(sum, mainloop, tile, transpose);
    }

    // The same from row ROW on: a recursion, since compilers unroll a long body only so often, and
    // a loop that is left would keep accumulators in local memory.
    template <int BUFFERS, int ROW, class Mainloop>
    __device__ static __forceinline__ void store_rows(
        float (*sum)[TILE_M / 2], const Mainloop& mainloop,
        const ConsumerTile<Segment, REPEATS_PER_RESULT>& tile, const Transpose& transpose) {
        constexpr int NEXT = ROW + EPILOGUE_ROWS;
        if (ROW >= tile.work_tile.tile_m) return;
        tile.sync();
        const auto rows = transpose.load(mainloop.epilogue_buffer(ROW / EPILOGUE_ROWS % BUFFERS));
        if (BUFFERS == 1) tile.sync();
        if constexpr (NEXT < TILE_M)
            transpose.write(mainloop.epilogue_buffer(NEXT / EPILOGUE_ROWS % BUFFERS), sum, NEXT);
        transpose.store(rows, ROW);
        if constexpr (NEXT < TILE_M) store_rows<BUFFERS, NEXT>(sum, mainloop, tile, transpose);
    }

    // Adds the added (LoRA) product to the accumulators of the repeats from h on, after these have
    // been multiplied by their factors.
    __device__ static __forceinline__ void add(float (*sum)[TILE_M / 2],
                                               ConsumerTile<Segment, REPEATS_PER_RESULT>& tile,
                                               int h) {
        using Added = AddedProduct<Segment>;
        const WorkTile& work_tile = tile.work_tile;
        const i32 row = threadIdx.x % 32 / 4, first = work_tile.m_tile.first + row;
#pragma unroll
        for (int i = 0; i < REPEATS_PER_RESULT; ++i) {
#pragma unroll
            for (int a = 0; a < TILE_M / 2; ++a) sum[i][a] *= tile.factor[i][a % 4 / 2];
            tile.factor[i][0] = tile.factor[i][1] = 1;
            const auto columns = Added::columns(tile.s, work_tile.m_tile.group);
            const i32 column = Tiles::first_column(work_tile.n_tile, weight_tile_of(h + i)) + row;
            const auto rows = [&](int t, int k) {
                return Added::rows(tile.s).four(min(first + 8 * t, work_tile.m_tile.end - 1), k);
            };
            Added::template add<TILE_M / 8>(
                sum[i], [&](int k) { return columns.four(column, k); },
                [&](int k) { return columns.four(column + 8, k); }, rows, work_tile.tile_m / 8);
        }
    }

    // Stores the results of rows that belong to no group. thread: of those of the consumers.
    __device__ static __forceinline__ void store_ungrouped_rows(const Segment& s,
                                                                const WorkTile& work_tile,
                                                                u32 thread) {
        constexpr int V = 8;
        const i32 pieces = (work_tile.m_tile.end - work_tile.m_tile.first) * (TILE_N / V);
        for (i32 first = thread / 32 * 32; first < pieces; first += WARPGROUP * CONSUMERS) {
            const i32 i = first + threadIdx.x % 32, m = work_tile.m_tile.first + i / (TILE_N / V);
            const float zero[Segment::COLUMNS_PER_RESULT][V] = {};
            const RowMajor at{work_tile.n_tile * TILE_N + i % (TILE_N / V) * V};
            if constexpr (Segment::RESULTS == 0)
                store_row<64 / V>(s, m, Segment::GROUPS, at.j, i < pieces, zero);
            else if (i < pieces)
                store_columns<V>(s, m, Segment::GROUPS, at, zero);
        }
    }
};

}  // namespace
