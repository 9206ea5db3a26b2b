// Matrix instructions that every target since compute capability 8.0 has.
#pragma once

#include "numbers.cuh"

namespace {

// d [16, 8] += a [16, 16] b [16, 8]: numbers of type T, bf16 or f16, accumulators in float32.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

#define MMA(T)                                                                              \
    template <>                                                                             \
    __device__ __forceinline__ void mma_16x8x16<T>(float (&d)[4], const u32(&a)[4], u32 b0, \
                                                   u32 b1) {                                \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #T "." #T                     \
                     ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"              \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));       \
    }
MMA(bf16)
MMA(f16)
#undef MMA

}  // namespace
