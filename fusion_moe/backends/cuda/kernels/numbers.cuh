// Numbers: narrow floats and the functions of the IR on float32. NVRTC has no headers of the
// system's: everything needed stands here.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

#define NAN __int_as_float(0x7FC00000)
#define INFINITY __int_as_float(0x7F800000)

namespace std {  // the functions that generated code calls

using ::atan, ::cos, ::erfc, ::fabs, ::floor, ::nearbyint, ::sin, ::sqrt;

}  // namespace std

namespace {

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }

__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

__device__ __forceinline__ float widen(f16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

template <class T, class Other>
constexpr bool SAME = false;
template <class T>
constexpr bool SAME<T, T> = true;

// To nearest, ties to even; NaN stays NaN.
template <class T>
__device__ __forceinline__ T narrow(float x) {
    T found;
    if constexpr (SAME<T, float>)
        found = x;
    else if constexpr (SAME<T, bf16>)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found.bits) : "f"(x));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(found.bits) : "f"(x));
    return found;
}

template <class T>
__device__ __forceinline__ float rounded(float x) {
    return widen(narrow<T>(x));
}

// The instruction that rounds two numbers is several times as fast as the one that rounds one, and
// leaves the upper one wide.
template <>
__device__ __forceinline__ float rounded<bf16>(float x) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(x), "f"(0.f));
    return __uint_as_float(both);
}

// The same of what was computed of T alone, which is less work on CPUs.
template <class T>
__device__ __forceinline__ float rounded_again(float x) {
    return rounded<T>(x);
}

// A number as it is kept in memory.
template <class T, class R>
__device__ __forceinline__ T stored(R x) {
    if constexpr (SAME<R, float> && (SAME<T, bf16> || SAME<T, f16>))
        return narrow<T>(x);
    else
        return T(x);
}

// -------------------------------------------------------------------------------------------------
// Pairs of 16-bit numbers in a word

// Two float32 numbers, each rounded once, the first in the low half.
template <class T>
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
    u32 both;
    if constexpr (SAME<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// A half of a word, which instructions that convert it read where it is.
__device__ __forceinline__ u16 half_word(u32 word, bool upper) {
    u16 low, high;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(word));
    return upper ? high : low;
}

// The halves of a word, each as both halves of one.
__device__ __forceinline__ void halves_twice(u32& low, u32& high, u32 word) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; mov.b32 %0, {low, low}; mov.b32 %1, {high, "
        "high};}"
        : "=r"(low), "=r"(high)
        : "r"(word));
}

// a * b, of two numbers each.
template <class T>
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 product;
    if constexpr (SAME<T, f16>)
        asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    else
#if __CUDA_ARCH__ >= 900
        asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(product)
            : "r"(a), "r"(b), "r"(0x80008000u));  // plus -0
#endif
    return product;
}

// a * b + c, of two numbers each, rounded once.
template <class T>
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 found;
    if constexpr (SAME<T, bf16>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    return found;
}

__device__ __forceinline__ u32 and_or(u32 x, u32 mask, u32 y) {  // (x & mask) | y
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(x), "r"(mask), "r"(y));
    return found;
}

// -------------------------------------------------------------------------------------------------
// MXFP8

// 2^(byte - 127); 255 is NaN.
__device__ __forceinline__ float e8m0_(u32 byte) {
    return __uint_as_float(byte == 255 ? 0x7FC00000 : max(byte << 23, 0x400000u));
}

// Two e4m3 codes, the first in the low byte, as float16, which holds them.
__device__ __forceinline__ u32 halves_of(u16 codes) {
#if __CUDA_ARCH__ >= 890
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
#else
    u32 halves = 0;
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
        const u32 code = codes >> i & 0xFF;  // its bits as those of a float16 are 2^-8 of it
        const f16 half =
            narrow<f16>(widen(f16{u16((code & 0x80) << 8 | (code & 0x7F) << 7)}) * 256.f);
        halves |= u32((code & 0x7F) == 0x7F ? 0x7FFF : half.bits) << 2 * i;
    }
    return halves;
#endif
}

__device__ __forceinline__ float e4m3_(u8 code) { return widen(f16{u16(halves_of(code))}); }

// -------------------------------------------------------------------------------------------------
// functions of the IR

__device__ __forceinline__ float exp_(float x) { return ::expf(x); }
__device__ __forceinline__ float log_(float x) { return ::logf(x); }
__device__ __forceinline__ float expm1_(float x) { return ::expm1f(x); }
__device__ __forceinline__ float log1p_(float x) { return ::log1pf(x); }
__device__ __forceinline__ float pow_(float x, float y) { return ::powf(x, y); }
__device__ __forceinline__ float tanh_(float x) { return ::tanhf(x); }
__device__ __forceinline__ float erf_(float x) { return ::erff(x); }
// Approximate, to 2^-16 of the result: exact ones make gate and up of large M 2 to 5 % slower,
// since all products wait for the epilogue. What becomes subnormal on the way is less than 2^-126
// of the result, or the result is as good as zero.
__device__ __forceinline__ float sigmoid_(float x) {
    float power, found;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(1.f + power));
    return found;
}
__device__ __forceinline__ float silu_(float x) { return x * sigmoid_(x); }
__device__ __forceinline__ float relu_(float x) { return x > 0.f || x != x ? x : 0.f; }
__device__ __forceinline__ float minimum_(float a, float b) {
    return a != a ? a : b != b ? b : a < b ? a : b;
}
__device__ __forceinline__ float maximum_(float a, float b) {
    return a != a ? a : b != b ? b : a > b ? a : b;
}
__device__ __forceinline__ i64 minimum_(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 maximum_(i64 a, i64 b) { return a > b ? a : b; }
__device__ __forceinline__ bool minimum_(bool a, bool b) { return a && b; }
__device__ __forceinline__ bool maximum_(bool a, bool b) { return a || b; }

}  // namespace
