// What e2m1_copies.cuh uses of block_copies.cuh and the headers below it, for a CPU: a warp is 32
// threads.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "barrier.h"
#include "memory.cuh"

namespace {

constexpr u32 WHOLE_WARP = 0xFFFFFFFF;
thread_local struct {
    i32 x;
} threadIdx;
Barrier lanes(32);
u32 of_lane[32];

template <class Reduce>
u32 among_lanes(u32 x, Reduce reduce) {
    of_lane[threadIdx.x] = x;
    lanes.wait();
    const u32 found = reduce();
    lanes.wait();
    return found;
}
inline u32 __shfl_xor_sync(u32, u32 x, i32 by) {
    return among_lanes(x, [&] { return of_lane[threadIdx.x ^ by]; });
}
inline float __shfl_xor_sync(u32 lanes, float x, i32 by) {
    return __uint_as_float(__shfl_xor_sync(lanes, __float_as_uint(x), by));
}
inline u32 __reduce_max_sync(u32, u32 x) {
    return among_lanes(x, [&] { return *std::max_element(of_lane, of_lane + 32); });
}

// A block is one warp.
constexpr struct {
    i32 x;
} blockDim{32};
#define __shared__ static
inline void __syncthreads() { lanes.wait(); }
inline void __threadfence() {}
inline u32 atomicAdd(u32* p, u32 by) { return std::atomic_ref(*p).fetch_add(by); }
inline void atomicMax(u32* p, u32 x) {
    std::atomic_ref at(*p);
    for (u32 found = at; found < x && !at.compare_exchange_weak(found, x);) {
    }
}

template <class Body>
void for_all_warps(i64 count, Body body) {
    for (i64 i = 0; i < count; ++i) body(i);
}

template <class Body>
void on_lanes(Body body) {
    std::vector<std::thread> all;
    for (i32 lane = 0; lane < 32; ++lane) all.emplace_back([=] { threadIdx.x = lane, body(); });
    for (auto& thread : all) thread.join();
}

template <int V, class T>
void store_vector(T* p, const Vector<T, V>& x) {
    std::memcpy(p, &x, sizeof(x));
}

inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// Of numbers whose sum a double holds.
inline float __fmaf_rd(float a, float b, float c) {
    const double sum = double(a) * b + c;
    const float near = float(sum);
    return near > sum ? std::nextafter(near, -INFINITY) : near;
}

// To nearest, ties to even; NaN is 0x7F. For numbers from 2^-9 to 448.
inline u16 e4m3_pair(float low, float) {
    const u32 bits = __float_as_uint(low);
    const u32 normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return u16(low != low ? 0x7F : low < 0x1p-6f ? u32(std::nearbyint(low * 512)) : normal);
}

template <class T>
struct Bits {
    static constexpr int WORDS = 8;
    u32 at[WORDS];

    Bits() = default;
    explicit Bits(const float (&x)[8]) { std::memcpy(at, x, sizeof(x)); }
    float number(int v) const { return __uint_as_float(at[v]); }
    static u32 magnitude(u32 word) { return word & 0x7FFFFFFF; }
};

template <>
struct Bits<bf16> {
    static constexpr int WORDS = 4;
    u32 at[WORDS];

    Bits() = default;
    explicit Bits(const float (&x)[8]) {
        for (int w = 0; w < WORDS; ++w) at[w] = narrow_pair<bf16>(x[2 * w], x[2 * w + 1]);
    }
    float number(int v) const { return widen(bf16{u16(at[v / 2] >> v % 2 * 16)}); }
    static u32 magnitude(u32 word) { return word & 0x7FFF7FFF; }
};

template <class T, int COUNT>
u32 largest_of(const Bits<T>* x) {
    u32 most = 0;
    for (int i = 0; i < 8 * COUNT; ++i)
        most = max(most, __float_as_uint(x[i / 8].number(i % 8)) & 0x7FFFFFFF);
    return most;
}

}  // namespace
