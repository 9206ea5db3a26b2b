// Loads and stores of vectors, and the order of launches.
#pragma once

#include "numbers.cuh"

namespace {

template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
    T at[V];
};

template <int V, class T>
__device__ __forceinline__ Vector<T, V> load_vector(const T* p) {
    return *reinterpret_cast<const Vector<T, V>*>(p);
}

// To memory that all see, by whole instructions: what is stored member by member, the compiler does
// not always put together again.
template <int V, class T>
__device__ __forceinline__ void store_vector(T* p, const Vector<T, V>& x) {
    if constexpr (sizeof(x) == 16) {
        const uint4& words = reinterpret_cast<const uint4&>(x);
        asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(words.x), "r"(words.y),
                     "r"(words.z), "r"(words.w)
                     : "memory");
    } else if constexpr (sizeof(x) == 8) {
        const uint2& words = reinterpret_cast<const uint2&>(x);
        asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(words.x), "r"(words.y)
                     : "memory");
    } else {
        *reinterpret_cast<Vector<T, V>*>(p) = x;
    }
}

// Stores 8 or 16 bytes if `good`: without a branch.
template <int V>
__device__ __forceinline__ void store_if(void* p, const u32 (&x)[V], bool good) {
    if constexpr (V == 4)
        asm volatile(
            "{.reg .pred q; setp.ne.s32 q, %5, 0; @q st.global.v4.u32 [%0], {%1,%2,%3,%4};}" ::"l"(
                p),
            "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(i32(good))
            : "memory");
    else
        asm volatile(
            "{.reg .pred q; setp.ne.s32 q, %3, 0; @q st.global.v2.u32 [%0], {%1,%2};}" ::"l"(p),
            "r"(x[0]), "r"(x[1]), "r"(i32(good))
            : "memory");
}

// Eight numbers that follow each other in memory, in pieces of 16 bytes, or of 8 if they are bytes.
template <class T>
struct Eight {
    T at[8];
};

template <class T>
__device__ __forceinline__ Eight<T> load_eight(const T* p) {
    constexpr int V = sizeof(T) <= 2 ? 8 : 16 / sizeof(T);
    Eight<T> found;
#pragma unroll
    for (int i = 0; i < 8; i += V) {
        const Vector<T, V> piece = load_vector<V>(p + i);
#pragma unroll
        for (int v = 0; v < V; ++v) found.at[i + v] = piece.at[v];
    }
    return found;
}

template <class T>
__device__ __forceinline__ void store_eight(T* p, const Eight<T>& x) {
    constexpr int V = sizeof(T) <= 2 ? 8 : 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 8; i += V) {
        Vector<T, V> piece;
#pragma unroll
        for (int v = 0; v < V; ++v) piece.at[v] = x.at[i + v];
        store_vector<V>(p + i, piece);
    }
}

// What is read once and by one block: not kept in L1. Not `.nc`: the compiler may move such loads
// past a barrier.
__device__ __forceinline__ uint4 load_no_allocate(const u8* p) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
}

__device__ __forceinline__ uint2 load_no_allocate_8(const u8* p) {
    uint2 x;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}

// A number of 1, 2 or 4 bytes.
#define LOAD_NUMBER(NAME, CACHED)                                                 \
    template <int BYTES>                                                          \
    __device__ __forceinline__ u32 NAME(const u8* p) {                            \
        static_assert(BYTES == 1 || BYTES == 2 || BYTES == 4);                    \
        if constexpr (BYTES == 2) {                                               \
            u16 x;                                                                \
            asm volatile("ld.global" CACHED ".u16 %0, [%1];" : "=h"(x) : "l"(p)); \
            return x;                                                             \
        }                                                                         \
        u32 x;                                                                    \
        if constexpr (BYTES == 1)                                                 \
            asm volatile("ld.global" CACHED ".u8 %0, [%1];" : "=r"(x) : "l"(p));  \
        else                                                                      \
            asm volatile("ld.global" CACHED ".u32 %0, [%1];" : "=r"(x) : "l"(p)); \
        return x;                                                                 \
    }

LOAD_NUMBER(load_number, ".L1::no_allocate")
LOAD_NUMBER(load_bytes, "")  // others of the same sector are read soon
#undef LOAD_NUMBER

// x = the 16 bytes at p where `good`, else x stays. SHARED: p may lie in shared memory.
template <bool SHARED = false>
__device__ __forceinline__ void load_if(uint4& x, const void* p, bool good) {
    if constexpr (!SHARED)
        asm volatile(
            "{.reg .pred q; setp.ne.s32 q, %5, 0; @q ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
            : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
            : "l"(p), "r"(int(good)));
    else if (good)
        x = *static_cast<const uint4*>(p);
}

// Launches of a program overlap: a kernel may start while the one before it ends. What that one
// wrote is read after `griddepcontrol_wait`; `griddepcontrol_launch_dependents` comes after it, so
// that two launches back everything is in memory.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace
