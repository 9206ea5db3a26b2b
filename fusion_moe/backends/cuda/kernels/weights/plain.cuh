// Readers of plain weights: numbers of 16 bits, of the type of the activations, which need no
// dequantizing.
#pragma once

#include "weights/reader.cuh"

namespace {

// How tiles lie in shared memory. The 16 bytes of lane 4 r + c in run v lie where those of lane
// 4 r + (c ^ v) would. So no two of the 16 bytes that follow each other in a run share a bank,
// which a step multiplies by if activations are in fragment order, and no two of one row in all
// four runs, which it multiplies by if they are row-major.
//
// What is loaded is a fragment already, so the next ones may only be loaded when the products
// before have ended. (When they were loaded while these ran, right numbers came to wrong products,
// as seen on an H200 with NVRTC 13. Readers that dequantize write to other registers.)
template <bool FRAGMENT_ORDER>
struct PlainShared {
    struct Packed {
        uint4 step[4];
    };
    u32 first[4];  // the offset of a lane's elements among those of all tiles, in each step

    __device__ __forceinline__ PlainShared(u32 first_element, u32, i32 lane) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const i32 run = FRAGMENT_ORDER ? v : lane % 4, block = FRAGMENT_ORDER ? lane % 4 : v;
            first[v] = first_element + RUN * run + swizzled_lane(lane / 4 * 4 + block, run);
            asm volatile("" : "+r"(first[v]));  // kept, not computed again
        }
    }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) {
        return 16 * (lane ^ run);
    }

    __device__ __forceinline__ Packed load(const u8* elements, const u8*) const {
        Packed packed;
#pragma unroll
        for (int v = 0; v < 4; ++v)
            packed.step[v] = *reinterpret_cast<const uint4*>(elements + first[v]);
        return packed;
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, int v, u32 (&a)[4]) {
        a[0] = packed.step[v].x, a[1] = packed.step[v].y, a[2] = packed.step[v].z,
        a[3] = packed.step[v].w;
    }
};

template <class T>
struct PlainTiled : NoOuterScale {
    static_assert(sizeof(T) == 2, "plain weights have 16 bits");
    static constexpr float RESCALE = 1.f;
    static constexpr int ELEMENTS = 4 * RUN, SCALES = 0;
    static constexpr bool SCALES_FOLLOW = true;

    template <bool FRAGMENT_ORDER>
    using Shared = PlainShared<FRAGMENT_ORDER>;

    using Packed = typename PlainShared<true>::Packed;
    struct Scales {};

    template <class Segment>
    static __device__ __forceinline__ const u8* elements(const Segment& s) {
        return reinterpret_cast<const u8*>(s.values);
    }

    template <class Segment>
    static __device__ __forceinline__ const u8* scales(const Segment&) {
        return nullptr;
    }

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block,
                                         i32 lane) {
        values_ =
            elements(s) + tile_number<Segment>(group, first_row, block) * ELEMENTS + lane * 16;
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        Packed packed;
#pragma unroll
        for (int v = 0; v < 4; ++v)
            packed.step[v] = load_no_allocate(values_ + ELEMENTS * blocks_ahead + RUN * v);
        return packed;
    }

    __device__ __forceinline__ void advance(int blocks) { values_ += ELEMENTS * blocks; }

    static __device__ __forceinline__ Scales scales(const Packed&) { return {}; }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales&, int v,
                                                      int half, u32* a) {
        a[0] = half == 0 ? packed.step[v].x : packed.step[v].z,
        a[1] = half == 0 ? packed.step[v].y : packed.step[v].w;
    }

  private:
    const u8* values_;
};

// Reads matrices of any N, and of K in whole blocks of 16. For rows past the last it reads the last
// one; blocks past the last are zeros.
template <class T>
struct PlainLinear : NoOuterScale {
    static_assert(sizeof(T) == 2, "plain weights have 16 bits");
    static constexpr float RESCALE = 1.f;

    struct Packed {
        uint4 row[2][2];  // r and r + 8: the 16 columns in halves
    };
    struct Scales {};

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block,
                                         i32 lane) {
        const i32 k = 64 * block + 16 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const i64 row =
                i64(group) * Segment::N + min(first_row + lane / 4 + 8 * i, Segment::N - 1);
            values_[i] = reinterpret_cast<const u8*>(s.values + row * Segment::K + k);
        }
        left_ = Segment::K - k;
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        if (left_ <= 64 * blocks_ahead) return {};
        Packed packed;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            packed.row[i / 2][i % 2] =
                load_no_allocate(values_[i / 2] + 128 * blocks_ahead + 16 * (i % 2));
        return packed;
    }

    __device__ __forceinline__ void advance(int blocks) {
        values_[0] += 128 * blocks, values_[1] += 128 * blocks;
        left_ -= 64 * blocks;
    }

    static __device__ __forceinline__ Scales scales(const Packed&) { return {}; }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales&, int v,
                                                      int half, u32* a) {
#pragma unroll
        for (int i = 0; i < 2; ++i) a[i] = word_of(packed.row[i][half], v);
    }

  private:
    const u8* values_[2];
    i32 left_;
};

}  // namespace
