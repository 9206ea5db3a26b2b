// Readers of weights that are codes of four bits with block scales, from the layout w16x64
// (layouts/ says where each bit lies) and from the linear one. What codes and scales mean, a format
// says, for activations of a type:
//
//     BLOCK, Scale                           columns that share a scale, and the unsigned type of a
//     stored one Outer                                  see reader.cuh TILED_RESCALE,
//     LINEAR_RESCALE          see reader.cuh, for either layout Scales of two rows, r and r + 8 of
//     a tile, ready to multiply by u32 ready(word, byte)                  of two scales that a tile
//     stores from a byte of a word on: one in each half Scales tiled(low, high)                of
//     pairs of these, for rows r and r + 8 Scales linear(low, high)               of what the
//     linear layout stores u32 codes(word, half, i)               the half's pair of columns of row
//     r or r + 8 (i), of a word of a tile bool beside(half, i)                   whether some bits
//     of a pair's column lie in the word's half of the other one u32 weights(codes, scales, i) a
//     pair linear_pair(byte, scales, row_8)       two columns of a row, r or r + 8, of a byte
#pragma once

#include "weights/four_bits_shared.cuh"
#include "weights/reader.cuh"

namespace {

template <class Format>
struct FourBitTiled : Format::Outer, FourBits<Format> {
    static constexpr bool SCALES_FOLLOW = true;
    using Scale = typename Format::Scale;
    static constexpr float RESCALE = Format::TILED_RESCALE;
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
                load_number<2 * sizeof(Scale)>(scales_ + SCALES * blocks_ahead)};
    }

    __device__ __forceinline__ void advance(int blocks) {
        codes_ += ELEMENTS * blocks, scales_ += SCALES * blocks;
    }
    static __device__ __forceinline__ Scales scales(const Packed& packed) {
        return scales_of_rows<Format>(Format::ready(packed.scales, 0));
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales& scales,
                                                      int v, int half, u32* a) {
        weights_of_rows<Format>(word_of(packed.codes, v), scales, half, a);
    }

  private:
    const u8 *codes_, *scales_;
};

// Any N, and K in whole blocks of scales: rows past the last are read as the last, blocks past the
// last as zeros. Block scales lie in an order.
template <class Format, class Order = LinearOrder>
struct FourBitLinear : Format::Outer, FourBits<Format> {
    using Scale = typename Format::Scale;
    static constexpr float RESCALE = Format::LINEAR_RESCALE;
    // bytes from the scales of a K block to those of the next; 0 if they are not always the same
    static constexpr int BLOCK = Format::BLOCK, BLOCKS = 64 / BLOCK,
                         STEP = BLOCKS % Order::COLUMNS == 0
                                    ? BLOCKS / Order::COLUMNS * Order::TILE * sizeof(Scale)
                                    : 0;

    struct Packed {
        uint2 low, high;  // codes of rows r and r + 8
        u32 scale_of_row, scale_of_row_8;
    };
    using Scales = typename Format::Scales;

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block,
                                         i32 lane) {
        FourBits<Format>::template check<Segment>();
        static_assert(Segment::K % BLOCK == 0,
                      "a row of a weight is made of whole blocks of scales");
        const i32 row = first_row + lane / 4, k = 64 * block + 16 * (lane % 4);
        const i64 first = i64(group) * Segment::N;
        const i64 low = (first + min(row, Segment::N - 1)) * Segment::K + k,
                  high = (first + min(row + 8, Segment::N - 1)) * Segment::K + k;
        const u8* scales = reinterpret_cast<const u8*>(s.block_scale);
        codes_[0] = s.codes + low / 2, codes_[1] = s.codes + high / 2;
        if constexpr (IS_LINEAR<Order>) {
            scales_[0] = scales + low / BLOCK * sizeof(Scale),
            scales_[1] = scales + high / BLOCK * sizeof(Scale);
        } else {
            constexpr i32 OF_ROW = Segment::K / BLOCK;
            const i64 of_group = group * Order::size(Segment::N, OF_ROW) +
                                 (STEP > 0 ? Order::of_column(k / BLOCK) : 0);
            scales_[0] = scales + (of_group + Order::of_row(min(row, Segment::N - 1), OF_ROW)) *
                                      sizeof(Scale);
            scales_[1] = scales + (of_group + Order::of_row(min(row + 8, Segment::N - 1), OF_ROW)) *
                                      sizeof(Scale);
            block_ = k / BLOCK;
        }
        left_ = Segment::K - k;
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        if (left_ <= 64 * blocks_ahead) return {};
        const i64 ahead = STEP > 0
                              ? STEP * blocks_ahead
                              : Order::of_column(block_ + BLOCKS * blocks_ahead) * sizeof(Scale);
        return {load_no_allocate_8(codes_[0] + 32 * blocks_ahead),
                load_no_allocate_8(codes_[1] + 32 * blocks_ahead),
                load_number<sizeof(Scale)>(scales_[0] + ahead),
                load_number<sizeof(Scale)>(scales_[1] + ahead)};
    }

    __device__ __forceinline__ void advance(int blocks) {
#pragma unroll
        for (int i = 0; i < 2; ++i) codes_[i] += 32 * blocks, scales_[i] += STEP * blocks;
        left_ -= 64 * blocks;
        if constexpr (STEP == 0) block_ += BLOCKS * blocks;
    }

    static __device__ __forceinline__ Scales scales(const Packed& packed) {
        return Format::linear(packed.scale_of_row, packed.scale_of_row_8);
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales& scales,
                                                      int v, int half, u32* a) {
        a[0] =
            Format::linear_pair((half == 0 ? packed.low.x : packed.low.y) >> 8 * v, scales, false);
        a[1] =
            Format::linear_pair((half == 0 ? packed.high.x : packed.high.y) >> 8 * v, scales, true);
    }

  private:
    const u8 *codes_[2], *scales_[2];
    i32 left_, block_;
};

}  // namespace
