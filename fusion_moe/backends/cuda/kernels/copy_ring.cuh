// A ring of stages in shared memory that all threads of a team fill (`cp.async`) and read, on GPUs
// whose warps cannot exchange registers: nobody only copies.
#pragma once

#include "team.cuh"

namespace {

// READ: how many stages are read between two calls of `next`: 2 if a team goes on with one after
// the call that makes the next one complete. The copies of the others are in flight.
template <int STAGES, int READ = 1, class Team = ::Team<>>
class CopyRing {
    static constexpr int AHEAD = STAGES - READ;
    static_assert(AHEAD >= 1, "copies of a stage at least are in flight");

  public:
    // Begins the copies of the first K blocks. copy(stage, kb): those of a thread; past the last K
    // block none, and an empty group is in flight. No thread of the team still reads a stage.
    template <class Copy>
    __device__ __forceinline__ void begin(Copy copy) {
        reading_ = STAGES - 1, filled_ = 0;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) fill(i, copy);
    }

    // The next K block is complete, for all threads, in `stage()`. All have read the stage that is
    // filled now. By all threads of the team, once for each K block.
    template <class Copy>
    __device__ __forceinline__ void next(Copy copy) {
        cp_async_wait<AHEAD - 1>();
        Team::sync();
        reading_ = reading_ + 1 == STAGES ? 0 : reading_ + 1;
        fill(reading_ < READ ? reading_ + AHEAD : reading_ - READ, copy);
    }

    __device__ __forceinline__ i32 stage() const { return reading_; }

  private:
    i32 reading_, filled_;  // a stage; K blocks whose copies have begun

    template <class Copy>
    __device__ __forceinline__ void fill(i32 stage, Copy copy) {
        copy(stage, filled_);
        cp_async_commit();
        ++filled_;
    }
};

}  // namespace
