// Copies of numbers in MXFP8: e4m3 codes, and a power of two for 32 of them in a row, or of a column; both from one read.
//
// A warp has 32 rows and 32 columns, a lane eight columns of every eighth row. Rows of groups are in tiles that no group shares.
#pragma once

#include "routing.cuh"

namespace {

// The byte of a scale, from the bits of the largest magnitude: amax / 448, rounded up to a power of two.
__device__ __forceinline__ u32 e8m0_of(u32 most) {
    const u32 bits = __float_as_uint(__uint_as_float(most) * (1.f / 448.f)), exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
    const bool up = mantissa > 0 && (exponent > 0 || mantissa > 0x400000);
    return most > 0x7F800000 ? 255 : min(exponent + up, 254u);
}

// What a number is multiplied by before it is rounded: 1 over a scale.
__device__ __forceinline__ float over_e8m0(u32 byte) {
    return __uint_as_float(byte == 255 ? 0x7FC00000 : byte == 254 ? 0x400000 : (254 - byte) << 23);
}

// Two numbers as codes, the first in the low byte; beyond 448 they saturate.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// What two codes and their scales stand for, which bf16 holds.
__device__ __forceinline__ u32 numbers_of(u16 codes, float low_scale, float high_scale) {
    u32 halves, both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    const float low = widen(f16{u16(halves)}) * low_scale, high = widen(f16{u16(halves >> 16)}) * high_scale;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Where a copy is stored; null where it is not needed. numbers: those that codes and scales stand for.
struct Copy {
    u8 *codes = nullptr, *scales = nullptr;
    bf16* numbers = nullptr;

    // Eight of a row, from place `at` on; scale: the byte of each.
    __device__ __forceinline__ void store(i64 at, const float (&x)[8], const u32 (&scale)[8]) const {
        Vector<u16, 4> made;
        Vector<u32, 4> wide;
#pragma unroll
        for (int v = 0; v < 8; v += 2) {
            made.at[v / 2] = e4m3_pair(x[v] * over_e8m0(scale[v]), x[v + 1] * over_e8m0(scale[v + 1]));
            wide.at[v / 2] = numbers_of(made.at[v / 2], e8m0_(scale[v]), e8m0_(scale[v + 1]));
        }
        if (codes) store_vector<4>(reinterpret_cast<u16*>(codes + at), made);
        if (numbers) store_vector<4>(reinterpret_cast<u32*>(numbers + at), wide);
    }
};

// Rows first .. end - 1, 32 at most. in_group: whether some group has them.
struct RowTile {
    i64 first, end;
    bool in_group;
};

// Rows of matrices.
struct PlainRows {
    i64 rows;

    __device__ __forceinline__ i64 tiles() const { return (rows + 31) / 32; }
    __device__ __forceinline__ i64 blocks() const { return tiles(); }
    __device__ __forceinline__ RowTile at(i64 tile) const { return {32 * tile, min(rows, 32 * tile + 32), true}; }
};

// Rows of groups, each of which begins with a tile of its own, as groups.block_slots has it; then those of no group. Tiles may be empty.
template <i32 GROUPS>
struct GroupedRows {
    const i32* ends;
    i64 rows;
    i64* error;

    __device__ __forceinline__ i64 tiles() const { return blocks() + 1; }
    __device__ __forceinline__ i64 blocks() const { return (rows + 31) / 32 + GROUPS; }

    // By whole warps. Ends that are wrong are reported, and nothing is read past the rows.
    __device__ __forceinline__ RowTile at(i64 tile) const {
        i32 before = 0;
        for (i32 g = threadIdx.x % 32; g < GROUPS; g += 32) {
            const i32 end = ends[g], least = tile == 0 && g > 0 ? ends[g - 1] : 0;
            if (tile == 0 && (end < least || end > rows)) report(error, BAD_END, g, end);
            before += end / 32 + g + 1 <= tile;
        }
        const i32 group = __reduce_add_sync(WHOLE_WARP, before);
        const i64 start = group > 0 ? min(max(i64(ends[group - 1]), i64(0)), rows) : 0;
        const i64 end = group < GROUPS ? min(max(i64(ends[group]), start), rows) : rows;
        const i64 first = min(max(start + 32 * (tile - start / 32 - group), start), end);
        return {first, min(first + 32, end), group < GROUPS};
    }
};

// The largest of magnitudes, as bits, in which NaN is above all.
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// Copies of [rows, K]. load(m, j0, x): columns j0 .. j0 + 7 of row m. IN_ROWS, IN_COLUMNS: which of the two are made.
template <i32 K, bool IN_ROWS, bool IN_COLUMNS, class Tiles, class Load>
__device__ __forceinline__ void make_copies(const Tiles& tiles, Load load, const Copy& in_rows, const Copy& in_columns) {
    constexpr i32 RUNS = K / 32;
    const i32 lane = threadIdx.x % 32;
    for_all_warps(tiles.tiles() * RUNS, [&](i64 i) {
        const i64 number = i / RUNS, j0 = i % RUNS * 32 + lane % 4 * 8;
        const RowTile tile = tiles.at(number);
        float x[4][8] = {};
        if (tile.first < tile.end) {
#pragma unroll
            for (int s = 0; s < 4; ++s) load(min(tile.first + 8 * s + lane / 4, tile.end - 1), j0, x[s]);
        }
        if constexpr (IN_ROWS) {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const i64 m = tile.first + 8 * s + lane / 4;
                u32 most = 0, scale[8];
#pragma unroll
                for (int v = 0; v < 8; ++v) most = max(most, magnitude(x[s][v]));
                most = max(most, __shfl_xor_sync(WHOLE_WARP, most, 1));
                most = max(most, __shfl_xor_sync(WHOLE_WARP, most, 2));
                const u32 byte = e8m0_of(most);
#pragma unroll
                for (int v = 0; v < 8; ++v) scale[v] = byte;
                if (m < tile.end) {
                    in_rows.store(m * K + j0, x[s], scale);
                    if (in_rows.scales && lane % 4 == 0) in_rows.scales[m * RUNS + j0 / 32] = byte;
                }
            }
        }
        if constexpr (IN_COLUMNS) {
            u32 scale[8];
#pragma unroll
            for (int v = 0; v < 8; ++v) {
                u32 most = 0;
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    const bool inside = tile.in_group && tile.first + 8 * s + lane / 4 < tile.end;
                    x[s][v] = inside ? x[s][v] : 0;
                    most = max(most, magnitude(x[s][v]));
                }
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) most = max(most, __shfl_xor_sync(WHOLE_WARP, most, lanes));
                scale[v] = e8m0_of(most);
            }
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const i64 m = tile.first + 8 * s + lane / 4;
                if (m < tile.end) in_columns.store(m * K + j0, x[s], scale);
            }
            if (in_columns.scales && lane < 4 && number < tiles.blocks()) {
                Vector<u8, 8> bytes;
#pragma unroll
                for (int v = 0; v < 8; ++v) bytes.at[v] = scale[v];
                store_vector<8>(in_columns.scales + number * K + j0, bytes);
            }
        }
    });
}

}  // namespace
