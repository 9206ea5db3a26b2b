// Weights of four bits in another layout become tiles (layouts/w16x64.py). A segment's struct says
// how:
//
//     StoredElements, StoredScales   where they lie (weights/reader.cuh): pieces of 16 codes;
//     scales stored_codes, scales_from()  these codes_to(), scales_to()           what is made
//     tile_words(low, high)          16 bytes of a tile, of 16 codes each of rows r and r + 8
//     TILE_SCALES                    scales of a row of a tile
#pragma once

#include "weights/reader.cuh"

namespace {

// A lane's part of COUNT tiles that follow each other in a row of tiles: lane 4 r + c has columns
// 16 c to 16 c + 15 of rows r and r + 8, lane TILE_SCALES r + b the scales of their block b.
template <class Segment, int COUNT>
struct TilesOfLane {
    static constexpr i32 N = Segment::N, K = Segment::K, EACH = Segment::TILE_SCALES,
                         K_BLOCKS = K / 64;
    using Elements = typename Segment::StoredElements;
    using Scales = typename Segment::StoredScales;
    const Segment& s;
    i32 group, row, block, lane;  // the first row and K block of the tiles
    uint2 low[COUNT], high[COUNT];
    u8 scale[COUNT][2];

    __device__ __forceinline__ TilesOfLane(const Segment& s, i32 group, i32 row, i32 block,
                                           i32 lane)
        : s(s), group(group), row(row), block(block), lane(lane) {}

    __device__ __forceinline__ bool there(int t) const { return block + t < K_BLOCKS; }
    __device__ __forceinline__ bool has_scales() const { return lane < 8 * EACH; }

    __device__ __forceinline__ void load() {
        const u8 *codes = s.codes_from() + group * Elements::size(N, K / 16) * 8,
                 *scales = s.scales_from() + group * Scales::size(N, K_BLOCKS * EACH);
        const i32 r = row + lane / 4, of_scale = row + lane / EACH;
#pragma unroll
        for (int t = 0; t < COUNT; ++t) {
            if (!there(t)) continue;
            const i64 piece = Elements::of_column((block + t) * 4 + lane % 4);
            low[t] = load_pair(codes + (Elements::of_row(r, K / 16) + piece) * 8);
            high[t] = load_pair(codes + (Elements::of_row(r + 8, K / 16) + piece) * 8);
            if (!has_scales()) continue;
            const i64 b = Scales::of_column((block + t) * EACH + lane % EACH);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                scale[t][i] = scales[Scales::of_row(of_scale + 8 * i, K_BLOCKS * EACH) + b];
        }
    }

    // recoded: what a tile stores for each byte of a scale.
    template <class Recoded>
    __device__ __forceinline__ void store(Recoded recoded) const {
        const i64 tile = (i64(group) * (N / 16) + row / 16) * K_BLOCKS + block;
#pragma unroll
        for (int t = 0; t < COUNT; ++t) {
            if (!there(t)) continue;
            const uint4 words = Segment::tile_words(low[t], high[t]);
            *reinterpret_cast<uint4*>(s.codes_to() + (tile + t) * RUN + lane * 16) = words;
            if (!has_scales()) continue;
            u8* scales = s.scales_to() + (tile + t) * (16 * EACH) + 2 * lane;
            *reinterpret_cast<u16*>(scales) = u16(recoded(scale[t][0]) | recoded(scale[t][1]) << 8);
        }
    }

  private:
    static __device__ __forceinline__ uint2 load_pair(const u8* p) {
        return *reinterpret_cast<const uint2*>(p);
    }
};

}  // namespace
