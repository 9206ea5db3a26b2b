// What producers and consumers share: barriers in shared memory, copies that arrive at them,
// registers.
#pragma once

#include "numbers.cuh"

namespace {

__device__ __forceinline__ u32 shared_address(const void* p) {
    return u32(__cvta_generic_to_shared(p));
}

// The lanes that arrive at a barrier for their warp. For compute-sanitizer's racecheck all of them
// do: it takes what a lane has done to be ordered by a barrier if that lane arrives, and not if
// another one does that has waited for it (tests/gpu/cuda_sanitized.py).
#ifdef EVERY_LANE_ARRIVES
constexpr u32 ARRIVING = 32;
#else
constexpr u32 ARRIVING = 1;
#endif

// warps, threads: how many warps and single threads will arrive.
__device__ __forceinline__ void mbarrier_init(u64& barrier, u32 warps, u32 threads = 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(warps * ARRIVING + threads)
                 : "memory");
}

// Called by a whole warp; covers everything that its lanes have done before.
__device__ __forceinline__ void mbarrier_arrive(u64& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVING)
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier))
                     : "memory");
}

// Barriers that this thread has made can be used by the other blocks of a cluster, once it has been
// through a barrier with them, and by copies that they begin.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Waits until the phase with this parity is complete.
__device__ __forceinline__ void mbarrier_wait(u64& barrier, u32 parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

// A barrier of `threads` threads. They use no other barrier with this number.
__device__ __forceinline__ void named_barrier_sync(i32 number, i32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same, where warps come from different instructions: to `bar.sync` one is promised, and
// compute-sanitizer's synccheck holds to it.
__device__ __forceinline__ void named_barrier_sync_unaligned(i32 number, i32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// 16 bytes from memory to shared memory.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}

// The same, or zeros unless `good`: then nothing is read.
__device__ __forceinline__ void cp_async_16_or_zeros(u32 to, const void* from, bool good) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(good ? 16 : 0)
                 : "memory");
}

// The same if `good`; otherwise nothing is read or written.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, bool good) {
    asm volatile(
        "{.reg .pred q; setp.ne.s32 q, %2, 0; @q cp.async.cg.shared.global.L2::128B [%0], [%1], "
        "16;}" ::"r"(to),
        "l"(from), "r"(int(good))
        : "memory");
}

// What the tensor memory accelerator reads by: a tensor in memory and the box of it that a copy
// takes (runtime/cuda.py).
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// By one thread: the barrier expects an arrival, this one, and so many bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(u64& barrier, u32 bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
        "r"(bytes)
        : "memory");
}

// By one thread: a box from (x, y) on, x in the fastest dimension, swizzled, zeros where there is
// nothing; its bytes arrive at the barrier.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& from, i32 x, i32 y,
                                         u64& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&from), "r"(x), "r"(y), "r"(shared_address(&barrier))
        : "memory");
}

__device__ __forceinline__ void copy_box(u32 to, const TensorMap& from, i32 x, i32 y, i32 z,
                                         u64& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&from), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier))
        : "memory");
}

// The same for all blocks of a cluster, at the same addresses of each one's memory.
template <int CLUSTER>
__device__ __forceinline__ void copy_box_to_cluster(u32 to, const TensorMap& from, i32 x, i32 y,
                                                    i32 z, u64& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&from), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier)),
        "h"(u16((1 << CLUSTER) - 1))
        : "memory");
}

// By one thread: a multiple of 16 bytes, which arrive at the barrier.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u64& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}

// Makes the copies since the last commit one group, for cp_async_wait.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Called by single threads; covers what each has done before.
__device__ __forceinline__ void mbarrier_arrive_thread(u64& barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Waits until at most `Pending` groups of this thread's copies are in flight.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// What threads have written to shared memory, and barriers have made known, becomes visible to the
// tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Clusters: blocks that run at once and reach each other's shared memory.
// -----------------------------------------------

// The number of this block in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of a cluster: none goes on from `wait` before all have come to `arrive`, and it sees
// what they did before.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where in the cluster's shared memory an address of this block's is in another block.
__device__ __forceinline__ u32 in_block(u32 rank, u32 address) {
    u32 found;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(address), "r"(rank));
    return found;
}

__device__ __forceinline__ void store_in_cluster(u32 to, const float* four) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(four[0]),
                 "f"(four[1]), "f"(four[2]), "f"(four[3])
                 : "memory");
}

// mbarrier_arrive and mbarrier_wait where those who arrive are in other blocks.
__device__ __forceinline__ void mbarrier_arrive_in_block(u32 rank, u64& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVING)
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                         in_block(rank, shared_address(&barrier)))
                     : "memory");
}

// The same of those who have only read, in this block's memory: that others see what they wrote
// would take as long as their stores do.
__device__ __forceinline__ void mbarrier_arrive_read(u32 rank, u64& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVING)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                         in_block(rank, shared_address(&barrier)))
                     : "memory");
}

__device__ __forceinline__ void mbarrier_wait_in_cluster(u64& barrier, u32 parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

// How many registers the threads of this warpgroup have from here on: more than at the launch, once
// other warpgroups have fewer; or fewer.
template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// A ring of stages: the current one, and the parity of the phase that its barriers are in.
template <int Stages>
struct PipelineState {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
};

}  // namespace
