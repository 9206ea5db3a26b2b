// NVFP4: codes of e2m1, a block scale e4m3 for 16 of them, a float32 for a matrix.
#pragma once

#include "weights/e2m1.cuh"

namespace {

template <class T>
struct Nvfp4Scales;

template <>
struct Nvfp4Scales<bf16> : ScaledPairs<bf16> {
    using Outer = DecodeScale;
    static constexpr int BLOCK = 16;
    static constexpr float TILED_RESCALE = 128.f, LINEAR_RESCALE = 256.f;

    static __device__ __forceinline__ u32 tiled(u32 two) {
        return two * 0x10 + 0x6F806F80u;
    }  // E5M3, times 2^119

    // e4m3, times 2^118. A subnormal float32 holds subnormal scales.
    static __device__ __forceinline__ u32 linear(u32 byte) {
        const float size = __uint_as_float((byte & 0x7F) << 20) * 0x1p127f * 0x1p111f;
        const u32 half =
            (byte & 0x7F) == 0x7F ? 0x7FC0u : __float_as_uint(size) >> 16 | (byte & 0x80) << 8;
        return half * 0x10001u;
    }
};

// Times 2^7 the largest scale, 448, is a float16, and the product of the least scale and the least
// code is as many times the least one.
template <>
struct Nvfp4Scales<f16> : ScaledPairs<f16> {
    using Outer = DecodeScale;
    static constexpr int BLOCK = 16;
    static constexpr float TILED_RESCALE = 128.f, LINEAR_RESCALE = 128.f;

    // E5M3. Bytes of scales begin at 112, but for zero.
    static __device__ __forceinline__ u32 tiled(u32 two) {
        return __vmaxu2(two, 0x00080008u) * 0x80 - 0x04000400u;
    }

    // e4m3: a subnormal float16 holds subnormal scales, times 2^-8.
    static __device__ __forceinline__ u32 linear(u32 byte) {
        constexpr u32 UP = 0x78007800;  // 2^15
        const u32 half = (byte & 0x7F) == 0x7F ? 0x7E00u : (byte & 0x7F) << 7 | (byte & 0x80) << 8;
        return multiply_pair<f16>(half * 0x10001u, UP);
    }
};

template <class T>
using Nvfp4Tiled = FourBitTiled<E2m1<T, Nvfp4Scales<T>>>;
template <class T, class Order = LinearOrder>
using Nvfp4Linear = FourBitLinear<E2m1<T, Nvfp4Scales<T>>, Order>;

}  // namespace
