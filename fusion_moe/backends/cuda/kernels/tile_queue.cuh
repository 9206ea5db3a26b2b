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
// tells of each, a number or a tile. All reading warps go through the same ones. Schedule: see
// product.cuh; called by whole warps.
template <int DEPTH, class Told = i32>
class TileQueue {
    static constexpr bool NUMBERS = sizeof(Told) == sizeof(i32);

  public:
    // Called by all threads before __syncthreads(). warps: number of reading warps.
    __device__ __forceinline__ void init(u32 warps) {
        if (threadIdx.x < DEPTH)
            mbarrier_init(full_[threadIdx.x], 0, 1), mbarrier_init(empty_[threadIdx.x], warps);
    }

    // Of a reading warp.
    class Reader {
      public:
        __device__ __forceinline__ explicit Reader(TileQueue& queue) : queue_(queue) {}

        // Calls body(tile) for the block's tiles.
        template <class Schedule, class Scheduler, class Body>
        __device__ __forceinline__ void for_all(const Scheduler& scheduler, Body body) {
            if constexpr (NUMBERS)
                for (i32 number = blockIdx.x; Schedule::more(scheduler, number); number = next())
                    body(Schedule::tile(scheduler, number));
            else
                for (Told tile = next(); tile.there(); tile = next()) body(tile);
        }

      protected:
        __device__ __forceinline__ Told next() {
            mbarrier_wait(queue_.full_[asked_ % DEPTH], asked_ / DEPTH % 2);
            const Told told = queue_.told_[asked_ % DEPTH];
            mbarrier_arrive(queue_.empty_[asked_ % DEPTH]);
            ++asked_;
            return told;
        }

        TileQueue& queue_;
        u32 asked_ = 0;
    };

    // The same of the warp whose thread claims tiles, and of those that copy with it.
    class Taker : Reader {
      public:
        // s.tile_counter: tiles that the grid has claimed beyond the blocks' own; 0 before the
        // kernel. takes: whether this thread claims.
        template <class Segment>
        __device__ __forceinline__ Taker(TileQueue& queue, const Segment& s, bool takes)
            : Reader(queue), counter_(s.tile_counter), takes_(takes) {
            take();
        }

        template <class Schedule, class Scheduler, class Body>
        __device__ __forceinline__ void for_all(const Scheduler& scheduler, Body body) {
            if constexpr (NUMBERS) {
                for (i32 number = blockIdx.x; Schedule::more(scheduler, number);
                     number = next_number())
                    body(Schedule::tile(scheduler, number));
            } else {
                for (bool own = true;; own = false) {
                    const Told tile = next_tile<Schedule>(scheduler, own);
                    if (!tile.there()) return;
                    body(tile);
                }
            }
        }

      private:
        __device__ __forceinline__ i32 next_number() {
            if (takes_) tell(ahead_);
            __syncwarp();
            const i32 number = Reader::next();
            take();
            return number;
        }

        // The whole warp whose first thread claims finds the tile, and tells the others.
        template <class Schedule, class Scheduler>
        __device__ __forceinline__ Told next_tile(const Scheduler& scheduler, bool own) {
            if (__any_sync(WHOLE_WARP, takes_)) {
                const i32 number = __shfl_sync(WHOLE_WARP, own ? i32(blockIdx.x) : ahead_, 0);
                const Told found = Schedule::more(scheduler, number)
                                       ? Schedule::tile(scheduler, number)
                                       : Told{{-1}};
                if (takes_) tell(found);
                if (!own) take();
            }
            __syncwarp();
            return Reader::next();
        }

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

// In place of a queue: a cluster of blocks has every so-manieth tile.
template <int CLUSTER>
struct FixedShares {
    __device__ __forceinline__ void init(u32) {}

    template <class... Args>
    __device__ __forceinline__ explicit FixedShares(Args&&...) {}
    template <class Schedule, class Scheduler, class Body>
    __device__ __forceinline__ void for_all(const Scheduler& scheduler, Body body) const {
        for (i32 number = blockIdx.x / CLUSTER; Schedule::more(scheduler, number);
             number += gridDim.x / CLUSTER)
            body(Schedule::tile(scheduler, number));
    }
    using Reader = FixedShares;
    using Taker = FixedShares;
};

}  // namespace
