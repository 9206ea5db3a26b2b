// What blocks and streams of a GPU tell each other.
#pragma once

#include "system.cuh"

namespace {

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

// Adds one to a counter of this GPU, and says what it was before.
__device__ __forceinline__ u32 add_ticket(u32* p) {
    u32 x;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
    return x;
}

}  // namespace
