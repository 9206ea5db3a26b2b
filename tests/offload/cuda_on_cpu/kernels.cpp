// The kernels of a step as functions of the numbers that they are launched with. Blocks of one
// thread run one after the other.
#include <algorithm>
#include <cstring>

#include "handover.cuh"
#include "misses.cuh"
#include "put.cuh"

namespace {

template <class S>
S of_numbers(const i64* numbers) {
    S s;
    std::memcpy(&s, numbers, sizeof(s));
    return s;
}

i32 memory[1 << 16], copying[1 << 8];

// After `copying` and the parts: what is to be copied, which experts.cpp does, and handing over.
template <class Id, class Weight>
const i32* begin(const i64* numbers) {
    struct Begin {
        i64 copying, parts;
        FindMisses<Id> misses;
        HandOver<Id, Weight> rows;
    };
    const auto s = of_numbers<Begin>(numbers);
    gridDim.x = 5;
    for (blockIdx.x = 0; blockIdx.x < 5; ++blockIdx.x) {
        const auto found = s.misses.run(memory);
        copying[0] = found.copied;
        std::copy(found.order, found.order + found.copied, copying + 1);
        if (blockIdx.x >= 2) s.rows.run(2, found.rows, found.ids);
    }
    blockIdx.x = 0, gridDim.x = 1;
    return copying;
}

// Of 3 blocks.
template <i32 SLOTS, i32 WIDTH>
void end(const i64* numbers) {
    const auto s = of_numbers<EndStep<bf16, float, SLOTS, WIDTH>>(numbers);
    gridDim.x = 3;
    for (blockIdx.x = 0; blockIdx.x < 3; ++blockIdx.x) s.run();
    blockIdx.x = 0, gridDim.x = 1;
}

}  // namespace

extern "C" {

const i32* begin_step_i32_float(const i64* numbers) { return begin<i32, float>(numbers); }
const i32* begin_step_i64_float(const i64* numbers) { return begin<i64, float>(numbers); }
void end_step_float_3_64(const i64* numbers) { end<3, 64>(numbers); }
void end_step_float_8_128(const i64* numbers) { end<8, 128>(numbers); }
void put_rows(const i64* numbers) { of_numbers<PutRows>(numbers).run(); }

}  // extern "C"
