// Plain C++: right everywhere, fast nowhere.
#pragma once

#include "e2m1.h"
#include "panels.h"
#include "words.h"

namespace {

struct GenericF32 : F32Words {  // panels are [K][COLUMN_BLOCKS][16]
    using Activation = float;
    static constexpr int ROWS = 4, COLUMN_BLOCKS = 1;

    static void pack(const float* x, Packed* packed, i64 K) {
        std::memcpy(packed, x, std::size_t(K) * sizeof(float));
    }

    // x [rows][stride] times the panel -> out [rows][out_stride], of which LANES are written
    template <class Columns>
    static void multiply(int rows, int, const Packed* x, i64 stride, const Panel* panel, i64 K,
                         const Columns*, float* out, i64 out_stride) {
        float sum[ROWS][LANES] = {};
        for (i64 k = 0; k < K; ++k) {
            for (int r = 0; r < ROWS; ++r) {
                const float a = r < rows ? x[r * stride + k] : 0.f;
                for (int i = 0; i < LANES; ++i) sum[r][i] += a * panel[k * LANES + i];
            }
        }
        for (int r = 0; r < rows; ++r) std::memcpy(out + r * out_stride, sum[r], sizeof sum[r]);
    }
};

template <class Weight_>
struct Generic : GenericF32 {
    using Weight = Weight_;
    using Columns = typename Weight::Columns;
    static constexpr auto SMALL_M_NAME = "by dot products with the codes";
    static constexpr int SMALL_M = 1, MIN_EXPONENT = F32_MIN_EXPONENT<Weight>,
                         MAX_EXPONENT = F32_MAX_EXPONENT<Weight>;
    static constexpr i64 BLOCK = Weight::BLOCK;

    static void pack_small_m(const float* x, i64 r, Packed* packed, i64 stride, i64 K) {
        pack(x, packed + r * stride, K);
    }

    static void small_m(int, const Columns& c, const Columns&, const Packed* x, i64, i64 K,
                        float* out, i64) {
        for (int n = 0; n < LANES; ++n) {
            float sum = 0;
            for (i64 block = 0; block < K / BLOCK; ++block) {
                const u8* codes = c.codes[n] + BLOCK / 2 * block;
                const float* at = x + BLOCK * block;
                float even = 0, odd = 0;
                for (int b = 0; b < BLOCK / 2; ++b) {
                    even += E2M1[codes[b] & 15] * at[2 * b];
                    odd += E2M1[codes[b] >> 4] * at[2 * b + 1];
                }
                sum += (even + odd) * Weight::scale(c.scales[n][block]);
            }
            out[n] = sum * c.factor[n];
        }
    }

    static void dequantize(const Columns* columns, const Columns*, int, i64 K, Panel* panel) {
        for (i64 block = 0; block < K / BLOCK; ++block) {
            for (int i = 0; i < LANES; ++i) {
                const float scale = Weight::scale(columns->scales[i][block]) * columns->factor[i];
                const u8* codes = columns->codes[i] + block * (BLOCK / 2);
                float* out = panel + block * BLOCK * LANES + i;
                for (int b = 0; b < BLOCK / 2; ++b) {
                    out[(2 * b) * LANES] = E2M1[codes[b] & 15] * scale;
                    out[(2 * b + 1) * LANES] = E2M1[codes[b] >> 4] * scale;
                }
            }
        }
    }
};

template <class Weight>
struct GenericTier {
    using Wide = Panels<Generic<Weight>>;
    template <class A>
    using Fast = Kernels<SmallM<Generic<Weight>>, Panels<Generic<Weight>>>;
    struct Thread {};
    static constexpr double DEQUANTIZE_ROWS = 8;
};

}  // namespace
