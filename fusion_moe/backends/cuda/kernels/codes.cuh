// e4m3 codes and their scales, as copies (block_copies.cuh) and products (fp8.cuh) make them: a
// class for each rule by which an encoding chooses a scale, and what both need of numbers as bits.
#pragma once

#include "routing.cuh"

namespace {

// Two numbers as codes, the first in the low byte; beyond 448 they saturate.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 bits = __float_as_uint(i ? high : low), size = bits & 0x7FFFFFFF;
        const u32 normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - 8 * 120,
                  subnormal = __float2uint_rn(__uint_as_float(size) * 0x1p9f);
        const u32 code = size > 0x7F800000   ? 0x7F
                         : size < 0x3C800000 ? subnormal  // below 2^-6
                                             : min(normal, 0x7Eu);
        codes |= (code | (code == 0x7F ? 0 : bits >> 24 & 0x80)) << 8 * i;
    }
    return u16(codes);
#endif
}

// What two codes and their scales stand for, which bf16 holds.
__device__ __forceinline__ u32 numbers_of(u16 codes, float low_scale, float high_scale) {
    const u32 halves = halves_of(codes);
    return narrow_pair<bf16>(widen(f16{u16(halves)}) * low_scale,
                             widen(f16{u16(halves >> 16)}) * high_scale);
}

// Eight numbers of a row as bits, whose magnitudes compare as the numbers do, NaN above all.
template <class T>
struct Bits {
    static constexpr int WORDS = 8;
    u32 at[WORDS];

    Bits() = default;
    __device__ __forceinline__ explicit Bits(const float (&x)[8]) {
#pragma unroll
        for (int v = 0; v < 8; ++v) at[v] = __float_as_uint(x[v]);
    }
    __device__ __forceinline__ float number(int v) const { return __uint_as_float(at[v]); }
    __device__ __forceinline__ static u32 magnitude(u32 word) { return word & 0x7FFFFFFF; }
    __device__ __forceinline__ static u32 larger(u32 a, u32 b) { return max(a, b); }
    __device__ __forceinline__ static u32 largest(u32 word) {
        return word;
    }  // of its magnitudes, as float32
};

// bf16 numbers are two in a word.
template <>
struct Bits<bf16> {
    static constexpr int WORDS = 4;
    u32 at[WORDS];

    Bits() = default;
    __device__ __forceinline__ explicit Bits(const float (&x)[8]) {
#pragma unroll
        for (int v = 0; v < 8; v += 2) {
            at[v / 2] = __float_as_uint(x[v]) >> 16 | (__float_as_uint(x[v + 1]) & 0xFFFF0000);
            asm("" : "+r"(at[v / 2]));  // as it was loaded: the compiler takes it apart otherwise
        }
    }
    __device__ __forceinline__ float number(int v) const {
        return __uint_as_float(v % 2 ? at[v / 2] & 0xFFFF0000 : at[v / 2] << 16);
    }
    __device__ __forceinline__ static u32 magnitude(u32 word) { return word & 0x7FFF7FFF; }
    __device__ __forceinline__ static u32 larger(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
        u32 both;
        asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return __vmaxu2(a, b);
#endif
    }
    __device__ __forceinline__ static u32 largest(u32 word) {
        return max(word << 16, word & 0xFFFF0000);
    }
};

// The scale of numbers whose largest magnitude has the bits `most`, as it is stored and as a
// number; over: what they are multiplied by to become codes. A power of two, by the numbers of the
// rule of this name (encodings/power_of_two.py), without branches; NaN is 0x7FFFFFFF in a product.
template <class Stored_, u32 BIAS, u32 CARRY, u32 LEAST, u32 ZERO, u32 INFINITE>
struct PowerOfTwo {
    using Stored = Stored_;
    Stored stored;
    float scale, over;

    __device__ __forceinline__ explicit PowerOfTwo(u32 most) {
        u32 e = most > LEAST ? ((most + CARRY) >> 23) - BIAS : 0;
        if (ZERO != 0 && most == 0) e = ZERO;
        if (most >= 0x7F800000) e = INFINITE == 255 || most > 0x7F800000 ? 255 : INFINITE;
        asm("" : "+r"(e));  // or what it is chosen by is asked for each product
        scale = e8m0_(e);
        over = __uint_as_float(e == 255 ? 0x7FC00000 : max((254 - e) << 23, 0x400000u));
        if constexpr (sizeof(Stored) == 1)
            stored = u8(e);
        else
            stored = scale;
    }
};

// 448 over the magnitude; 1 for zeros, NaN for what is not finite.
struct Float32Scale {
    using Stored = float;
    float stored, scale, over;

    __device__ __forceinline__ explicit Float32Scale(u32 most) {
        const float whole = fminf(__fdiv_rn(448.f, __uint_as_float(most)), 0x1.FEp127f);
        over = most == 0 ? 1.f : most >= 0x7F800000 ? __uint_as_float(0x7FC00000) : whole;
        stored = scale = __fdiv_rn(1.f, over);
    }
};

// Codes of eight numbers. over: a function of a column, as in Scale.
template <class T, class Over>
__device__ __forceinline__ void make_codes(u32 (&made)[2], const Bits<T>& x, Over over) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const int v = 4 * w;
        made[w] = e4m3_pair(x.number(v) * over(v), x.number(v + 1) * over(v + 1)) |
                  u32(e4m3_pair(x.number(v + 2) * over(v + 2), x.number(v + 3) * over(v + 3)))
                      << 16;
    }
}

// The scales of eight columns.
__device__ __forceinline__ Eight<float> load_scales(const float* scales) {
    return load_eight(scales);
}
__device__ __forceinline__ Eight<float> load_scales(const u8* scales) {
    const Vector<u8, 8> bytes = load_vector<8>(scales);
    Eight<float> found;
#pragma unroll
    for (int v = 0; v < 8; ++v) found.at[v] = e8m0_(bytes.at[v]);
    return found;
}

// The largest magnitude of a lane's numbers, as bits.
template <class T, int COUNT>
__device__ __forceinline__ u32 largest_of(const Bits<T>* x) {
    u32 most = 0;
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
#pragma unroll
        for (int w = 0; w < Bits<T>::WORDS; ++w)
            most = x[s].larger(most, x[s].magnitude(x[s].at[w]));
    }
    return Bits<T>::largest(most);
}

// Eight numbers of a row as what their codes stand for. 16 lanes have a block of 128.
template <class Scale>
__device__ __forceinline__ uint4 rounded_to_codes(uint4 x) {
    auto& bits = reinterpret_cast<Bits<bf16>&>(x);
    u32 most = largest_of<bf16, 1>(&bits), codes[2];
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2)
        most = max(most, __shfl_xor_sync(WHOLE_WARP, most, lanes));
    const Scale by(most);
    make_codes(codes, bits, [&](int) { return by.over; });
#pragma unroll
    for (int w = 0; w < 4; ++w)
        bits.at[w] = numbers_of(u16(codes[w / 2] >> w % 2 * 16), by.scale, by.scale);
    return x;
}

}  // namespace
