// What the kernels of a step tell each other, in memory of the GPU.
#pragma once

#include "flags.cuh"
#include "request_ring.cuh"

namespace {

constexpr i32 NOWHERE = -1, ON_CPU = -2;  // in place of a slot

// Of all layers of a model.
struct Exchange {
    u64 epoch;     // how often rows were handed over
    u64 seen;      // twice the number of the last that ended, plus one if it was answered
    i32 broken;    // whether the worker failed: nothing is handed over any more
    i32 agreed;    // one more than the version of the table that a step reads; 0 between steps
    i32 agreeing;  // blocks that have read it
    u32 ticket;    // blocks that have handed over theirs
};

// Of a layer.
struct Counts {
    i32 rows;  // that this step hands over
    // of all steps: ids; experts; nanoseconds
    u64 steps, hits, copied_rows, computed_rows, copied, computed, waited;
};

struct Step {
    Exchange* exchange;
    Counts* counts;
    i32* placed;  // [ids]: the slot of each, or NOWHERE
    i32* handed;  // [ids]: the number of the row of each that is handed over, or NOWHERE
    i32* uses;    // [experts]: rows so far
};

}  // namespace
