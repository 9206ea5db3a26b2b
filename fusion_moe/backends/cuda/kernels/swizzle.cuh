// How tiles of rows lie in shared memory.
#pragma once

#include "numbers.cuh"

namespace {

// A tile of activations has rows of a K block, 128 bytes; eight rows are a core matrix. The 16-byte
// piece i of row r lies where piece i ^ (r % 8) would: so that neither the copies into a tile nor
// the tensor cores meet in a bank.
constexpr u32 TILE_ROW_BYTES = 128, CORE_MATRIX_BYTES = 8 * TILE_ROW_BYTES;  // bytes

__device__ __forceinline__ u32 swizzled(u32 row, u32 piece) {
    return row * TILE_ROW_BYTES + (piece ^ row % 8) * 16;
}

}  // namespace
