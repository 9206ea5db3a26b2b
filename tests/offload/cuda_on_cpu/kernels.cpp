// The kernels of a step as functions of the numbers that they are launched with. Blocks of one
// thread run one after the other.
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

template <class Id>
void find(const i64* numbers) {
    static i32 memory[1 << 16];
    of_numbers<FindMisses<Id>>(numbers).run(memory);
}

// After `copying`, `cached` and the parts, which experts.cpp copies.
template <class Id, class Weight>
void hand_over(const i64* numbers) {
    const auto s = of_numbers<HandOver<Id, Weight>>(numbers + 3);
    gridDim.x = 5;
    for (blockIdx.x = 2; blockIdx.x < 5; ++blockIdx.x) s.run(2);
    blockIdx.x = 0, gridDim.x = 1;
}

}  // namespace

extern "C" {

void find_misses_i32(const i64* numbers) { find<i32>(numbers); }
void find_misses_i64(const i64* numbers) { find<i64>(numbers); }
void move_i32_float(const i64* numbers) { hand_over<i32, float>(numbers); }
void move_i64_float(const i64* numbers) { hand_over<i64, float>(numbers); }
void await_rows(const i64* numbers) { of_numbers<Await>(numbers).run(); }
void put_rows(const i64* numbers) { of_numbers<PutRows>(numbers).run(); }

}  // extern "C"
