// A product that joins the accumulators of another, of the same rows and columns: few features, by a matrix of 16-bit floats, as B (A x) of an
// adapter beside W x.
//
// When all else is contracted, each warp adds its part by `mma`. Operands are few, and read from where they lie: caches. Which of the
// features a lane multiplies does not matter as long as both operands agree: it has four that follow each other.
#pragma once

#include "mma.cuh"
#include "memory.cuh"

namespace {

template <class T, int FEATURES>
struct AddedProduct {
    static_assert(FEATURES % 4 == 0, "lanes have four features each");

    // sum [16, 8 BLOCKS] += a [16, FEATURES] b [8 BLOCKS, FEATURES]^T, as accumulators of mma.m16n8k16 lie. upper, lower: the lane's rows of a;
    // row(i): its row of block i of b. Blocks from `blocks` on may be left out.
    template <int BLOCKS, class Row>
    __device__ static __forceinline__ void add(float (&sum)[4 * BLOCKS], const T* upper, const T* lower, Row row, int blocks = BLOCKS) {
#pragma unroll 1
        for (int k = threadIdx.x % 4 * 4; k - i32(threadIdx.x % 4) * 4 < FEATURES; k += 16) {
            const uint2 high = four(upper, k), low = four(lower, k);
            const u32 a[4] = {high.x, low.x, high.y, low.y};
            i32 zero = 0;
            asm volatile("" : "+r"(zero));  // where rows lie is computed again for each k: registers are short
#pragma unroll
            for (int first = 0; first < BLOCKS; first += AT_ONCE) {
                if (first >= blocks) break;
                uint2 b[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (first + i < BLOCKS) b[i] = four(row(first + i + zero), k);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (first + i < BLOCKS) mma_16x8x16<T>(reinterpret_cast<float(&)[4]>(sum[4 * (first + i)]), a, b[i].x, b[i].y);
            }
        }
    }

    // Of one row of each.
    __device__ static __forceinline__ float dot(const T* a, const T* b) {
        float total = 0;
#pragma unroll 4
        for (int k = 0; k < FEATURES; k += 4) {
            const Vector<T, 4> x = load_vector<4>(a + k), y = load_vector<4>(b + k);
#pragma unroll
            for (int v = 0; v < 4; ++v) total += widen(x.at[v]) * widen(y.at[v]);
        }
        return total;
    }

private:
    static constexpr int AT_ONCE = 4;  // blocks that are read before they are multiplied

    __device__ static __forceinline__ uint2 four(const T* row, int k) {
        return FEATURES % 16 == 0 || k < FEATURES ? *reinterpret_cast<const uint2*>(row + k) : make_uint2(0, 0);
    }
};

}  // namespace
