// The epilogue of kernels whose accumulators have rows of the result: eight columns of a row at a
// time, computed and stored as a vector.
#pragma once

#include "ragged.cuh"

namespace {

// The upper of two lanes gives its low number for the other's high one.
template <class T>
__device__ __forceinline__ void change_places(T& low, T& high, bool upper, int lanes) {
    const T theirs = __shfl_xor_sync(WHOLE_WARP, upper ? low : high, lanes);
    low = upper ? theirs : low, high = upper ? high : theirs;
}

// Of four lanes that hold pairs of columns of a row, in blocks of eight columns, lane q gets the
// eight of block `first` + q. h: which of the lanes' two rows.
template <int COUNT>
__device__ __forceinline__ void row_of_quad(float (&p)[8], const float (&sum)[COUNT], int first,
                                            int h) {
    const i32 q = threadIdx.x % 4;
    float x[4][2];
#pragma unroll
    for (int b = 0; b < 4; ++b)
        x[b][0] = sum[4 * (first + b) + 2 * h], x[b][1] = sum[4 * (first + b) + 2 * h + 1];
    // A transpose of 4 x 4 pairs: halves, then quarters change places.
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = q & step;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            if (b & step) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) change_places(x[b][i], x[b | step][i], upper, step);
        }
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) p[2 * b] = x[b][0], p[2 * b + 1] = x[b][1];
}

// Stores the sums over columns of a row that LANES lanes share, the part-th of the row. By whole
// warps.
template <int LANES, class Segment, int COUNT>
__device__ __forceinline__ void store_sums(const Segment& s, i64 m, i32 part, bool good,
                                           float (&total)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2)
            total[i] += __shfl_xor_sync(WHOLE_WARP, total[i], lanes);
        if (good && threadIdx.x % LANES == 0)
            s.partial_sums[(i64(part) * COUNT + i) * s.rows() + m] = total[i];
    }
}

// Eight columns of a row, of which LANES lanes have parts of as many times eight. By whole warps,
// which store where `good`.
template <int LANES, class Segment>
__device__ __forceinline__ void store_row(const Segment& s, i64 m, i64 g, i32 j, bool good,
                                          const float (&p)[Segment::COLUMNS_PER_RESULT][8]) {
    float total[Segment::SUMS > 0 ? Segment::SUMS : 1] = {};
    if (good) s.store(m, g, j, p, total);
    if constexpr (Segment::SUMS > 0)
        store_sums<LANES>(s, m, j / (8 * LANES), good && j < Segment::WIDTH, total);
}

}  // namespace
