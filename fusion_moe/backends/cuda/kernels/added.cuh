// A product that joins the accumulators of another, of the same rows and columns: few features, by
// a matrix of 16-bit floats, as B (A x) of an adapter beside W x, or (dy B) A beside dy W.
//
// When all else is contracted, each warp adds its part by `mma`. Operands are few, and read from
// where they lie: caches. Which of the features a lane multiplies does not matter as long as both
// operands agree: it has four that follow each other.
#pragma once

#include "mma.cuh"
#include "memory.cuh"

namespace {

// Either operand: [N, FEATURES], or [FEATURES, N] if TRANSPOSED. Four features of the n-th, from k
// on; zeros past the last.
template <class T, i64 N, int FEATURES, bool TRANSPOSED>
struct AddedMatrix {
    static_assert(FEATURES % 4 == 0, "lanes have four features each");
    const T* first;

    __device__ __forceinline__ uint2 four(i32 n, int k) const {
        if (FEATURES % 16 != 0 && k >= FEATURES) return make_uint2(0, 0);
        if constexpr (!TRANSPOSED) {
            return *reinterpret_cast<const uint2*>(first + i64(n) * FEATURES + k);
        } else {
            const T* at = first + k * N + n;
            return make_uint2(at[0].bits | u32(at[N].bits) << 16,
                              at[2 * N].bits | u32(at[3 * N].bits) << 16);
        }
    }
};

template <class Segment>
struct AddedProduct {
    using T = typename Segment::Activation;
    static constexpr int FEATURES = Segment::ADDED;
    using Rows = AddedMatrix<T, 1, FEATURES, false>;
    using Columns = AddedMatrix<T, Segment::N, FEATURES, Segment::ADDED_TRANSPOSED>;

    __device__ static __forceinline__ Rows rows(const Segment& s) { return {s.added_rows()}; }
    __device__ static __forceinline__ Columns columns(const Segment& s, i32 group) {
        return {s.added_matrix(group)};
    }

    // sum [16, 8 BLOCKS] += a [16, FEATURES] b [8 BLOCKS, FEATURES]^T, as accumulators of
    // mma.m16n8k16 lie. Four features from k on are upper(k) and lower(k) of the lane's rows of a,
    // row(i, k) of its row of block i of b. Blocks from `blocks` on may be left out.
    template <int BLOCKS, class Upper, class Lower, class Row>
    __device__ static __forceinline__ void add(float (&sum)[4 * BLOCKS], Upper upper, Lower lower,
                                               Row row, int blocks = BLOCKS) {
#pragma unroll 1
        for (int k = threadIdx.x % 4 * 4; k - i32(threadIdx.x % 4) * 4 < FEATURES; k += 16) {
            const uint2 high = upper(k), low = lower(k);
            const u32 a[4] = {high.x, low.x, high.y, low.y};
            i32 zero = 0;
            asm volatile(
                ""
                : "+r"(zero));  // where rows lie is computed again for each k: registers are short
#pragma unroll
            for (int first = 0; first < BLOCKS; first += AT_ONCE) {
                if (first >= blocks) break;
                uint2 b[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (first + i < BLOCKS) b[i] = row(first + i + zero, k);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (first + i < BLOCKS)
                        mma_16x8x16<T>(reinterpret_cast<float (&)[4]>(sum[4 * (first + i)]), a,
                                       b[i].x, b[i].y);
            }
        }
    }

    // Of row m and column n.
    __device__ static __forceinline__ float dot(const Rows& rows, i32 m, const Columns& columns,
                                                i32 n) {
        float total = 0;
#pragma unroll 4
        for (int k = 0; k < FEATURES; k += 4) {
            const uint2 a = rows.four(m, k), b = columns.four(n, k);
            const auto &x = reinterpret_cast<const Vector<T, 4>&>(a),
                       &y = reinterpret_cast<const Vector<T, 4>&>(b);
#pragma unroll
            for (int v = 0; v < 4; ++v) total += widen(x.at[v]) * widen(y.at[v]);
        }
        return total;
    }

  private:
    static constexpr int AT_ONCE = 4;  // blocks that are read before they are multiplied
};

}  // namespace
