// Which stored tiles of a weight, of 16 rows and 64 columns each, a large-M kernel multiplies by.
// For a K block a consumer warpgroup has four in each repeat, which make 64 columns of the product:
//
//     fprop contracts the weight's columns: a tile for each warp, the rows of which are columns of
//     the product dgrad contracts its rows: a tile for each step of 16 k, of whose 64 columns each
//     warp has 16
//
// Both are described alike, for N tiles of TILES of these:
//
//     ROW_TILES                       tiles in a row of a matrix
//     at(n_tile, t), NEXT_K_BLOCK     tile t of an N tile -> its number in a matrix, in the first K
//     block; how many later the next one's is first_column(n_tile, t)         the first of the
//     product's columns that the warp of tile t has Shared, shared(...)             what makes
//     fragments of a warp's, where a repeat's begin in shared memory Scales(s, group) runs that
//     what is contracted is in: COUNT of them, the i-th K block to take (first_k_block), what
//                                     accumulators are multiplied by after a run (factor), or in
//                                     the end (of_lane)
#pragma once

#include "choose.cuh"
#include "scale_runs.cuh"

namespace {

constexpr int TILES_OF_K_BLOCK = 4;  // of a repeat

// A result's columns are made of tiles, or of repeats, that follow each other. BY_LANE: which
// fragments are made (reader.cuh).
template <class Segment, int TILES, int REPEATS_PER_RESULT, int STAGE_K_BLOCKS, bool BY_LANE>
struct FpropTiles {
    using Reader = typename Segment::Weights;
    using Shared = typename Reader::template Shared<BY_LANE>;
    static constexpr i32 K_BLOCKS = Segment::K / 64, NEXT_K_BLOCK = 1, ROW_TILES = K_BLOCKS;
    static_assert(Segment::N % 16 == 0, "whole tiles");

    // The product's column at which a tile begins, which is its first row. Past the last column:
    // the last block's.
    __device__ static constexpr i32 first_column(i32 n_tile, i32 t) {
        constexpr i32 ALIKE = REPEATS_PER_RESULT > 1 ? TILES_OF_K_BLOCK : 1,
                      LAST = (Segment::WIDTH - 1) / Segment::BLOCK;
        const i32 block = n_tile * (TILES / Segment::BLOCK_TILES) +
                          t / ALIKE / Segment::BLOCK_TILES * ALIKE + t % ALIKE;
        return Segment::first_row(block < LAST ? block : LAST, t / ALIKE % Segment::BLOCK_TILES);
    }

    __device__ static constexpr i32 at(i32 n_tile, i32 t) {
        return first_column(n_tile, t) / 16 * K_BLOCKS;
    }

    static __device__ __forceinline__ Shared shared(u32 of_repeat_elements, u32 of_repeat_scales,
                                                    i32 warp, i32 lane) {
        const i32 tile = warp * STAGE_K_BLOCKS;
        return Shared(of_repeat_elements + tile * Reader::ELEMENTS,
                      of_repeat_scales + tile * Reader::SCALES, lane);
    }

    struct Scales {
        static constexpr i32 COUNT = 1;
        const Segment& s;
        const i32 group;

        __device__ __forceinline__ Scales(const Segment& s, i32 group) : s(s), group(group) {}
        __device__ __forceinline__ i32 first_k_block(i32) const { return 0; }
        __device__ __forceinline__ float factor(i32) const { return 1.f; }
        __device__ __forceinline__ void of_lane(float (&outer)[2], i32 n_tile, i32 t,
                                                i32 lane) const {
            Reader::outer_of_lane(outer, s, group, first_column(n_tile, t), lane);
        }
    };
};

template <class Segment, int TILES, int STAGE_K_BLOCKS>
struct DgradTiles {
    using Reader = typename Segment::Weights;
    using Shared = typename Reader::template Transposed<STAGE_K_BLOCKS>;
    static constexpr i32 ACROSS = Segment::N / 64, NEXT_K_BLOCK = TILES_OF_K_BLOCK * ACROSS,
                         ROW_TILES = ACROSS;
    static_assert(Segment::N % 64 == 0 && Segment::COLUMNS_PER_RESULT == 1 &&
                      Segment::WIDTH == Segment::N,
                  "whole tiles are results");

    // Which of the tiles across. Past the last column: the last one.
    __device__ static constexpr i32 across(i32 n_tile, i32 t) {
        const i32 found = n_tile * (TILES / TILES_OF_K_BLOCK) + t / TILES_OF_K_BLOCK;
        return found < ACROSS ? found : ACROSS - 1;
    }

    __device__ static constexpr i32 at(i32 n_tile, i32 t) {
        return t % TILES_OF_K_BLOCK * ACROSS + across(n_tile, t);
    }

    // The first of the columns that the warp of tile t has.
    __device__ static constexpr i32 first_column(i32 n_tile, i32 t) {
        return across(n_tile, t) * 64 + t % TILES_OF_K_BLOCK * 16;
    }

    static __device__ __forceinline__ Shared shared(u32 of_repeat_elements, u32 of_repeat_scales,
                                                    i32 warp, i32 lane) {
        return Shared(of_repeat_elements, of_repeat_scales, warp, lane);
    }

    struct Scales : ScaleRuns<Segment> {
        static_assert(Scales::COUNT == 1 || Scales::LENGTH % (64 * STAGE_K_BLOCKS) == 0,
                      "a stage is of one run");

        __device__ __forceinline__ Scales(const Segment& s, i32 group)
            : ScaleRuns<Segment>(s, group) {}
        __device__ __forceinline__ i32 first_k_block(i32 i) const { return this->begin(i) / 64; }
        __device__ __forceinline__ void of_lane(float (&outer)[2], i32, i32, i32) const {
            outer[0] = outer[1] = this->scale[Scales::COUNT - 1];
        }
    };
};

template <class Segment, int TILES, int REPEATS_PER_RESULT, int STAGE_K_BLOCKS, bool BY_LANE>
using StoredTiles = Choose<Segment::DGRAD, DgradTiles<Segment, TILES, STAGE_K_BLOCKS>,
                           FpropTiles<Segment, TILES, REPEATS_PER_RESULT, STAGE_K_BLOCKS, BY_LANE>>;

}  // namespace
