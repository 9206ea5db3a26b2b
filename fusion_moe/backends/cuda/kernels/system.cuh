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

__device__ __forceinline__ void store_relaxed_system(u64* p, u64 x) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

// What no kernel writes meanwhile.
__device__ __forceinline__ i64 load_constant(const i64* p) {
    i64 x;
    asm("ld.global.nc.s64 %0, [%1];" : "=l"(x) : "l"(p));
    return x;
}

// Words that come one by one.
__device__ __forceinline__ uint2 load_relaxed_system(const uint2* p) {
    uint2 x;
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(p)
                 : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_relaxed_system(const uint4* p) {
    uint4 x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_relaxed_system(uint2* p, uint2 x) {
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(x.x), "r"(x.y)
                 : "memory");
}

__device__ __forceinline__ void store_relaxed_system(uint4* p, uint4 x) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
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

// Adds one to a counter of this GPU.
__device__ __forceinline__ void add_relaxed(u64* p) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(p) : "memory");
}

// The same, and what it was before.
__device__ __forceinline__ u32 add_ticket(u32* p) {
    u32 x;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
    return x;
}

}  // namespace
