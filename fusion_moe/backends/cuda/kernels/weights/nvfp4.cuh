// NVFP4: codes of e2m1, a block scale e4m3 for 16 of them, a float32 for a matrix.
#pragma once

#include "weights/e2m1.cuh"

namespace {

template <class T>
struct Nvfp4Scales;

template <>
struct Nvfp4Scales<bf16> {
    using Outer = DecodeScale;
    static constexpr int BLOCK = 16;
    static constexpr float RESCALE = 128.f;

    static __device__ __forceinline__ u32 tiled(u32 two) {
        return two * 0x10 + 0x6F806F80u;
    }  // E5M3, times 2^119

    static __device__ __forceinline__ u32 multiply(u32 codes, u32 scale) {
        return multiply_pair<bf16>(codes, scale);
    }
};

// Times 2^7 the largest scale, 448, is a float16, and the product of the least scale and the least
// code is as many times the least one.
template <>
struct Nvfp4Scales<f16> {
    using Outer = DecodeScale;
    static constexpr int BLOCK = 16;
    static constexpr float RESCALE = 128.f;

    // E5M3. Bytes of scales begin at 112, but for zero.
    static __device__ __forceinline__ u32 tiled(u32 two) {
        return __vmaxu2(two, 0x00080008u) * 0x80 - 0x04000400u;
    }

    static __device__ __forceinline__ u32 multiply(u32 codes, u32 scale) {
        return multiply_pair<f16>(codes, scale);
    }
};

template <class T>
using Nvfp4Tiled = FourBitTiled<E2m1<T, Nvfp4Scales<T>>>;

}  // namespace
