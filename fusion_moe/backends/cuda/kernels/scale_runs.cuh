// dgrad contracts a weight's rows. Where they are in runs with an outer scale each, blocks of them
// are those of one run after the other, the one with the least scale first: accumulators that go
// from one to the next are multiplied by a ratio of at most 1.
#pragma once

#include "weights/reader.cuh"

namespace {

// The weight [N, K] of a Segment whose product contracts N.
template <class Segment>
struct StoredWeight : Segment {
    static constexpr i32 N = Segment::K, K = Segment::N;
};

// The order in which a dgrad takes the runs of contracted rows, by the scales of its group.
template <class Segment>
struct ScaleRuns {
    using Weights = typename Segment::Weights;
    static constexpr i32 COUNT = Segment::SCALE_RUNS, LENGTH = Segment::K / COUNT;
    static constexpr i32 BLOCKS = (LENGTH + 63) / 64;  // of a run
    static_assert((COUNT == 1 || COUNT == 2) && Segment::K % COUNT == 0 && LENGTH % 16 == 0,
                  "a warp's rows are of one run");
    float scale[COUNT];  // of the runs in the order that they are taken in
    bool swapped = false;

    __device__ __forceinline__ ScaleRuns(const Segment& s, i32 group) {
        const StoredWeight<Segment> weight{s};
#pragma unroll
        for (int i = 0; i < COUNT; ++i) scale[i] = Weights::outer(weight, group, i * LENGTH);
        if constexpr (COUNT == 2) {
            swapped = fabsf(scale[1]) < fabsf(scale[0]);
            if (swapped) {
                const float first = scale[0];
                scale[0] = scale[1], scale[1] = first;
            }
        }
    }

    // Where the run that comes i-th begins, and where a block does.
    __device__ __forceinline__ i32 begin(i32 i) const {
        return (swapped ? COUNT - 1 - i : i) * LENGTH;
    }
    __device__ __forceinline__ i32 first_row(i32 kb) const {
        return begin(kb / BLOCKS) + kb % BLOCKS * 64;
    }

    // What accumulators are multiplied by after the run that comes i-th.
    __device__ __forceinline__ float factor(i32 i) const {
        if (i == COUNT - 1) return scale[COUNT - 1] * Weights::RESCALE;
        return scale[COUNT - 1] == 0.f ? 0.f : scale[0] / scale[COUNT - 1];
    }
};

}  // namespace
