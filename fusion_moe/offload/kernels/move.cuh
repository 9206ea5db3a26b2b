// What a step moves between the host and the GPU.
#pragma once

#include "experts.cuh"
#include "handover.cuh"

namespace {

// The first blocks copy experts into the spare slots, which follow `cached` others; the last ones
// hand rows over.
template <class Id, class Weight>
struct Move {
    i64 copying, cached;  // blocks, slots
    const Parts* parts;
    HandOver<Id, Weight> rows;

    __device__ __forceinline__ void run() const {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        const Step& step = rows.step;
        if (blockIdx.x >= copying) return rows.run(i32(copying));
        parts->copy(step.counts->copies, cached, copying, [&](i64 i) { return step.copied[i]; });
    }
};

}  // namespace
