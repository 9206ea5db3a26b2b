// Tiles of codes of e2m1 in shared memory: where producers copy them, and how consumers read them, and their scales.
//
// A lane copies 16 bytes of codes; the 32 bytes of two that follow each other in memory stay together: apart, a product takes 1.1 to 1.5
// times as long, as seen on an H200.
#pragma once

#include "pipeline.cuh"
#include "weights/e2m1_codes.cuh"

namespace {

// For activations in fragment order: as in memory.
template <class T, class Scales, bool FRAGMENT_ORDER>
struct E2m1Shared {
    using Packed = TiledCodes;
    u32 codes, scales;  // where a lane's are, after where those of all tiles begin

    __device__ __forceinline__ E2m1Shared(u32 first_code, u32 first_scale, i32 lane)
        : codes(first_code + swizzled_lane(lane, 0)), scales(first_scale + scales_of_lane<Scales>(lane)) {
        asm volatile("" : "+r"(codes), "+r"(scales));  // kept, not computed again
    }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) { return 16 * lane; }

    __device__ __forceinline__ Packed load(const u8* all_codes, const u8* all_scales) const {
        return {*reinterpret_cast<const uint4*>(all_codes + codes), *reinterpret_cast<const u16*>(all_scales + scales)};
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, int v, u32 (&a)[4]) {
        const PairOfScales scales = tiled_scales<Scales>(packed);
        dequantize_half<T, Scales>(word(packed, v), scales, 0, a);
        dequantize_half<T, Scales>(word(packed, v), scales, 1, a + 2);
    }
};

// For row-major activations: step v multiplies by block v of 16 k, of which lane 4 r + c needs word c of row r, and the scales. To ldmatrix
// the codes of a block are a matrix of 8 rows of 16 bytes; four rows of it share no bank.
template <class T, class Scales>
struct E2m1Shared<T, Scales, false> {
    static constexpr int BLOCK = Scales::BLOCK, BYTES = 128 / BLOCK;  // of the scales of rows r and r + 8

    struct Packed {
        u32 codes[4];
        Vector<u32, BYTES / 4> scales;  // of each block, of row r, then of row r + 8
    };
    u32 codes, scales;

    __device__ __forceinline__ E2m1Shared(u32 first_code, u32 first_scale, i32 lane)
        : codes(first_code + swizzled_lane(lane % 8 * 4 + lane / 8, 0)), scales(first_scale + lane / 4 * BYTES) {
        asm volatile("" : "+r"(codes), "+r"(scales));
    }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) { return 16 * (lane ^ lane / 8 % 2 * 2); }

    __device__ __forceinline__ Packed load(const u8* all_codes, const u8* all_scales) const {
        Packed packed;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(packed.codes[0]), "=r"(packed.codes[1]), "=r"(packed.codes[2]), "=r"(packed.codes[3])
                     : "r"(shared_address(all_codes + codes)));
        packed.scales = load_vector<BYTES / 4>(reinterpret_cast<const u32*>(all_scales + scales));
        return packed;
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, int v, u32 (&a)[4]) {
        const int byte = 16 * v / BLOCK * 2;
        const u32 of_four = packed.scales.at[byte / 4], low = __byte_perm(of_four, 0, 0x4440 + byte % 4);
        const PairOfScales scales = {Scales::tiled(low), Scales::tiled(__byte_perm(of_four, 0, 0x4441 + byte % 4))};
        dequantize_half<T, Scales>(packed.codes[v], scales, 0, a);
        dequantize_half<T, Scales>(packed.codes[v], scales, 1, a + 2);
    }
};

}  // namespace
