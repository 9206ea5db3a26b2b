// Matrix instructions that every target since compute capability 8.0 has.
#pragma once

#include "numbers.cuh"

namespace {

// d [16, 8] += a [16, 16] b [16, 8]: numbers of type T, bf16 or f16, accumulators in float32.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

#define MMA(T, K)                                                                           \
    template <>                                                                             \
    __device__ __forceinline__ void mma_16x8x16<T>(float (&d)[4], const u32(&a)[4], u32 b0, \
                                                   u32 b1) {                                \
        asm volatile("mma.sync.aligned.m16n8k" #K ".row.col.f32." #T "." #T                 \
                     ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"              \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));       \
    }
MMA(bf16, 16)
MMA(f16, 16)

#if __CUDA_ARCH__ >= 890
struct e4m3 {
    u8 bits;
};

MMA(e4m3, 32)  // of codes, two in place of each number: d [16, 8] += a [16, 32] b [32, 8]
#endif
#undef MMA

// Loads four matrices of 8 rows of 16 bytes from shared memory. Each lane says where one row lies,
// and lane 4 r + c gets word c of row r of each matrix; or, transposed, the c-th pair of numbers of
// 16 bits of column r.
template <bool TRANSPOSED = false>
__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(row));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(row));
}

// Transposes a matrix of 8 x 8 numbers of 16 bits, of which lane 4 r + c has the c-th pair of row
// r.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
    return found;
}

// Stores four matrices of 8 x 8 numbers of 16 bits transposed, to shared memory. A lane has a pair
// of each matrix, and `to` is where one row of one of them begins.
__device__ __forceinline__ void store_matrices_transposed(u32 to, const u32 (&pair)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
                 "r"(pair[0]), "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                 : "memory");
#else
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 row = __shfl_sync(0xFFFFFFFF, to, 8 * i + lane / 4);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(transposed(pair[i]))
                     : "memory");
    }
#endif
}

}  // namespace
