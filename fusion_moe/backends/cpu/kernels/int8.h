// Products of int8 operands: rows of floats and weights of e2m1 codes, both rounded to integers in
// blocks of 256 columns, as fusion_moe/ir/kinds/int8.py has it. All ISA levels make the same
// integers, and add blocks in the same order: equal bits.
//
// What is here is right everywhere: products of 16-bit integers, which compilers make vectors of.
#pragma once

#include "e2m1.h"
#include "panels.h"

namespace {

constexpr i64 INT8_BLOCK = 256,
              INT8_CODES = 16;           // of columns; of codes that share a scale, at least
constexpr float INT8_LEAST = 0x1p-100f;  // of what is not zeros
constexpr i64 int8_blocks(i64 K) { return (K + INT8_BLOCK - 1) / INT8_BLOCK; }

// What an integer is worth, by the largest of a block: `wanted`, unless that is nothing, or no
// number.
inline float int8_step(float largest, float wanted) {
    return largest < INT8_LEAST ? 0.f : largest <= 0x1.fffffep127f ? wanted : as_float(0x7FC00000);
}
inline bool is_some(float largest) { return largest >= INT8_LEAST && largest <= 0x1.fffffep127f; }

// `count` activations -> integers of -127 to 127, to nearest, ties to even; what one is worth.
template <class Integer>
inline float int8_row(const float* x, i64 count, Integer* out) {
    u32 most = 0;  // bits of sizes order as sizes do, infinity and NaN last
    for (i64 k = 0; k < count; ++k) most = std::max(most, size_of(x[k]));
    const float largest = as_float(most);
    if (!is_some(largest)) {
        std::fill(out, out + count, Integer(0));
        return int8_step(largest, 0.f);
    }
    const float factor = 127.f / largest;
    constexpr float INTEGERS =
        0x1.8p23f;  // numbers around it are integers, whose bits follow one another
    for (i64 k = 0; k < count; ++k)
        out[k] = Integer(as_bits(x[k] * factor + INTEGERS) - as_bits(INTEGERS));
    return largest / 127.f;
}

// `count` codes of a block and their scales -> integers of -96 to 96; what one is worth.
template <class Weight>
inline float int8_weights(const u8* codes, const u8* scales, i64 count, i16* out) {
    constexpr i64 BLOCK = Weight::BLOCK;
    float largest = 0;
    bool nan = false;
    for (i64 b = 0; b < count / BLOCK; ++b) {
        const float size = __builtin_fabsf(Weight::scale(scales[b]));
        nan = nan || size != size;
        largest = std::max(largest, size);
    }
    largest = nan ? as_float(0x7FC00000) : largest;
    const float factor = is_some(largest) ? 2048.f / largest : 0.f;
    for (i64 b = 0; b < count / BLOCK; ++b, codes += BLOCK / 2, out += BLOCK) {
        const i32 ratio =
            factor == 0.f ? 0 : i32(__builtin_rintf(Weight::scale(scales[b]) * factor));
        i16 of_code[16];
        for (int i = 0; i < 16; ++i) of_code[i] = i16((i32(2 * E2M1[i]) * ratio + 128) >> 8);
        for (i64 i = 0; i < BLOCK / 2; ++i)
            out[2 * i] = of_code[codes[i] & 15], out[2 * i + 1] = of_code[codes[i] >> 4];
    }
    return int8_step(largest, largest * 0.0625f);
}

// The reader of a weight whose scales may be any.
template <class Weight>
struct OfAnyScales : Weight {
    static bool scales_in_range(const WorkTile&) { return true; }
    static void fetch_scales(const WorkTile&) {}
};

template <class Weight_>
struct Int8 {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    using Activation = float;
    // In place of an element each: 16 bits of an integer, then what the integers of a block are
    // worth.
    using Packed = u32;
    using Panel = u32;
    static constexpr int ROWS = 4, COLUMN_BLOCKS = 1, MIN_EXPONENT = -127,
                         MAX_EXPONENT = 128;  // whatever they are

    // A row of so many columns [columns] -> its integers, its steps.
    static i16* integers(u32* row) { return reinterpret_cast<i16*>(row); }
    static float* steps(u32* row, i64 columns) {
        return reinterpret_cast<float*>(row + (columns + 1) / 2);
    }

    static void pack(const float* x, Packed* packed, i64 K) {
        for (i64 k = 0; k < K; k += INT8_BLOCK) {
            steps(packed, K)[k / INT8_BLOCK] =
                int8_row(x + k, std::min(INT8_BLOCK, K - k), integers(packed) + k);
        }
    }

    static void dequantize(const Columns* c, const Columns*, int, i64 K, Panel* panel) {
        for (int n = 0; n < LANES; ++n) {
            Panel* row = panel + n * K;
            for (i64 k = 0; k < K; k += INT8_BLOCK) {
                const u8 *codes = c->codes[n] + k / 2, *scales = c->scales[n] + k / Weight::BLOCK;
                const i64 count = std::min(INT8_BLOCK, K - k);
                steps(row, K)[k / INT8_BLOCK] =
                    int8_weights<Weight>(codes, scales, count, integers(row) + k);
            }
        }
    }

    static void multiply(int rows, int, const Packed* x, i64 stride, const Panel* panel, i64 K,
                         const Columns* c, float* out, i64 out_stride) {
        for (int r = 0; r < rows; ++r) {
            Packed* row = const_cast<Packed*>(x) + r * stride;
            for (int n = 0; n < LANES; ++n) {
                Panel* column = const_cast<Panel*>(panel) + n * K;
                float sum = 0;
                for (i64 k = 0; k < K; k += INT8_BLOCK) {
                    const i64 block = k / INT8_BLOCK;
                    const float product = float(
                        dot(integers(row) + k, integers(column) + k, std::min(INT8_BLOCK, K - k)));
                    sum = __builtin_fmaf(product, steps(row, K)[block] * steps(column, K)[block],
                                         sum);
                }
                out[r * out_stride + n] = sum * c->factor[n];
            }
        }
    }

  private:
    static i32 dot(const i16* a, const i16* b, i64 count) {
        i32 sum = 0;
        for (i64 k = 0; k < count; ++k) sum += i32(a[k]) * b[k];
        return sum;
    }
};

template <class Weight>
struct Int8Isa : VectorIsa {
    using Wide = Panels<Int8<Weight>>;  // and the only one
    template <class A>
    using Fast = Kernels<Wide>;
};

}  // namespace
