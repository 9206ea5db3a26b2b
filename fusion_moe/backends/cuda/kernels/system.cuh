// Flags that a GPU shares with the CPU or with other GPUs.
#pragma once

#include "numbers.cuh"

namespace {

__device__ __forceinline__ u64 load_acquire_system(const u64* p) {
    u64 x;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return x;
}

__device__ __forceinline__ void store_release_system(u64* p, u64 x) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

__device__ __forceinline__ u64 load_relaxed_system(const u64* p) {
    u64 x;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return x;
}

// Nanoseconds, for all multiprocessors.
__device__ __forceinline__ u64 now() {
    u64 x;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x)::"memory");
    return x;
}

}  // namespace
