// Tiles of w16x64 in shared memory: where a warp that copies puts their codes, and how one that multiplies reads them, and their scales.
//
// A lane copies 16 bytes of codes; the 32 bytes of two that follow each other in memory stay together: apart, a product takes 1.1 to 1.5
// times as long, as seen on an H200.
#pragma once

#include "fp4.cuh"
#include "pipeline.cuh"

namespace {

// For activations in the order of order.cuh: as in memory.
template <bool Ordered>
struct SharedTile {
    using Held = Tiled::Held;
    u32 codes, scales;  // where a lane's are, after where those of all tiles begin

    __device__ __forceinline__ SharedTile(u32 first_code, u32 first_scale, i32 lane)
        : codes(first_code + place(lane)), scales(first_scale + 2 * lane) {
        asm volatile("" : "+r"(codes), "+r"(scales));  // kept, not computed again
    }

    static __device__ __forceinline__ i32 place(i32 lane) { return 16 * lane; }

    __device__ __forceinline__ Held load(const u8* all_codes, const u8* all_scales) const {
        return {*reinterpret_cast<const uint4*>(all_codes + codes), *reinterpret_cast<const u16*>(all_scales + scales)};
    }

    static __device__ __forceinline__ void decode(const Held& h, int v, u32 (&a)[4]) {
        Tiled::decode(Tiled::word(h, v), Tiled::low_scale(h), Tiled::high_scale(h), a);
    }
};

// For activations in their own order: step v multiplies by block v of 16 k, of which lane 4 r + c needs word c of row r, and the scales. To
// ldmatrix the codes of a block are a matrix of 8 rows of 16 bytes; four rows of it share no bank.
template <>
struct SharedTile<false> {
    struct Held {
        u32 codes[4];
        uint2 scales;  // of the four blocks, each of rows r and r + 8
    };
    u32 codes, scales;

    __device__ __forceinline__ SharedTile(u32 first_code, u32 first_scale, i32 lane)
        : codes(first_code + place(lane % 8 * 4 + lane / 8)), scales(first_scale + lane / 4 * 8) {
        asm volatile("" : "+r"(codes), "+r"(scales));
    }

    static __device__ __forceinline__ i32 place(i32 lane) { return 16 * (lane ^ lane / 8 % 2 * 2); }

    __device__ __forceinline__ Held load(const u8* all_codes, const u8* all_scales) const {
        Held h;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(h.codes[0]), "=r"(h.codes[1]), "=r"(h.codes[2]), "=r"(h.codes[3])
                     : "r"(shared_address(all_codes + codes)));
        h.scales = *reinterpret_cast<const uint2*>(all_scales + scales);
        return h;
    }

    static __device__ __forceinline__ void decode(const Held& h, int v, u32 (&a)[4]) {
        const u32 scales = v < 2 ? h.scales.x : h.scales.y, low = __byte_perm(scales, 0, 0x4440 + v % 2 * 2);
        Tiled::decode(h.codes[v], Tiled::pair(low), Tiled::pair(__byte_perm(scales, 0, 0x4441 + v % 2 * 2)), a);
    }
};

}  // namespace
