// NVFP4 weights as fragments of bfloat16, from the layout w16x64 (layouts.py says where each byte lies) and from the linear one.
//
// A code's two exponent bits and its mantissa bit, put where bfloat16 has the lowest of its own, are the code's value times 2^-126:
// subnormal codes become subnormal numbers. One multiplication by the block scale, of a large exponent, makes the weight; both
// factors have few bits, so the product is exact. What is left of the powers of two, FACTOR, goes into the decode scale.
//
// A reader streams the tiles of 16 rows and 64 k that follow each other along K. Lane 4 r + c holds rows r and r + 8, and of each the
// block of 16 k that begins at 16 c. Step v of four multiplies by two pairs of it for each row, 2 v, 2 v + 1 and 2 v + 8, 2 v + 9.
#pragma once

#include "memory.cuh"

namespace {

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {  // bf16x2
    u32 product;
#if __CUDA_ARCH__ >= 900
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // plus -0
#endif
    return product;
}

__device__ __forceinline__ u32 and_or(u32 x, u32 mask, u32 y) {  // (x & mask) | y
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(x), "r"(mask), "r"(y));
    return found;
}

constexpr u32 SIGNS = 0x80008000, SIZES = 0x01C001C0;  // where a pair of codes has its signs, and its exponents and mantissas

struct Tiled {
    static constexpr float FACTOR = 128.f;  // of the weights to what `decode` makes

    struct Held {
        uint4 codes;
        u32 scales;  // of rows r and r + 8
    };

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block, i32 lane) {
        const i64 tile = (i64(group) * (Segment::N / 16) + first_row / 16) * (Segment::K / 64) + block;
        codes = s.codes + tile * 512 + lane * 16, scales = s.scales + tile * 64 + lane * 2;
    }

    __device__ __forceinline__ Held load(int ahead) const { return {load_stream(codes + 512 * ahead), load_stream_2(scales + 64 * ahead)}; }
    __device__ __forceinline__ void advance(int blocks) { codes += 512 * blocks, scales += 64 * blocks; }

    static __device__ __forceinline__ u32 low_scale(const Held& h) { return pair(h.scales & 0xFF); }
    static __device__ __forceinline__ u32 high_scale(const Held& h) { return pair(h.scales >> 8); }

    static __device__ __forceinline__ u32 word(const Held& h, int v) {
        return v == 0 ? h.codes.x : v == 1 ? h.codes.y : v == 2 ? h.codes.z : h.codes.w;
    }

    // The first or the second pairs of k of word v, of both rows: a half of the fragment of step v.
    static __device__ __forceinline__ void decode(const Held& h, int v, int half, u32 low, u32 high, u32* a) {
        decode(word(h, v), half, low, high, a);
    }

    // A word -> the fragment; one half of it.
    static __device__ __forceinline__ void decode(u32 word, u32 low, u32 high, u32 (&a)[4]) {
        decode(word, 0, low, high, a);
        decode(word, 1, low, high, a + 2);
    }

    static __device__ __forceinline__ void decode(u32 word, int half, u32 low, u32 high, u32* a) {
        if (half == 0) {
            a[0] = multiply_pair(word & (SIGNS | SIZES), low);
            a[1] = multiply_pair((word * 64u) & (SIGNS | SIZES), high);
        } else {
            a[0] = multiply_pair(__funnelshift_l(word, word, 12) & (SIGNS | SIZES), low);
            a[1] = multiply_pair(and_or(word >> 6, 0x01000100u, (word * 4u) & 0x80C080C0u), high);
        }
    }

    static __device__ __forceinline__ u32 pair(u32 byte) { return byte * 0x00100010u + 0x6F806F80u; }  // E5M3 -> bf16x2, times 2^119

private:
    const u8 *codes, *scales;
};

// Any N, and K in whole blocks of 16: rows past the last are read as the last, blocks past the last as zeros.
struct Linear {
    static constexpr float FACTOR = 256.f;

    struct Held {
        uint2 low, high;  // codes of rows r and r + 8
        u32 low_scale, high_scale;
    };

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block, i32 lane) {
        const i32 row = first_row + lane / 4, k = 64 * block + 16 * (lane % 4);
        const i64 first = i64(group) * Segment::N;
        const i64 low = (first + min(row, Segment::N - 1)) * Segment::K + k, high = (first + min(row + 8, Segment::N - 1)) * Segment::K + k;
        codes[0] = s.codes + low / 2, codes[1] = s.codes + high / 2;
        scales[0] = s.scales + low / 16, scales[1] = s.scales + high / 16;
        left = Segment::K - k;
    }

    __device__ __forceinline__ Held load(int ahead) const {
        if (left <= 64 * ahead) return {};
        return {load_stream_8(codes[0] + 32 * ahead), load_stream_8(codes[1] + 32 * ahead), load_stream_1(scales[0] + 4 * ahead),
                load_stream_1(scales[1] + 4 * ahead)};
    }

    __device__ __forceinline__ void advance(int blocks) {
#pragma unroll
        for (int i = 0; i < 2; ++i) codes[i] += 32 * blocks, scales[i] += 4 * blocks;
        left -= 64 * blocks;
    }

    static __device__ __forceinline__ u32 low_scale(const Held& h) { return pair(h.low_scale); }
    static __device__ __forceinline__ u32 high_scale(const Held& h) { return pair(h.high_scale); }

    static __device__ __forceinline__ void decode(const Held& h, int v, int half, u32 low, u32 high, u32* a) {
        a[0] = multiply_pair(codes_of((half == 0 ? h.low.x : h.low.y) >> 8 * v), low);
        a[1] = multiply_pair(codes_of((half == 0 ? h.high.x : h.high.y) >> 8 * v), high);
    }

private:
    // The two codes of a byte -> one in each half.
    static __device__ __forceinline__ u32 codes_of(u32 byte) {
        const u32 spread = (byte & 0xFF) * 0x1001u;
        return and_or(spread << 6, SIZES, (spread << 12) & SIGNS);
    }

    // e4m3 -> bf16x2, times 2^118. A subnormal float32 holds subnormal scales.
    static __device__ __forceinline__ u32 pair(u32 byte) {
        const float size = __uint_as_float((byte & 0x7F) << 20) * 0x1p127f * 0x1p111f;
        const u32 half = (byte & 0x7F) == 0x7F ? 0x7FC0u : __float_as_uint(size) >> 16 | (byte & 0x80) << 8;
        return half * 0x10001u;
    }

    const u8 *codes[2], *scales[2];
    i32 left;
};

}  // namespace
