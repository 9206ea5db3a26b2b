// What producers copy of a matrix into a stage: eight columns of a row at a time.
#pragma once

#include "pipeline.cuh"
#include "wgmma.cuh"

namespace {

constexpr int GEMM_K_BLOCK = 64;  // columns, or rows, of what is contracted
constexpr u32 PIECE_BYTES =
    GEMM_K_BLOCK * TILE_ROW_BYTES;  // of an MN-major tile: 64 of its columns

// Whether the 16 bytes at a place of a row of so many elements are in the row, whole and aligned:
// else elements are copied one by one.
template <int COLUMNS>
constexpr bool ALIGNED_ROWS = COLUMNS % 8 == 0;

// Eight columns of a row to shared memory, zeros for those that there are not, and unless `good`,
// whatever `row` is then.
template <int COLUMNS, class T>
__device__ __forceinline__ void copy_piece(u32 to, const T* matrix, i64 row, i32 column,
                                           bool good) {
    if constexpr (ALIGNED_ROWS<COLUMNS>) {
        cp_async_16_or_zeros(to, matrix + column + row * COLUMNS,
                             good && column < COLUMNS);  // else the address is not read
    } else {
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T* from = matrix + row * COLUMNS + column + 2 * i;
            const u32 low = good && column + 2 * i < COLUMNS ? from[0].bits : 0;
            const u32 high = good && column + 2 * i + 1 < COLUMNS ? from[1].bits : 0;
            pair[i] = low | high << 16;
        }
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(pair[0]), "r"(pair[1]),
                     "r"(pair[2]), "r"(pair[3])
                     : "memory");
    }
}

}  // namespace
