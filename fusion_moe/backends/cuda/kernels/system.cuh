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

// What other blocks or streams write meanwhile.
__device__ __forceinline__ i32 load_flag(const i32* p) {
    i32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

__device__ __forceinline__ void store_flag(i32* p, i32 x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// Has a line of memory brought into L2, without waiting for it.
__device__ __forceinline__ void prefetch(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// What a counter of this GPU was before one is added.
__device__ __forceinline__ u32 add_ticket(u32* p) {
    u32 x;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
    return x;
}

}  // namespace
