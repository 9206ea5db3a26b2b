// Numbers: narrow floats, e2m1 and e4m3, and the functions of the IR on float32. No intrinsics:
// every ISA level includes this. Nor <cmath>, which takes longer to compile than most segments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using u8 = std::uint8_t;
using i16 = std::int16_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

inline float as_float(u32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline u32 as_bits(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// -------------------------------------------------------------------------------------------------
// bfloat16, float16

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) { return as_float(u32(x.bits) << 16); }

// Normal numbers by moving the exponent; subnormals by a subtraction that is exact in float32.
inline float widen(f16 x) {
    const u32 sign = u32(x.bits & 0x8000) << 16, rest = u32(x.bits & 0x7FFF) << 13;
    const u32 exponent = rest & 0x0F800000u;
    const float normal = as_float(rest + (exponent == 0x0F800000u ? 0x70000000u : 0x38000000u));
    const float small = as_float(rest + 0x38800000u) - as_float(0x38800000u);
    return as_float(as_bits(exponent == 0 ? small : normal) | sign);
}

template <class T>
T narrow(float x);

template <>
inline float narrow<float>(float x) {
    return x;
}

// To nearest, ties to even; NaN stays NaN.
template <>
inline bf16 narrow<bf16>(float x) {
    const u32 bits = as_bits(x), rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
    return {u16((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
}

template <>
inline f16 narrow<f16>(float x) {
    const u32 bits = as_bits(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
    // below 2^-14 the steps are of 2^-24: adding 0.5 leaves them in the last bits, rounded as
    // float32 rounds
    const u32 small = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
    const u32 normal = (size - 0x38000000u + 0xFFFu + ((size >> 13) & 1)) >> 13;
    u32 found = size < 0x38800000u ? small : normal;
    found = size >= 0x477FF000u ? 0x7C00u : found;
    found = size > 0x7F800000u ? 0x7E00u : found;
    return {u16(found | sign)};
}

// A number as it is kept in memory.
template <class T, class R>
inline T stored(R x) {
    if constexpr (std::is_same<R, float>::value && !std::is_integral<T>::value) {
        return narrow<T>(x);
    } else {
        return T(x);
    }
}

template <class T>
inline float rounded(float x) {
    return widen(narrow<T>(x));
}

// A constant in place of NaN would lead g++ to copies of what follows, of which it makes no
// vectors.
template <>
inline float rounded<bf16>(float x) {
    const u32 bits = as_bits(x), nearest = bits + 0x7FFFu + ((bits >> 16) & 1);
    return as_float((x != x ? bits | 0x400000u : nearest) & 0xFFFF0000u);
}

// The same of what was computed of T alone: bits of NaN that bf16 does not have are zeros then, so
// rounding leaves it.
template <class T>
inline float rounded_again(float x) {
    return rounded<T>(x);
}
template <>
inline float rounded_again<bf16>(float x) {
    const u32 bits = as_bits(x);
    return as_float((bits + 0x7FFFu + ((bits >> 16) & 1)) & 0xFFFF0000u);
}

// A number that T holds, which is not rounded again.
template <class T, class R>
inline T held(R x) {
    if constexpr (std::is_same<T, bf16>::value && std::is_same<R, float>::value) {
        return {u16(as_bits(x) >> 16)};
    } else {
        return stored<T>(x);
    }
}

// -------------------------------------------------------------------------------------------------
// e2m1, e4m3

constexpr float E2M1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                            -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
// The same as the upper half of a float32, which is a bfloat16.
constexpr u16 E2M1_BF16[16] = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                               0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};

// Every e4m3 byte as bfloat16, which holds it exactly; 0x7F and 0xFF are NaN.
struct E4M3 {
    u16 bits[256];

    constexpr E4M3() : bits() {
        for (int byte = 0; byte < 256; ++byte) {
            const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
            int found = 0;
            if ((byte & 0x7F) == 0x7F) {
                found = 0x7FC0;
            } else if (exponent != 0) {
                found = ((exponent + 120) << 7) | (mantissa << 4);
            } else if (mantissa != 0) {  // mantissa * 2^-9
                const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
                found = ((top + 118) << 7) | (((mantissa << (3 - top)) & 7) << 4);
            }
            bits[byte] = u16(found | (byte & 0x80) << 8);
        }
    }

    float operator[](u8 byte) const { return as_float(u32(bits[byte]) << 16); }
};

constexpr E4M3 E4M3_VALUES{};

inline float e4m3_(u8 code) { return E4M3_VALUES[code]; }

// The code of a number, ties to the even one, beyond 6 to 6, NaN to 7; the sign of -0.0 is dropped.
inline i32 e2m1_of(float x) {
    const float size = __builtin_fabsf(x);
    const i32 below = (size <= 0.25f) + (size < 0.75f) + (size <= 1.25f) + (size < 1.75f) +
                      (size <= 2.5f) + (size < 3.5f) + (size <= 5.f);
    return 7 - below + 8 * (x < 0.f);
}

// The e4m3 byte of a number from 2^-9 to 448, to nearest, ties to even; NaN is 0x7F.
inline u8 e4m3_of(float x) {
    const u32 bits = as_bits(x);
    const u32 normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    const u32 small = as_bits(x * 512.f + 0x1p23f) - as_bits(0x1p23f);
    return u8(x != x ? 0x7Fu : x < 0x1p-6f ? small : normal);
}

// Sixteen numbers -> their codes and block scale, in the order of operations of nvidia-modelopt.
// False if one of them is not finite.
inline bool quantize_block(const float* x, float decode_scale, u8* codes, u8* scale) {
    u32 most = 0;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < 16; ++i) most = std::max(most, as_bits(x[i]) & 0x7FFFFFFFu);
    const float amax = as_float(most), wanted = most == 0 ? 1.f : amax / (6.f * decode_scale);
    *scale = e4m3_of(wanted < 0x1p-9f ? 0x1p-9f : wanted > 448.f ? 448.f : wanted);
    const float step = most == 0 ? 1.f : E4M3_VALUES[*scale] * decode_scale;
    i32 code[16];
#pragma omp simd
    for (int i = 0; i < 16; ++i) code[i] = e2m1_of(x[i] / step);
    for (int b = 0; b < 8; ++b) codes[b] = u8(code[2 * b] | code[2 * b + 1] << 4);
    return most < 0x7F800000u;
}

// -------------------------------------------------------------------------------------------------
// MXFP8 and FP8 in blocks

// 2^(byte - 127); 255 is NaN.
inline float e8m0_(u8 byte) {
    return as_float(byte == 255 ? 0x7FC00000u : byte == 0 ? 0x400000u : u32(byte) << 23);
}

// A number -> its e4m3 byte, beyond 448 that of 448.
inline u8 e4m3_saturated(float x) {
    const float size = __builtin_fabsf(x);
    return u8(e4m3_of(size > 448.f ? 448.f : size) | (as_bits(x) >> 31) << 7);
}

// The scale of numbers whose largest magnitude has the bits `most`, and what they are multiplied by
// to become codes: a power of two, by the numbers of the rule of this name
// (encodings/power_of_two.py).
template <class Stored, u32 BIAS, u32 CARRY, u32 LEAST, u32 ZERO, u32 INFINITE>
struct PowerOfTwo {
    Stored stored;
    float over;

    explicit PowerOfTwo(u32 most) {
        const u32 e = most > LEAST ? ((most + CARRY) >> 23) - BIAS : most == 0 ? ZERO : 0;
        const u8 byte = u8(most < 0x7F800000u ? e : most > 0x7F800000u ? 255 : INFINITE);
        stored = sizeof(Stored) == 1 ? Stored(byte) : Stored(e8m0_(byte));
        over = 1.f / e8m0_(byte);
    }
};

// Numbers are multiplied by 448 / amax, which is the largest bfloat16 at most.
struct Float32Scale {
    float stored, over;

    explicit Float32Scale(u32 most)
        : over(most == 0             ? 1.f
               : most >= 0x7F800000u ? as_float(0x7FC00000u)
                                     : std::min(448.f / as_float(most), 0x1.FEp127f)) {
        stored = 1.f / over;
    }
};

// The bits of the largest magnitude.
inline u32 largest_of(const float* x, int count) {
    u32 most = 0;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < count; ++i) most = std::max(most, as_bits(x[i]) & 0x7FFFFFFFu);
    return most;
}

inline void quantize_by(float over, const float* x, int count, u8* codes) {
#pragma omp simd
    for (int i = 0; i < count; ++i) codes[i] = e4m3_saturated(x[i] * over);
}

// Numbers -> their codes and block scale.
template <class Scale, class Stored>
bool quantize_fp8(const float* x, int count, u8* codes, Stored* scale) {
    const Scale made(largest_of(x, count));
    *scale = made.stored;
    quantize_by(made.over, x, count, codes);
    return true;
}

// -------------------------------------------------------------------------------------------------
// Functions of the IR. Written without branches, so that loops over them become vector code. In
// polynomials the highest coefficient comes first.

template <class T>
T polynomial(T, T p) {
    return p;
}
template <class T, class... Rest>
T polynomial(T x, T p, T next, Rest... rest) {
    return polynomial(x, p * x + next, rest...);
}

// x, but at most `most`, and at least `least`, which is negative. Of integers, since g++ makes
// copies of what follows a choice of floats; NaN is not kept.
inline float clamped(float x, float least, float most) {
    return as_float(u32(std::min(i32(std::min(as_bits(x), as_bits(least))), i32(as_bits(most)))));
}

// The magnitude of a result, and the sign of an odd function's argument.
inline float with_sign(float size, float x) {
    return as_float(as_bits(size) | (as_bits(x) & 0x80000000u));
}

// n + INTEGERS is n to the nearest integer, as its last bits, shifted by a float's bias.
constexpr float INTEGERS = 0x1.8p23f + 254;

// exp(r) - 1 for |r| <= ln2 / 2: a polynomial.
inline float expm1_of(float r) {
    const float p = polynomial(r, 1.98756915e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                               4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f);
    return p * (r * r) + r;
}

// exp(r) 2^n for |r| <= ln2 / 2, 2^n in two factors. shifted: n + INTEGERS.
inline float exp_of(float r, float shifted) {
    const float power = expm1_of(r) + 1.f;
    const u32 n = as_bits(shifted), half = n >> 1;
    return power * as_float(half << 23) * as_float((n - half) << 23);
}

// x = n ln2 + r: shifted is n + INTEGERS.
inline float rest_of(float x, float& shifted) {
    shifted = x * 1.44269504f + INTEGERS;
    const float n = shifted - INTEGERS;
    return (x - n * 0.693359375f) - n * -2.12194440e-4f;
}

// exp(x), to about one unit in the last place.
inline float exp_(float x) {
    float shifted;
    const float r = rest_of(clamped(x, -104.f, 89.f), shifted), found = exp_of(r, shifted);
    return x != x ? x : found;
}

// exp(x) - 1, to two units in the last place: 2^n (exp(r) - 1) + (2^n - 1), both halved, since
// 2^128 is no float.
inline float expm1_(float x) {
    float shifted;
    const float r = rest_of(clamped(x, -18.f, 89.f), shifted);
    const float half = as_float((as_bits(shifted) - 128) << 23);
    const float found = 2.f * (expm1_of(r) * half + (half - 0.5f));
    return x != x ? x : with_sign(found, x);
}

// 2^x for |x| < 126, to one unit in the last place: x = n + r.
inline float exp2_(float x) {
    const float shifted = x + INTEGERS, r = x - (shifted - INTEGERS);
    const float power = polynomial(r, 1.5353362e-4f, 1.33988746e-3f, 9.61843736e-3f, 0.0555033247f,
                                   0.240226479f, 0.693147203f, 1.f);
    return power * as_float((as_bits(shifted) - 127) << 23);
}

// x >= 0 -> m from sqrt(1/2) to sqrt(2) and n, where x = m 2^n. 0 is 2^-infinity, and infinity and
// NaN are powers of themselves.
inline float mantissa_of(float x, float& n) {
    const bool small = x < 0x1p-126f;
    const u32 bits = as_bits(small ? x * 0x1p23f : x);
    const i32 exponent = i32(bits - as_bits(0.707106781f)) >> 23;
    const float finite = float(small ? exponent - 23 : exponent);
    n = x == 0.f ? -__builtin_inff() : x <= 0x1.fffffep127f ? finite : x;
    return as_float(bits - (u32(exponent) << 23));
}

// n ln2 + log(1 + f), of which a polynomial makes what follows f - f^2 / 2. low: the lower part of
// n ln2, and what else is small.
inline float log_of(float f, float n, float low) {
    const float square = f * f;
    const float p = polynomial(f, -0.0763438874f, 0.127654283f, -0.13162004f, 0.142013686f,
                               -0.166231445f, 0.200012359f, -0.250008268f, 0.333333317f);
    const float rest = low + (f * square * p - 0.5f * square);
    return n * 0.693115234375f + (f + rest);
}

// log(x), to one unit in the last place.
inline float log_(float x) {
    float n;
    const float f = mantissa_of(x, n) - 1.f, found = log_of(f, n, n * 3.19461846e-5f);
    return x < 0.f ? as_float(0x7FC00000) : found;
}

// log(1 + x), to one unit in the last place: near 0 that of f = x, elsewhere log(u) + lost / u, of
// u = 1 + x and what its rounding lost.
inline float log1p_(float x) {
    float n;
    const float u = 1.f + x, mantissa = mantissa_of(u, n);
    const float lost = x < 1.f ? x - (u - 1.f) : 1.f - (u - x), more = lost / u;
    const bool near = n == 0.f, finite = x > -1.f && x < 0x1p25f;
    const float f = near ? x : mantissa - 1.f, added = near ? 0.f : finite ? more : 0.f;
    const float found = with_sign(log_of(f, n, n * 3.19461846e-5f + added), x);
    return x < -1.f ? as_float(0x7FC00000) : found;
}

// log2(x) of x >= 0, to 2^-37 of it: n, and a polynomial in (m - 1) / (m + 1).
inline double log2_of(float x) {
    float n;
    const double m = mantissa_of(x, n), s = (m - 1.) / (m + 1.);
    const double p = polynomial(s * s, 0.34072996641946074, 0.4116727274365268, 0.5770835848230823,
                                0.9617966733424195, 2.8853900817900855);
    return double(n) + s * p;
}

// x to the power of y, to one unit in the last place: 2^(y log2 |x|), with the sign of x if y is
// odd.
inline float pow_(float x, float y) {
    const float size = __builtin_fabsf(x), of_y = __builtin_fabsf(y);
    const double power = double(y) * log2_of(size);
    const float near = float(power), shifted = clamped(near, -152.f, 129.f) + INTEGERS;
    const float n = shifted - INTEGERS, r = float((power - double(n)) * 0.6931471805599453);
    const float inside = exp_of(r, shifted);
    const float all = near < -152.f ? 0.f : near > 129.f ? __builtin_inff() : inside;
    const float found = size == 1.f ? 1.f : y == 0.f ? 1.f : all;
    // y + 2^23 is an integer, whose last bit says whether it is odd; from 2^24 on all are even
    const float ones = of_y < 0x1p23f ? 0x1p23f : 0.f, whole = of_y + ones;
    const u32 odd = of_y >= 0x1p24f ? 0u : as_bits(whole) << 31;
    const float of_whole = as_float(as_bits(found) | (odd & as_bits(x)));
    const float of_negative = size <= 0x1.fffffep127f ? as_float(0x7FC00000) : found;
    const float of_broken = x < 0.f ? of_negative : found;
    const float of_both = whole - ones == of_y ? of_whole : of_broken;
    return x == 1.f ? 1.f : y != y ? y : of_both;
}

// tanh(x), to two units in the last place: near 0 x + x^3 p(x^2), elsewhere 1 - 2 / (exp(2 |x|) +
// 1), which is 1 from 10 on.
inline float tanh_(float x) {
    const float size = __builtin_fabsf(x), square = size * size;
    const float kept = as_float(std::min(as_bits(size), as_bits(10.f)));
    const float p = polynomial(square, 0.0164375789f, -0.0526718125f, 0.133207247f, -0.333329469f);
    const float near = size + size * (square * p);
    const float far = 1.f - 2.f / (exp2_(kept * 2.88539008f) + 1.f);
    return with_sign(size >= 0.55f ? far : near, x);
}

// erf(x), to two units in the last place: near 0 x + x p(x^2), elsewhere 1 - 2^(|x| q(|x|)), which
// is 1 from 4 on.
inline float erf_(float x) {
    const float size = __builtin_fabsf(x), square = size * size;
    const float kept = as_float(std::min(as_bits(size), as_bits(4.f)));
    const float p = polynomial(square, -6.33261167e-4f, 5.05427038e-3f, -0.0268045701f,
                               0.112827703f, -0.376125753f, 0.128379166f);
    const float q = polynomial(kept, 3.10635573e-4f, -4.65408759e-3f, 0.0330743678f, -0.151940778f,
                               -0.91708672f, -1.62812018f);
    const float near = size + size * p, far = 1.f - exp2_(kept * q);
    return with_sign(size >= 0.85f ? far : near, x);
}

inline float sigmoid_(float x) { return 1.f / (1.f + exp_(-x)); }
inline float silu_(float x) { return x / (1.f + exp_(-x)); }
inline float relu_(float x) { return x > 0.f || x != x ? x : 0.f; }
inline float minimum_(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
inline float maximum_(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline i64 minimum_(i64 a, i64 b) { return a < b ? a : b; }
inline i64 maximum_(i64 a, i64 b) { return a > b ? a : b; }
inline bool minimum_(bool a, bool b) { return a && b; }
inline bool maximum_(bool a, bool b) { return a || b; }

}  // namespace
