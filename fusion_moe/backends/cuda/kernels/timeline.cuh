// When multiprocessors begin and end their work tiles: only with TIMELINE defined, which is how
// many marks are kept (cuda_debug=timeline). Without it nothing is compiled.
#pragma once

#include "numbers.cuh"

#ifdef TIMELINE
struct TileMark {
    u64 time;  // ns
    u32 multiprocessor, of;
};

// Read by runtime/timeline.py. The same memory for all launches, so graphs that are replayed mark
// too.
extern "C" {
__device__ struct {
    u64 count;
    TileMark marks[TIMELINE];
} timeline;
}
#endif

namespace {

// Called where a tile begins or ends, by one thread of those that compute it. Nothing is kept in
// registers in between: who reads the marks pairs those of a block and a warpgroup.
__device__ __forceinline__ void mark_tile(bool marks, bool ends) {
#ifdef TIMELINE
    if (!marks) return;
    TileMark mark;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(mark.time));
    asm volatile("mov.u32 %0, %%smid;" : "=r"(mark.multiprocessor));
    mark.of = blockIdx.x << 3 | threadIdx.x / 128 << 1 | u32(ends);
    timeline
        .marks[atomicAdd(reinterpret_cast<unsigned long long*>(&timeline.count), 1ull) % TIMELINE] =
        mark;
#endif
}

}  // namespace
