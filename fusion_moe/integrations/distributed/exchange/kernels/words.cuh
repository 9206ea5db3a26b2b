// What ranks write to each other's memory, and read of their own.
#pragma once

#include "system.cuh"

namespace {

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

__device__ __forceinline__ void store_relaxed_system(u64* p, u64 x) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

// What no kernel writes meanwhile.
__device__ __forceinline__ i64 load_constant(const i64* p) {
    i64 x;
    asm("ld.global.nc.s64 %0, [%1];" : "=l"(x) : "l"(p));
    return x;
}

// Adds one to a counter of this GPU.
__device__ __forceinline__ void add_relaxed(u64* p) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(p) : "memory");
}

}  // namespace
