// What codes.cuh and block_copies.cuh use of the headers below them, for a CPU: a block is 256
// threads, a grid one block.
#pragma once

#include <thread>
#include <vector>

#include "barrier.h"
#include "memory.cuh"

#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

namespace {

constexpr u32 WHOLE_WARP = 0xFFFFFFFF;
thread_local struct {
    i32 x;
} threadIdx;
struct {
    i32 x;
} blockIdx{0}, gridDim{1};

Barrier block(256);

struct Warp {
    Barrier barrier{32};
    u32 x[32];
} warps[8];

inline void __syncthreads() { block.wait(); }
// Two warps have a barrier of their own.
inline void named_barrier_sync(i32 number, i32) {
    static Barrier pairs[]{Barrier(64), Barrier(64), Barrier(64), Barrier(64)};
    pairs[number - 1].wait();
}
inline void __builtin_assume(bool) {}

template <class Reduce>
u32 among_lanes(u32 x, Reduce reduce) {
    Warp& warp = warps[threadIdx.x / 32];
    warp.x[threadIdx.x % 32] = x;
    warp.barrier.wait();
    const u32 found = reduce(warp.x);
    warp.barrier.wait();
    return found;
}
inline u32 __shfl_xor_sync(u32, u32 x, int by) {
    return among_lanes(x, [&](const u32* of) { return of[(threadIdx.x ^ by) % 32]; });
}
inline u32 __shfl_sync(u32, u32 x, int lane, int width = 32) {
    return among_lanes(
        x, [&](const u32* of) { return of[threadIdx.x % 32 / width * width + lane % width]; });
}
inline u32 __reduce_max_sync(u32, u32 x) {
    return among_lanes(x, [](const u32* of) { return *std::max_element(of, of + 32); });
}
inline i32 __reduce_add_sync(u32, i32 x) {
    return among_lanes(x, [](const u32* of) {
        u32 sum = 0;
        for (int i = 0; i < 32; ++i) sum += of[i];
        return sum;
    });
}

template <class Body>
void on_threads(Body body) {
    std::vector<std::thread> all;
    for (i32 i = 0; i < 256; ++i) all.emplace_back([=] { threadIdx.x = i, body(); });
    for (auto& thread : all) thread.join();
}

template <class Body>
void for_all_warps(i64 count, Body body) {
    for (i64 i = threadIdx.x / 32; i < count; i += 8) body(i);
}
inline void check_end(const i32*, i64, i64, i64*) {}

inline float __fdiv_rn(float a, float b) { return a / b; }

// To nearest, ties to even; NaN stays NaN, what is beyond 448 becomes it.
inline u16 e4m3_of(float x) {
    const u32 bits = __float_as_uint(x), size = bits & 0x7FFFFFFF, sign = bits >> 31 << 7;
    const u32 normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3);
    const u32 code = std::fabs(x) < 0x1p-6f ? u32(std::nearbyint(std::fabs(x) * 512)) : normal;
    return u16(sign | (x != x ? 0x7F : min(code, 0x7Eu)));
}

template <int V, class T>
void store_vector(T* p, const Vector<T, V>& x) {
    std::memcpy(p, &x, sizeof(x));
}

template <int V>
void store_if(void* p, const u32 (&x)[V], bool good) {
    if (good) std::memcpy(p, x, sizeof(x));
}

template <class T>
struct Eight {
    T at[8];
};
template <class T>
Eight<T> load_eight(const T* p) {
    Eight<T> found;
    std::memcpy(&found, p, sizeof(found));
    return found;
}

}  // namespace
