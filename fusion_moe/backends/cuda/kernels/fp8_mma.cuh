// The product of fp8.cuh by mma, for GPUs without wgmma: rows in e4m3 codes by weights in such
// codes, with a scale for 128 columns of each row of both.
//
// A pair of codes is copied as one number of 16 bits, so that K blocks of product_mma.cuh are those
// of 128 codes that have a scale. Sums of each leave the tensor cores, and are added with the
// scales of both rows in float32.
#pragma once

#include "codes.cuh"
#include "product_mma.cuh"

namespace {

// The product as product_mma.cuh copies it.
template <class Segment>
struct PairsOfCodes : Segment {
    using Activation = u16;
    static constexpr i32 K = Segment::K / 2, SUMS = 0, ADDED = 0;
    static constexpr bool B_MN = false, B_PACKED = false;
    static_assert(Segment::K % 16 == 0, "rows are aligned");

    __device__ explicit PairsOfCodes(const Segment& s) : Segment(s) {}
    __device__ const u16* a_matrix() const {
        return reinterpret_cast<const u16*>(Segment::a_matrix());
    }
    __device__ const u16* b_matrix(i64 g) const {
        return reinterpret_cast<const u16*>(Segment::b_codes()) + g * (i64(Segment::N) * K);
    }
};

template <class Segment, int TILE_M, int TILE_N>
struct Fp8GemmMma : GroupedGemmMma<PairsOfCodes<Segment>, TILE_M, TILE_N> {
    using Base = GroupedGemmMma<PairsOfCodes<Segment>, TILE_M, TILE_N>;
    using Pairs = PairsOfCodes<Segment>;
    using typename Base::Schedule, typename Base::Sums, typename Base::Tile, typename Base::Warp;

    class Sum : public Base::Sum {
        static constexpr int FRAGMENTS = Warp::FRAGMENTS, BLOCKS = Warp::COLUMNS / 8,
                             IN_RESULT = Warp::EACH / 8;  // blocks of eight columns
        static constexpr i32 K_BLOCKS = (Segment::K + 127) / 128;
        using Base::Sum::s_, Base::Sum::tile_, Base::Sum::active_;
        i32 a_row_[FRAGMENTS][2] = {};

        // Row m of the product, of those that the lane has: that of the h-th half of a fragment.
        __device__ __forceinline__ i32 row(int r, int h) const {
            return tile_.m_tile.first + Warp::row() + 16 * r + 8 * h + threadIdx.x % 32 / 4;
        }
        // The first of the lane's two columns of a result in its i-th block.
        __device__ __forceinline__ i32 column(int i) const {
            return tile_.n_tile * Schedule::TILE_COLUMNS + Warp::part() * Warp::EACH + 8 * i +
                   threadIdx.x % 4 * 2;
        }

      public:
        __device__ __forceinline__ Sum(const Pairs& s, const Tile& tile) : Base::Sum(s, tile) {
            if (!active_) return;
#pragma unroll
            for (int r = 0; r < FRAGMENTS; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    a_row_[r][h] = s.a_row_of(s.a_index(min(row(r, h), tile.m_tile.end - 1)));
        }

        __device__ __forceinline__ void add(Sums& sum, i32 kb, u32 a, u32 b) const {
            if (!active_) return;
            const auto* b_scales = s_.b_scales(tile_.m_tile.group) + kb * Segment::NEXT_B_SCALE;
            float a_scale[FRAGMENTS][2], b_scale[BLOCKS][2];
            i32 zero = 0;
            // where scales lie is computed again for each K block: registers are short
            asm volatile("" : "+r"(zero));
#pragma unroll
            for (int r = 0; r < FRAGMENTS; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    a_scale[r][h] = s_.a_scales()[i64(a_row_[r][h]) * K_BLOCKS + kb];
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const i32 j = min(column(i % IN_RESULT) + e + zero, Segment::WIDTH - 1);
                    b_scale[i][e] = s_.b_scale(
                        b_scales[Segment::b_scale_of(Segment::column(i / IN_RESULT, j))]);
                }
#pragma unroll
            for (int r = 0; r < FRAGMENTS; ++r) {  // registers are short for all at once
                float part[1][4 * BLOCKS] = {};
                Warp::template multiply<e4m3, false, false>(part, a, b, r);
#pragma unroll
                for (int c = 0; c < 4 * BLOCKS; ++c)
                    sum[r][c] =
                        fmaf(part[0][c], a_scale[r][c / 2 % 2] * b_scale[c / 4][c % 2], sum[r][c]);
            }
        }
    };
};

}  // namespace
