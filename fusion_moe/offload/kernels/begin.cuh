// How a step begins.
#pragma once

#include "experts.cuh"
#include "handover.cuh"
#include "misses.cuh"

namespace {

// All blocks find out what is missing. The first ones copy experts into the spare slots, which
// follow the others; the last ones hand rows over.
template <class Id, class Weight>
struct BeginStep {
    i64 copying;  // blocks
    const Parts* parts;
    FindMisses<Id> misses;
    HandOver<Id, Weight> rows;

    // memory: of FindMisses
    __device__ __forceinline__ void run(i32* memory) const {
        const auto found = misses.run(memory);
        if (found.copied + found.rows == 0) return;
        if (blockIdx.x >= copying) return rows.run(i32(copying), found.rows, found.ids);
        parts->copy(
            found.copied, copying, [&](i64 i) { return found.order[i]; },
            [&](i64 i) { return misses.cached + i; });
    }
};

}  // namespace
