// Tiles of codes of four bits in shared memory: where producers copy the codes and their scales,
// and how consumers read them.
//
// A lane copies 16 bytes of codes. The 32 bytes of two lanes that follow each other in memory stay
// together in shared memory: when they were apart, a product took 1.1 to 1.5 times as long, as seen
// on an H200.
#pragma once

#include "mma.cuh"
#include "pipeline.cuh"
#include "weights/reader.cuh"

namespace {

// The assumptions of four-bit readers about a format and about the encoding of a segment's weight.
template <class Format>
struct FourBits {
    static constexpr int BLOCK = Format::BLOCK, EACH = sizeof(typename Format::Scale);
    static_assert(BLOCK == 16 || BLOCK == 32 || BLOCK == 64,
                  "block scales of four-bit codes cover 16, 32 or 64 columns: a lane's 16 columns "
                  "share one, and a tile of 64 has whole blocks");
    static_assert(EACH == 1 || EACH == 2, "block scales of four-bit codes have one byte or two");

    template <class Segment>
    static __device__ __forceinline__ constexpr void check() {
        static_assert(Segment::CODE_BITS == 4 && Segment::SCALE_BLOCK == BLOCK &&
                          Segment::SCALE_BYTES == EACH,
                      "the encoding in fusion_moe/encodings has codes and block scales of other "
                      "sizes than its reader in kernels/weights");
    }
};

// What a lane has of a tile.
struct TiledCodes {
    uint4 codes;
    u32 scales;  // two as they are stored: of rows r and r + 8
};

// The scales of rows r and r + 8, each in both halves of a word.
struct PairOfScales {
    u32 low, high;
};

// The scales of rows r and r + 8, from a word with one in each half.
template <class Format>
__device__ __forceinline__ typename Format::Scales scales_of_rows(u32 ready) {
    u32 low, high;
    halves_twice(low, high, ready);
    return Format::tiled(low, high);
}

// A pair of columns in one half, for rows r and r + 8.
template <class Format>
__device__ __forceinline__ void weights_of_rows(u32 word, const typename Format::Scales& scales,
                                                int half, u32* a) {
#pragma unroll
    for (int i = 0; i < 2; ++i) a[i] = Format::weights(Format::codes(word, half, i), scales, i);
}

// The byte offset of a lane's two scales among the scales of a tile.
template <class Format>
__device__ __forceinline__ constexpr i32 scales_of_lane(i32 lane) {
    constexpr i32 BLOCK = Format::BLOCK, BYTES = sizeof(typename Format::Scale);
    return BYTES * (BLOCK == 16 ? 2 * lane : lane / 4 * (128 / BLOCK) + lane % 4 * 16 / BLOCK * 2);
}

// A tile in shared memory, of which lane 4 r + c needs the codes of columns from 16 c on of rows r
// and r + 8; or, BY_STEP, of each of four blocks of 16 columns those of word c: a matrix of 8 rows
// of 16 bytes, which ldmatrix loads. No two of four rows share a bank.
template <bool BY_STEP>
struct SharedNibbles {
    static __device__ __forceinline__ i32 swizzled_lane(i32 lane) {
        return 16 * (BY_STEP ? lane ^ lane / 8 % 2 * 2 : lane);
    }
    // Where a lane reads.
    static __device__ __forceinline__ i32 place(i32 lane) {
        return swizzled_lane(BY_STEP ? lane % 8 * 4 + lane / 8 : lane);
    }

    static __device__ __forceinline__ void read(u32 (&words)[4], const u8* at) {
        if constexpr (!BY_STEP) {
            const uint4 all = *reinterpret_cast<const uint4*>(at);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else {
            load_matrices(words, shared_address(at));
        }
    }
};

// If activations are in fragment order, a lane needs codes of one block of scales; else step v
// multiplies by block v of 16 columns, and a lane has the scales of all.
template <class Format, bool FRAGMENT_ORDER>
struct FourBitShared {
    using Codes = SharedNibbles<!FRAGMENT_ORDER>;
    static constexpr int BLOCK = Format::BLOCK, EACH = sizeof(typename Format::Scale),
                         BYTES = FRAGMENT_ORDER ? 2 * EACH : 128 / BLOCK * EACH,
                         WORDS = (BYTES + 3) / 4;  // of scales of rows r and r + 8
    static_assert(FRAGMENT_ORDER || BYTES % 4 == 0,
                  "a tile's block scales of rows r and r + 8 fill whole words");

    struct Packed {
        u32 codes[4];
        Vector<u32, WORDS> scales;  // of each block, of row r, then of row r + 8
    };
    u32 codes, scales;  // the offsets of a lane's codes and scales among those of all tiles

    __device__ __forceinline__ FourBitShared(u32 first_code, u32 first_scale, i32 lane)
        : codes(first_code + Codes::place(lane)),
          scales(first_scale + (FRAGMENT_ORDER ? scales_of_lane<Format>(lane) : lane / 4 * BYTES)) {
        asm volatile("" : "+r"(codes), "+r"(scales));  // kept, not computed again
    }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) {
        return Codes::swizzled_lane(lane);
    }

    __device__ __forceinline__ Packed load(const u8* all_codes, const u8* all_scales) const {
        Packed packed;
        Codes::read(packed.codes, all_codes + codes);
        if constexpr (BYTES % 4 == 0)
            packed.scales = load_vector<WORDS>(reinterpret_cast<const u32*>(all_scales + scales));
        else
            packed.scales = {read_shared<BYTES>(all_scales + scales)};
        return packed;
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, int v, u32 (&a)[4]) {
        const int byte = FRAGMENT_ORDER ? 0 : 16 * v / BLOCK * 2 * EACH;
        const auto scales =
            scales_of_rows<Format>(Format::ready(packed.scales.at[byte / 4], byte % 4));
        weights_of_rows<Format>(packed.codes[v], scales, 0, a);
        weights_of_rows<Format>(packed.codes[v], scales, 1, a + 2);
    }
};

// Gives lane 4 r + c the number of lane 4 from + c.
__device__ __forceinline__ u32 of_quarter(u32 x, int from) {
    constexpr int SAME_C = 0x031F;
    u32 found;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, 0xFFFFFFFF;"
                 : "=r"(found)
                 : "r"(x), "r"(4 * from), "n"(SAME_C));
    return found;
}

// A dgrad contracts a tile's 16 rows: four tiles, each APART tiles after the one before, are the
// steps of a K block. Warp w of four multiplies by block w of their columns. Lane 4 r + c loads
// word c of row r of each tile. The halves of words, which are columns, are transposed, so that it
// has codes of rows 2 c and 2 c + 1, and of the rows 8 further on. Lane 4 (2 v + i) + c makes the
// scales of step v, and all lanes with the same c get them.
template <class Format, int APART>
struct FourBitTransposed {
    static constexpr int BLOCK = Format::BLOCK, EACH = sizeof(typename Format::Scale),
                         SCALES = 1024 / BLOCK * EACH, NEXT_ROW = SCALES / 8;

    struct Packed {
        u32 codes[4];  // of each step
        u32 scales;    // two, of one step
    };
    u32 codes, scales;

    __device__ __forceinline__ FourBitTransposed(u32 first_code, u32 first_scale, i32 warp,
                                                 i32 lane)
        : codes(first_code + lane / 8 * (APART * RUN) + swizzled_lane(lane % 8 * 4 + warp, 0)),
          scales(first_scale + lane / 8 * (APART * SCALES) + lane % 4 * (2 * NEXT_ROW) +
                 (warp * 16 / BLOCK * 2 + lane / 4 % 2) * EACH) {
        asm volatile("" : "+r"(codes), "+r"(scales));
    }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) {
        return FourBitShared<Format, false>::swizzled_lane(lane, run);
    }

    __device__ __forceinline__ Packed load(const u8* all_codes, const u8* all_scales) const {
        using Scale = typename Format::Scale;
        Packed packed;
        load_matrices(packed.codes, shared_address(all_codes + codes));
        const u32 first = *reinterpret_cast<const Scale*>(all_scales + scales);
        packed.scales = first | u32(*reinterpret_cast<const Scale*>(all_scales + scales + NEXT_ROW))
                                    << 8 * EACH;
        return packed;
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, int v, u32 (&a)[4]) {
        const u32 ready = Format::ready(packed.scales, 0), word = transposed(packed.codes[v]);
        const auto scales = Format::tiled(of_quarter(ready, 2 * v), of_quarter(ready, 2 * v + 1));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 pair = Format::beside(half, i)
                                     ? transposed(Format::codes(packed.codes[v], half, i))
                                     : Format::codes(word, half, i);
                a[half + 2 * i] = Format::weights(pair, scales, i);
            }
    }
};

}  // namespace
