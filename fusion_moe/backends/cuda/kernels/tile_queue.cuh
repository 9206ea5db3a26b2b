// A dynamic persistent scheduler: each block starts with the tile of its own index, then claims the
// next one from a global counter. Multiprocessors differ in speed. With fixed shares the fast ones
// would idle at the end, and before that they would run so far ahead of the slow ones that the
// cache serves only one of the two.
//
// One thread of a block claims tiles from the counter, and tells the others in shared memory. It
// claims one ahead, so that nobody waits for the counter. What it tells is a tile's number, or the
// tile: finding it takes as long as a K block, and consumers would do nothing else meanwhile.
#pragma once

#include "pipeline.cuh"

namespace {

// DEPTH: how many tiles the claiming thread may be ahead of the last reading warp. Told: what it
// tells of each.
template <int DEPTH, class Told = i32>
class TileQueue {
  public:
    // Called by all threads before __syncthreads(). warps: number of reading warps.
    __device__ __forceinline__ void init(u32 warps) {
        if (threadIdx.x < DEPTH)
            mbarrier_init(full_[threadIdx.x], 0, 1), mbarrier_init(empty_[threadIdx.x], warps);
    }

    // Returns the tiles after the block's own, or, if they are found, that one first. All reading
    // warps must make the same number of calls, and stop after the first that is no work tile.
    class Reader {
      public:
        __device__ __forceinline__ explicit Reader(TileQueue& queue) : queue_(queue) {}

        // Called by a whole warp.
        __device__ __forceinline__ Told next() {
            mbarrier_wait(queue_.full_[asked_ % DEPTH], asked_ / DEPTH % 2);
            const Told told = queue_.told_[asked_ % DEPTH];
            mbarrier_arrive(queue_.empty_[asked_ % DEPTH]);
            ++asked_;
            return told;
        }

      protected:
        TileQueue& queue_;
        u32 asked_ = 0;
    };

    // The reader of the warp whose thread claims tiles.
    class Taker : Reader {
      public:
        // counter: tiles that the grid has claimed beyond the blocks' own; 0 before the kernel.
        // takes: whether this thread claims.
        __device__ __forceinline__ Taker(TileQueue& queue, i32* counter, bool takes)
            : Reader(queue), counter_(counter), takes_(takes) {
            take();
        }

        // Called by a whole warp.
        __device__ __forceinline__ i32 next() {
            if (takes_) tell(ahead_);
            __syncwarp();
            const i32 number = Reader::next();
            take();
            return number;
        }

        // Returns tiles, of which find(number) finds one: by the whole warp whose first thread
        // claims, which then tells the others.
        template <class Find>
        __device__ __forceinline__ Told next(Find find) {
            if (__any_sync(WHOLE_WARP, takes_)) {
                const bool own = this->asked_ == 0;
                const Told found = find(__shfl_sync(WHOLE_WARP, own ? i32(blockIdx.x) : ahead_, 0));
                if (takes_) tell(found);
                if (!own) take();
            }
            __syncwarp();
            return Reader::next();
        }

      private:
        __device__ __forceinline__ void tell(const Told& it) {
            const u32 place = this->asked_ % DEPTH;
            mbarrier_wait(this->queue_.empty_[place], this->asked_ / DEPTH % 2 ^ 1);
            this->queue_.told_[place] = it;
            mbarrier_arrive_thread(this->queue_.full_[place]);
        }
        __device__ __forceinline__ void take() {
            if (takes_) ahead_ = i32(gridDim.x) + atomicAdd(counter_, 1);
        }

        i32* counter_;
        bool takes_;
        i32 ahead_ = 0;
    };

  private:
    Told told_[DEPTH];
    u64 full_[DEPTH], empty_[DEPTH];
};

}  // namespace
