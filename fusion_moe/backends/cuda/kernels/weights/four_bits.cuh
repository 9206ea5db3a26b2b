// Readers of weights in tiles (w16x64) that are codes of four bits with block scales; layouts/ says
// where each bit lies. In linear order such weights are read as their descriptors say
// (derived.cuh). A format says what codes and scales mean, for activations of a type:
//
//     BLOCK, Scale              the columns that share a scale, and the unsigned type of a stored
//                               scale
//     Outer, RESCALE            see reader.cuh
//     Scales                    of two rows, r and r + 8 of a tile, ready to multiply by
//     u32 ready(word, byte)     the two scales that a tile stores from a byte of a word on: one in
//                               each half
//     Scales tiled(low, high)   the scales of rows r and r + 8, of pairs of these
//     u32 codes(word, half, i)  a pair of columns: the half's, of row r or r + 8 (i), of a word of
//                               a tile
//     bool beside(half, i)      whether some bits of a pair's columns lie in the other half of the
//                               word
//     u32 weights(codes, scales, i)  the weights of a pair
#pragma once

#include "weights/four_bits_shared.cuh"
#include "weights/reader.cuh"

namespace {

template <class Format>
struct FourBitTiled : Format::Outer, FourBits<Format> {
    static constexpr bool SCALES_FOLLOW = true;
    using Scale = typename Format::Scale;
    static constexpr float RESCALE = Format::RESCALE;
    static constexpr int ELEMENTS = RUN, SCALES = 1024 / Format::BLOCK * sizeof(Scale);

    template <bool FRAGMENT_ORDER>
    using Shared = FourBitShared<Format, FRAGMENT_ORDER>;
    template <int APART>
    using Transposed = FourBitTransposed<Format, APART>;

    using Packed = TiledCodes;
    using Scales = typename Format::Scales;

    template <class Segment>
    static __device__ __forceinline__ const u8* elements(const Segment& s) {
        FourBits<Format>::template check<Segment>();
        return s.codes;
    }

    template <class Segment>
    static __device__ __forceinline__ const u8* scales(const Segment& s) {
        return reinterpret_cast<const u8*>(s.block_scale);
    }

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block,
                                         i32 lane) {
        const i64 tile = tile_number<Segment>(group, first_row, block);
        codes_ = elements(s) + tile * ELEMENTS + lane * 16,
        scales_ = scales(s) + tile * SCALES + scales_of_lane<Format>(lane);
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        return {load_no_allocate(codes_ + ELEMENTS * blocks_ahead),
                load_two_scales<Scale>(scales_ + SCALES * blocks_ahead)};
    }

    __device__ __forceinline__ void advance(int blocks) {
        codes_ += ELEMENTS * blocks, scales_ += SCALES * blocks;
    }
    static __device__ __forceinline__ Scales scales(const Packed& packed) {
        return scales_of_rows<Format>(Format::ready(packed.scales, 0));
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales& scales,
                                                      int v, int half, u32* a) {
        weights_of_rows<Format>(word(packed, v), scales, half, a);
    }

  private:
    const u8 *codes_, *scales_;
};

}  // namespace
