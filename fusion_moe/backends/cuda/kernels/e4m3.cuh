// Rows as e4m3 codes, with a scale for each block of 128 columns: the power of two from amax / 448
// up. A block with infinity or NaN gets a scale and codes of NaN, zeros the scale 1.
#pragma once

#include "epilogue_rows.cuh"
#include "routing.cuh"

namespace {

constexpr int SCALED_COLUMNS = 128;

struct RowScale {
    float scale, over;  // what codes are multiplied by, and numbers before they are rounded

    // most: the bits of the largest magnitude, NaN above all.
    __device__ __forceinline__ explicit RowScale(u32 most) {
        const i32 exponent = most == 0 ? 127 : max(i32((most + 0x1FFFFF) >> 23) - 8, 0);
        const bool finite = most < 0x7F800000;
        scale = __uint_as_float(finite ? max(u32(exponent) << 23, 0x400000u) : 0x7FC00000);
        over = __uint_as_float(finite ? u32(254 - exponent) << 23 : 0x7FC00000);
    }
};

// Two numbers as codes, the first in the low byte.
__device__ __forceinline__ u32 e4m3_pair_of(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// The bits of the largest magnitude of eight numbers.
__device__ __forceinline__ u32 largest_magnitude(const float (&x)[8]) {
    u32 most = 0;
#pragma unroll
    for (int v = 0; v < 8; ++v) most = max(most, __float_as_uint(x[v]) & 0x7FFFFFFF);
    return most;
}

// The largest number of each LANES lanes that follow each other.
template <int LANES>
__device__ __forceinline__ u32 most_of_lanes(u32 most) {
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2)
        most = max(most, __shfl_xor_sync(WHOLE_WARP, most, apart));
    return most;
}

// Eight numbers of a row as codes.
__device__ __forceinline__ Vector<u32, 2> e4m3_eight(const float (&x)[8], float over) {
    Vector<u32, 2> made;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        made.at[i] = e4m3_pair_of(x[4 * i] * over, x[4 * i + 1] * over) |
                     e4m3_pair_of(x[4 * i + 2] * over, x[4 * i + 3] * over) << 16;
    return made;
}

// Of four lanes that have pairs of bf16 numbers in each of four blocks of eight columns, lane q
// gets the codes of block q.
__device__ __forceinline__ Vector<u32, 2> codes_of_quad(const u32 (&pair)[4], float over) {
    u32 codes[4];
#pragma unroll
    for (int b = 0; b < 4; ++b)
        codes[b] = e4m3_pair_of(__uint_as_float(pair[b] << 16) * over,
                                __uint_as_float(pair[b] & 0xFFFF0000) * over);
    const bool odd = threadIdx.x & 1;
    u32 low = codes[0] | codes[1] << 16, high = codes[2] | codes[3] << 16;
    change_places(low, high, threadIdx.x & 2,
                  2);  // two blocks: of a lower lane, and of a higher one
    u32 even_block = __byte_perm(low, high, 0x5410), odd_block = __byte_perm(low, high, 0x7632);
    change_places(even_block, odd_block, odd, 1);
    return {
        {__byte_perm(even_block, odd_block, 0x5410), __byte_perm(even_block, odd_block, 0x7632)}};
}

// Quantizes rows of K columns. row(m)(j, x) makes eight columns of row m, from column j on.
template <i32 K, class Row>
__device__ __forceinline__ void quantize_rows(i64 rows, Row row, u8* codes, float* scales) {
    constexpr i32 STRIP = 256, STRIPS = (K + STRIP - 1) / STRIP, EACH = STRIPS < 4 ? STRIPS : 4,
                  WARPS = (STRIPS + EACH - 1) / EACH,
                  BLOCKS = (K + SCALED_COLUMNS - 1) / SCALED_COLUMNS;
    static_assert(K % 8 == 0, "rows are whole vectors");
    for_all_warps(rows * WARPS, [&](i64 i) {
        const i64 m = i / WARPS;
        const i32 first = i32(i % WARPS) * EACH * STRIP + 8 * (threadIdx.x % 32);
        const auto of_row = row(m);
        float x[EACH][8] = {};
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (first + STRIP * e < K) of_row(i64(first + STRIP * e), x[e]);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const i32 j = first + STRIP * e;
            const RowScale by(most_of_lanes<16>(largest_magnitude(x[e])));
            if (j >= K) continue;
            store_vector<2>(reinterpret_cast<u32*>(codes + m * K + j), e4m3_eight(x[e], by.over));
            if (j % SCALED_COLUMNS == 0) scales[m * BLOCKS + j / SCALED_COLUMNS] = by.scale;
        }
    });
}

}  // namespace
