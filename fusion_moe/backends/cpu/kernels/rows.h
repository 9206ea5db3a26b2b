// Rows and groups: checks before memory is touched, the counting sort of `route`, loops over rows.
//
// What a check finds wrong makes the kernel return BAD without writing; the caller then evaluates
// the reference, which raises.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "thread_pool.h"

namespace {

enum Result : int { GOOD = 0, BAD = 1 };

// Ends that never decrease and lie in 0..rows. apart > 0: rows from the begin of a group to that of
// the next one, where it ends at the latest.
inline bool good_ends(const i32* ends, i64 groups, i64 rows, i64 apart = 0) {
    i64 before = 0;
    for (i64 g = 0; g < groups; ++g) {
        if (ends[g] < before || ends[g] > rows) return false;
        if (apart > 0 && (ends[g] < g * apart || ends[g] > (g + 1) * apart)) return false;
        before = ends[g];
    }
    return true;
}

// The group of a row; the number of groups for one past the last end.
inline i64 group_of(const i32* ends, i64 groups, i64 row) {
    return std::upper_bound(ends, ends + groups, i32(row)) - ends;
}

// The block of rows that a row is in, where each group begins with a block of its own
// (layouts/groups.py's block_slots); -1 past the last end.
template <i64 BLOCK>
i64 block_of(const i32* ends, i64 groups, i64 row) {
    const i64 g = group_of(ends, groups, row), start = g == 0 ? 0 : ends[g - 1];
    return g == groups ? -1 : start / BLOCK + g + (row - start) / BLOCK;
}

// A stable counting sort of slots by group(i), which is `groups` for those of no group.
template <class Group>
void sort_slots(Group group, i64 tokens, i64 slots, i64 groups, i32* ends, i32* row_of,
                i32* slot_of) {
    std::fill(ends, ends + groups, 0);
    for (i64 i = 0; i < tokens * slots; ++i) {
        if (group(i) < groups) ++ends[group(i)];
    }
    i32 past = 0;
    for (i64 g = 0; g < groups; ++g) {  // first the starts; counting up makes them the ends
        const i32 size = ends[g];
        ends[g] = past;
        past += size;
    }
    for (i64 token = 0, i = 0; i < tokens * slots; ++token) {
        for (i64 slot = 0; slot < slots; ++slot, ++i) {
            const i32 row = group(i) < groups ? ends[group(i)]++ : past++;
            row_of[row] = i32(token);
            slot_of[i] = row;
        }
    }
}

template <class Index>
bool all_below(const Index* index, i64 count, i64 size, i64 least = 0) {
    bool good = true;
    for (i64 i = 0; i < count; ++i) good = good && index[i] >= least && index[i] < size;
    return good;
}

// What expert_map has for ids, -1 for -1; false if an id names none of the experts, or a place is
// none of those here.
template <class Id>
bool place(const Id* ids, i64 count, const i32* expert_map, i64 experts, i64 here, i32* made) {
    if (!all_below(ids, count, experts, -1) || !all_below(expert_map, experts, here, -1))
        return false;
    for (i64 i = 0; i < count; ++i) made[i] = ids[i] < 0 ? -1 : expert_map[ids[i]];
    return true;
}

// ids [T, slots] -> ends [G], row_of [T * slots], slot_of [T, slots]: stable, within a group in the
// order of tokens and slots. The ids of groups begin at `first`; rows of other ids come past the
// last end.
template <class Id>
void route(const Id* ids, i64 tokens, i64 slots, i64 first, i64 groups, i32* ends, i32* row_of,
           i32* slot_of) {
    const auto group = [=](i64 i) {
        return i64(std::min(u64(i64(ids[i])) - u64(first), u64(groups)));
    };
    sort_slots(group, tokens, slots, groups, ends, row_of, slot_of);
}

// The first `count` of sixteen numbers that T holds.
template <class T, class R>
void store_lanes(T* at, const R* r, i64 count) {
    if (count == 16) {
#pragma omp simd
        for (int i = 0; i < 16; ++i) at[i] = held<T>(r[i]);
    } else {
        for (i64 i = 0; i < count; ++i) at[i] = held<T>(r[i]);
    }
}

// The sum of the first `count` of sixteen numbers: halves are added to halves.
template <class R>
float sum_lanes(const R* r, i64 count) {
    float sums[16];
    for (i64 i = 0; i < 16; ++i) sums[i] = i < count ? float(r[i]) : 0.f;
    for (i64 half = 8; half > 0; half /= 2) {
        for (i64 i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
}

// `count` columns of a row are written now: what is written soon comes nearer. Those are columns of
// a row further on, or, of strips of sixteen columns, which are too narrow for the CPU to see where
// they lead, the next ones of this row.
template <class T>
void fetch_row(const T* at, i64 width, i64 count) {
    at += count > 16 ? 8 * width : 64 / i64(sizeof(T));
    for (i64 i = 0; i < count; i += 64 / i64(sizeof(T))) __builtin_prefetch(at + i, 1);
}

// starts [G], sizes [G, 3], padded_starts [G] as nvFuser's grouped products take them -> ends [G];
// false unless all three spell one partition of `rows` rows, in groups of products with n out- and
// k in-features.
inline bool problem_ends(const i32* starts, const i32* sizes, const i32* padded_starts, i64 groups,
                         i64 rows, i64 n, i64 k, i32* ends) {
    i64 end = 0, padded = 0;
    for (i64 g = 0; g < groups; ++g) {
        const i64 m = sizes[3 * g];
        if (m < 0 || m > rows - end || sizes[3 * g + 1] != n || sizes[3 * g + 2] != k) return false;
        if (starts[g] != end || padded_starts[g] != padded) return false;
        end += m, padded += (m + 127) / 128 * 128;
        ends[g] = i32(end);
    }
    return true;
}

// x [rows, columns] in groups -> the layout sf128x4 of each group by itself, one after the other;
// all that holds no element of x is zero.
template <class T>
void swizzle_128x4(const T* x, const i32* ends, i64 groups, i64 rows, i64 columns, T* out) {
    const i64 width = (columns + 3) / 4 * 4,
              room = std::min(rows, groups) + std::max<i64>(0, rows - groups) / 128;
    std::fill_n(out, room * 128 * width, T());
    for (i64 g = 0, start = 0, base = 0; g < groups; ++g) {
        for (i64 r = 0; r < ends[g] - start; ++r) {
            const T* row = x + (start + r) * columns;
            T* tile = out + (base + r / 128 * 128) * width + r % 32 * 16 + r % 128 / 32 * 4;
            for (i64 c = 0; c < columns; ++c) tile[c / 4 * 512 + c % 4] = row[c];
        }
        base += (ends[g] - start + 127) / 128 * 128;
        start = ends[g];
    }
}

// How many rows of so many elements a thread takes at once.
inline i64 rows_per_step(i64 width) { return std::max<i64>(1, 16384 / std::max<i64>(1, width)); }

// Calls body(i) for i in 0..count-1, in runs of `step` or more, on all threads.
template <class Body>
void for_rows(i64 count, i64 step, ThreadPool& pool, Body body) {
    step = std::max(step, count / (16 * pool.threads()));
    pool.share((count + step - 1) / step, [&](Items& items) {
        for (i64 run; (run = items.next()) >= 0;) {
            const i64 end = std::min(count, (run + 1) * step);
            for (i64 i = run * step; i < end; ++i) body(i);
        }
    });
}

constexpr i64 COLUMNS = 512, FEW_COLUMNS = 128;

// Calls body(m, j0, j1) for each row and each run j0 .. j1-1 of up to COLUMNS of its columns, on
// all threads. With fewer rows than threads runs are shorter, so that there is one for each.
template <class Body>
void for_tiles(i64 rows, i64 columns, ThreadPool& pool, Body body) {
    const i64 width = rows < pool.threads() ? FEW_COLUMNS : COLUMNS,
              runs = (columns + width - 1) / width;
    for_rows(rows * runs, 1, pool, [&](i64 i) {
        body(i / runs, i % runs * width, std::min(columns, (i % runs + 1) * width));
    });
}

// The sums of terms start .. stop - 1 -> sum [columns]. add(first, end) adds up to AT_ONCE terms to
// zeros there; the sums of such blocks are added in float64, so errors do not grow with the number
// of terms.
template <i64 AT_ONCE, i64 MOST, class Add>
void sum_blocks(i64 start, i64 stop, i64 columns, float (&sum)[MOST], Add add) {
    double total[MOST];
    for (i64 first = start, end; first == start || first < stop; first = end) {
        end = std::min(first + AT_ONCE, stop);
        std::fill_n(sum, columns, 0.f);
        add(first, end);
        if (stop - start <= AT_ONCE) return;
#pragma omp simd
        for (i64 j = 0; j < columns; ++j)
            total[j] = (first > start ? total[j] : 0.) + double(sum[j]);
    }
    std::copy_n(total, columns, sum);
}

// total [count] + weight * row [count] -> total. A function of its own: inlined, g++ makes no
// vectors of it.
template <class T>
[[gnu::noinline]] void add_row(float* __restrict total, const T* row, float weight, i64 count) {
#pragma omp simd
    for (i64 j = 0; j < count; ++j) total[j] += widen(row[j]) * weight;
}

}  // namespace
