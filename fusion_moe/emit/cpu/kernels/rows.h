// Rows and groups: checks before memory is touched, the counting sort of `route`, loops over rows.
//
// What a check finds wrong makes the kernel return BAD without writing; the caller then evaluates the reference, which raises.
#pragma once

#include <algorithm>
#include <atomic>

#include "numbers.h"

namespace {

enum Result : int { GOOD = 0, BAD = 1 };

// Ends that never decrease and lie in 0..rows.
inline bool good_ends(const i32* ends, i64 groups, i64 rows) {
    i64 before = 0;
    for (i64 g = 0; g < groups; ++g) {
        if (ends[g] < before || ends[g] > rows) return false;
        before = ends[g];
    }
    return true;
}

template <class Index>
bool all_below(const Index* index, i64 count, i64 size) {
    bool good = true;
    for (i64 i = 0; i < count; ++i) good = good && index[i] >= 0 && index[i] < size;
    return good;
}

// ids [T, slots] -> ends [G], row_of [T * slots], slot_of [T, slots]: stable, within a group in the order of tokens and slots.
template <class Id>
bool route(const Id* ids, i64 tokens, i64 slots, i64 groups, i32* ends, i32* row_of, i32* slot_of) {
    if (!all_below(ids, tokens * slots, groups)) return false;
    std::fill(ends, ends + groups, 0);
    for (i64 i = 0; i < tokens * slots; ++i) ++ends[ids[i]];
    for (i64 g = 0, start = 0; g < groups; ++g) {  // first the starts; counting up makes them the ends
        const i32 size = ends[g];
        ends[g] = i32(start);
        start += size;
    }
    for (i64 token = 0, i = 0; token < tokens; ++token) {
        for (i64 slot = 0; slot < slots; ++slot, ++i) {
            const i32 row = ends[ids[i]]++;
            row_of[row] = i32(token);
            slot_of[i] = row;
        }
    }
    return true;
}

// The first `count` of sixteen numbers, narrowed.
template <class T, class R>
void store_lanes(T* at, const R* r, i64 count) {
    if (count == 16) {
#pragma omp simd
        for (int i = 0; i < 16; ++i) at[i] = stored<T>(r[i]);
    } else {
        for (i64 i = 0; i < count; ++i) at[i] = stored<T>(r[i]);
    }
}

// Calls body(i) for i in 0..count-1, in runs of `step`, on all threads.
template <class Body>
void for_rows(i64 count, i64 step, int threads, Body body) {
    const i64 runs = (count + step - 1) / step;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && runs > 1)
    for (i64 run = 0; run < runs; ++run) {
        const i64 end = std::min(count, (run + 1) * step);
        for (i64 i = run * step; i < end; ++i) body(i);
    }
}

}  // namespace
