// What the kernels of a step tell each other, in memory of the GPU.
#pragma once

#include "mailbox.cuh"
#include "system.cuh"

namespace {

constexpr i32 NOWHERE = -1, ON_CPU = -2;  // in place of a slot

// Of all layers of a model.
struct Exchange {
    u64 epoch;   // how often rows were handed over
    i32 broken;  // whether the worker failed: nothing is handed over any more
    u32 ticket;  // blocks that have handed over theirs
};

// Of a layer.
struct Counts {
    i32 copies;  // experts that this step copies
    i32 rows;    // rows that it hands over
    // of all steps: ids; experts; nanoseconds
    u64 steps, hits, copied_rows, computed_rows, copied, computed, waited;
};

struct Step {
    Exchange* exchange;
    Counts* counts;
    i32* placed;  // [ids]: the slot of each, or NOWHERE
    i32* copied;  // [spares]: the expert that is copied into each
    i32* handed;  // [rows]: the ids whose rows are handed over, by number, in order
    i32* uses;    // [experts]: rows so far
};

}  // namespace
