// What kernels that share flags use of system.cuh and the headers below it, for a CPU: a block
// is one thread.
#pragma once

#include <time.h>

#include <chrono>
#include <thread>

#include "memory.cuh"

#define __shared__ thread_local

namespace {

struct Place {
    i32 x;
};
thread_local Place threadIdx{0}, blockIdx{0}, blockDim{1}, gridDim{1};

inline void __syncthreads() {}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline i32 atomicAdd(i32* p, i32 by) { return __atomic_fetch_add(p, by, __ATOMIC_RELAXED); }
inline void atomicAdd(u64* p, u64 by) { __atomic_fetch_add(p, by, __ATOMIC_RELAXED); }
inline i32 atomicCAS(i32* p, i32 old, i32 x) {
    __atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
}

enum Fault : u64 { BAD_END = 1, BAD_ID = 2, NO_ANSWER = 5, NO_RANK = 6 };
inline void report(i64* word, Fault fault, i32 place, i32 value) {
    __atomic_store_n(reinterpret_cast<u64*>(word), u64(fault) << 56 | u64(place) << 32 | u32(value),
                     __ATOMIC_RELAXED);
}

inline float widen(float x) { return x; }
template <>
inline float narrow<float>(float x) {
    return x;
}
template <int V, class T>
void store_vector(T* p, const Vector<T, V>& x) {
    *reinterpret_cast<Vector<T, V>*>(p) = x;
}
inline u64 load_acquire_system(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 load_relaxed_system(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void (*before_release)() = nullptr;  // what a test does then
inline void store_release_system(u64* p, u64 x) {
    if (before_release) before_release();
    __atomic_store_n(p, x, __ATOMIC_RELEASE);
}
inline int __ffs(u32 x) { return __builtin_ffs(i32(x)); }
inline u64 now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return u64(t.tv_sec) * 1000000000 + u64(t.tv_nsec);
}

// Runs a kernel's blocks, each in a thread, until all have ended.
template <class Body>
void launch(i32 blocks, Body body) {
    std::thread all[8];
    for (i32 b = 0; b < blocks; ++b)
        all[b] = std::thread([=] {
            blockIdx.x = b, gridDim.x = blocks;
            body();
        });
    for (i32 b = 0; b < blocks; ++b) all[b].join();
}

}  // namespace
