// What readers of weights (fusion_moe/backends/cuda/kernels/weights/) use of the headers memory.cuh
// and numbers.cuh, which are PTX, for a CPU: a lane's part of a tile can be decoded there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __noinline__

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using std::max, std::min;

namespace {

struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

template <class To, class From>
To as(From x) {
    To found;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&found, &x, sizeof(x));
    return found;
}

inline float __uint_as_float(u32 x) { return as<float>(x); }
inline u32 __float_as_uint(float x) { return as<u32>(x); }
inline u32 __float2uint_rn(float x) { return u32(std::nearbyint(x)); }
inline float widen(bf16 x) { return as<float>(u32(x.bits) << 16); }
inline float widen(f16 x) { return float(as<_Float16>(x.bits)); }

// To nearest, ties to even. What pairs of numbers make fits in a float before it is rounded.
template <class T>
T narrow(float x);
template <>
inline f16 narrow<f16>(float x) {
    return {as<u16>(_Float16(x))};
}
template <>
inline bf16 narrow<bf16>(float x) {
    const u32 bits = as<u32>(x);
    return {u16(std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

template <class T>
u32 narrow_pair(float low, float high) {
    return narrow<T>(low).bits | u32(narrow<T>(high).bits) << 16;
}

inline u16 half_word(u32 word, bool upper) { return word >> 16 * upper; }

inline void halves_twice(u32& low, u32& high, u32 word) {
    low = (word & 0xFFFF) * 0x10001u, high = (word >> 16) * 0x10001u;
}

template <class T>
u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 found = 0;
    for (int i = 0; i < 32; i += 16)
        found |= u32(narrow<T>(float(double(widen(T{u16(a >> i)})) * widen(T{u16(b >> i)}) +
                                     widen(T{u16(c >> i)})))
                         .bits)
                 << i;
    return found;
}
template <class T>
u32 multiply_pair(u32 a, u32 b) {
    return fma_pair<T>(a, b, 0x80008000u);
}

inline u32 and_or(u32 x, u32 mask, u32 y) { return (x & mask) | y; }
inline u32 __funnelshift_l(u32 low, u32 high, u32 by) {
    return u32(((u64(high) << 32 | low) << by) >> 32);
}
inline u32 __byte_perm(u32 low, u32 high, u32 select) {
    const u64 bytes = u64(high) << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= u32(bytes >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
    return found;
}
inline u32 __vminu2(u32 a, u32 b) {
    return min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16;
}
inline u32 __vmaxu2(u32 a, u32 b) {
    return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16;
}

inline float e8m0_(u32 byte) {
    return __uint_as_float(byte == 255 ? 0x7FC00000 : max(byte << 23, 0x400000u));
}
inline u32 half_of(u8 code) {
    if ((code & 0x7F) == 0x7F) return 0x7FFF;
    return narrow<f16>(widen(f16{u16((code & 0x80) << 8 | (code & 0x7F) << 7)}) * 256.f).bits;
}
inline u32 halves_of(u16 codes) { return half_of(u8(codes)) | half_of(u8(codes >> 8)) << 16; }
inline float e4m3_(u8 code) { return widen(f16{u16(half_of(code))}); }

template <class T>
T read(const u8* p) {
    T found;
    std::memcpy(&found, p, sizeof(T));
    return found;
}
inline uint4 load_no_allocate(const u8* p) { return read<uint4>(p); }
inline uint2 load_no_allocate_8(const u8* p) { return read<uint2>(p); }
template <int BYTES>
u32 load_bytes(const u8* p) {
    u32 found = 0;
    std::memcpy(&found, p, BYTES);
    return found;
}
template <int BYTES>
u32 load_number(const u8* p) {
    return load_bytes<BYTES>(p);
}

template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
    T at[V];
};
template <int V, class T>
Vector<T, V> load_vector(const T* p) {
    return *reinterpret_cast<const Vector<T, V>*>(p);
}

}  // namespace
