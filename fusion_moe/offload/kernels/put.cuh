// Rows that were made in turns.
#pragma once

#include "memory.cuh"

namespace {

// Puts rows of `made` before the last end to their places in y.
struct PutRows {
    i64 row_bytes, count, groups;
    const i32 *ends, *from, *to;  // [groups], [count]: of each id, its row in `made` and in y
    const u8* made;
    u8* y;

    __device__ void run() const {
        const i32 end = ends[groups - 1];
        for (i64 id = blockIdx.x; id < count; id += gridDim.x) {
            if (from[id] >= end) continue;
            const u8* const row = made + from[id] * row_bytes;
            u8* const place = y + to[id] * row_bytes;
            for (i64 i = 16 * threadIdx.x; i < row_bytes; i += 16 * blockDim.x)
                *reinterpret_cast<uint4*>(place + i) = *reinterpret_cast<const uint4*>(row + i);
        }
    }
};

}  // namespace
