// Readers of weights that are codes of e2m1 with block scales, from the layout w16x64 (layouts/ says where each bit lies) and from the
// linear one.
//
// A code's two exponent bits and its mantissa bit, put where a number of 16 bits has the lowest of its own exponent and the highest of its
// mantissa, are the code's value times a power of two, 2^-126 in bfloat16 and 2^-14 in float16: subnormal codes become subnormal numbers.
// Multiplied by the block scale, times a large power of two, they are the weight; both factors have few bits, so the product is exact.
//
// What the bytes of block scales mean, an encoding says (Scales, for the activations' type T):
//
//     BLOCK                                 columns that share one
//     tiled(byte), linear(byte)             a pair of the scale, as either layout stores it, times a power of two
//     multiply(codes, scale)                a pair of weights over a power of two, TILED_RESCALE or LINEAR_RESCALE
#pragma once

#include "weights/e2m1_shared.cuh"
#include "weights/reader.cuh"

namespace {

template <class T, class Scales_>
struct E2m1Tiled : Scales_::Outer {
    static constexpr float RESCALE = Scales_::TILED_RESCALE;
    static constexpr int ELEMENTS = RUN, SCALES = 1024 / Scales_::BLOCK;

    template <bool FRAGMENT_ORDER>
    using Shared = E2m1Shared<T, Scales_, FRAGMENT_ORDER>;

    using Packed = TiledCodes;
    using Scales = PairOfScales;

    template <class Segment>
    static __device__ __forceinline__ const u8* elements(const Segment& s) {
        return s.codes;
    }

    template <class Segment>
    static __device__ __forceinline__ const u8* scales(const Segment& s) {
        return s.block_scale;
    }

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block, i32 lane) {
        const i64 tile = tile_number<Segment>(group, first_row, block);
        codes_ = s.codes + tile * ELEMENTS + lane * 16, scales_ = s.block_scale + tile * SCALES + scales_of_lane<Scales_>(lane);
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        return {load_no_allocate(codes_ + ELEMENTS * blocks_ahead), load_no_allocate_2(scales_ + SCALES * blocks_ahead)};
    }

    __device__ __forceinline__ void advance(int blocks) { codes_ += ELEMENTS * blocks, scales_ += SCALES * blocks; }

    static __device__ __forceinline__ Scales scales(const Packed& packed) { return tiled_scales<Scales_>(packed); }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales& scales, int v, int half, u32* a) {
        dequantize_half<T, Scales_>(word(packed, v), scales, half, a);
    }

private:
    const u8 *codes_, *scales_;
};

// Any N, and K in whole blocks of scales: rows past the last are read as the last, blocks past the last as zeros.
template <class T, class Scales_>
struct E2m1Linear : Scales_::Outer {
    static constexpr float RESCALE = Scales_::LINEAR_RESCALE;
    static constexpr int BLOCK = Scales_::BLOCK;

    struct Packed {
        uint2 low, high;  // codes of rows r and r + 8
        u32 scale_of_row, scale_of_row_8;
    };
    using Scales = PairOfScales;

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block, i32 lane) {
        const i32 row = first_row + lane / 4, k = 64 * block + 16 * (lane % 4);
        const i64 first = i64(group) * Segment::N;
        const i64 low = (first + min(row, Segment::N - 1)) * Segment::K + k, high = (first + min(row + 8, Segment::N - 1)) * Segment::K + k;
        codes_[0] = s.codes + low / 2, codes_[1] = s.codes + high / 2;
        scales_[0] = s.block_scale + low / BLOCK, scales_[1] = s.block_scale + high / BLOCK;
        left_ = Segment::K - k;
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        if (left_ <= 64 * blocks_ahead) return {};
        return {load_no_allocate_8(codes_[0] + 32 * blocks_ahead), load_no_allocate_8(codes_[1] + 32 * blocks_ahead),
                load_no_allocate_1(scales_[0] + 64 / BLOCK * blocks_ahead), load_no_allocate_1(scales_[1] + 64 / BLOCK * blocks_ahead)};
    }

    __device__ __forceinline__ void advance(int blocks) {
#pragma unroll
        for (int i = 0; i < 2; ++i) codes_[i] += 32 * blocks, scales_[i] += 64 / BLOCK * blocks;
        left_ -= 64 * blocks;
    }

    static __device__ __forceinline__ Scales scales(const Packed& packed) {
        return {Scales_::linear(packed.scale_of_row), Scales_::linear(packed.scale_of_row_8)};
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales& scales, int v, int half, u32* a) {
        a[0] = Scales_::multiply(codes_of_byte<T>((half == 0 ? packed.low.x : packed.low.y) >> 8 * v), scales.low);
        a[1] = Scales_::multiply(codes_of_byte<T>((half == 0 ? packed.high.x : packed.high.y) >> 8 * v), scales.high);
    }

private:
    const u8 *codes_[2], *scales_[2];
    i32 left_;
};

}  // namespace
