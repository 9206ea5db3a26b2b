// Dynamic persistent tiles: which work tiles a block has, where none has a fixed share. The one of
// its own number, then the first that nobody has taken. Multiprocessors differ in speed: with fixed
// shares the fast ones wait at the end, and before that are far ahead of the slow ones, where
// nothing in the cache serves both.
//
// One thread of the block takes, from a counter in memory, and tells the others in shared memory.
// It takes ahead, so that nobody waits for the counter.
#pragma once

#include "pipeline.cuh"

namespace {

// DEPTH: how many numbers the thread that takes may be ahead of the last warp that reads.
template <int DEPTH>
class TileQueue {
  public:
    // By all threads of a block, before a barrier. warps: that read.
    __device__ __forceinline__ void init(u32 warps) {
        if (threadIdx.x < DEPTH)
            mbarrier_init(full_[threadIdx.x], 0, 1), mbarrier_init(empty_[threadIdx.x], warps);
    }

    // The numbers after the block's own. Every reading warp asks for as many; the first number that
    // is no work tile is the last to ask for.
    class Reader {
      public:
        __device__ __forceinline__ explicit Reader(TileQueue& queue) : queue_(queue) {}

        // By a whole warp.
        __device__ __forceinline__ i32 next() {
            mbarrier_wait(queue_.full_[asked_ % DEPTH], asked_ / DEPTH % 2);
            const i32 number = queue_.number_[asked_ % DEPTH];
            mbarrier_arrive(queue_.empty_[asked_ % DEPTH]);
            ++asked_;
            return number;
        }

      protected:
        TileQueue& queue_;
        u32 asked_ = 0;
    };

    // A reader in the warps of the thread that takes.
    class Taker : Reader {
      public:
        // counter: how many tiles the grid has taken beyond the blocks' own; 0 before the kernel.
        // takes: whether it is this thread.
        __device__ __forceinline__ Taker(TileQueue& queue, i32* counter, bool takes)
            : Reader(queue), counter_(counter), takes_(takes) {
            take();
        }

        // By a whole warp.
        __device__ __forceinline__ i32 next() {
            if (takes_) {
                const u32 place = this->asked_ % DEPTH;
                mbarrier_wait(this->queue_.empty_[place], this->asked_ / DEPTH % 2 ^ 1);
                this->queue_.number_[place] = ahead_;
                mbarrier_arrive_thread(this->queue_.full_[place]);
            }
            __syncwarp();
            const i32 number = Reader::next();
            take();
            return number;
        }

      private:
        __device__ __forceinline__ void take() {
            if (takes_) ahead_ = i32(gridDim.x) + atomicAdd(counter_, 1);
        }

        i32* counter_;
        bool takes_;
        i32 ahead_ = 0;
    };

  private:
    i32 number_[DEPTH];
    u64 full_[DEPTH], empty_[DEPTH];
};

}  // namespace
