// Threads of a block that work on their own.
#pragma once

#include "pipeline.cuh"

namespace {

// One of COUNT teams of THREADS threads that a block has. number: of a thread's team; thread: its
// number in that.
template <int COUNT = 1, int THREADS = 0>
struct Team {
    static __device__ __forceinline__ u32 number() {
        return COUNT == 1 ? 0 : threadIdx.x / THREADS;
    }
    static __device__ __forceinline__ u32 thread() {
        return COUNT == 1 ? threadIdx.x : threadIdx.x % THREADS;
    }
    static __device__ __forceinline__ void sync() {
        if constexpr (COUNT == 1)
            __syncthreads();
        else
            named_barrier_sync(1 + number(), THREADS);
    }
};

}  // namespace
