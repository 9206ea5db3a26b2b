// Plain C++: right everywhere, fast nowhere.
#pragma once

#include "panels.h"

namespace {

struct Generic {
    using Activation = float;
    using Packed = float;
    using Panel = float;  // [K][SUBS][16]
    static constexpr int FEW = 1, ROWS = 4, SUBS = 1;

    static void pack_few(const float* x, i64 r, Packed* packed, i64 stride, i64 K) { pack(x, packed + r * stride, K); }

    static void few(int, const Columns& c, const Columns&, const Packed* x, i64, i64 K, float* out, i64) {
        for (int n = 0; n < LANES; ++n) {
            float sum = 0;
            for (i64 block = 0; block < K / 16; ++block) {
                const u8* codes = c.codes[n] + 8 * block;
                const float* at = x + 16 * block;
                float even = 0, odd = 0;
                for (int b = 0; b < 8; ++b) {
                    even += E2M1[codes[b] & 15] * at[2 * b];
                    odd += E2M1[codes[b] >> 4] * at[2 * b + 1];
                }
                sum += (even + odd) * E4M3_VALUES[c.scales[n][block]];
            }
            out[n] = sum * c.decode[n];
        }
    }

    static void pack(const float* x, Packed* packed, i64 K) { std::memcpy(packed, x, std::size_t(K) * sizeof(float)); }

    static void decode(const Columns* columns, const Columns*, int, i64 K, Panel* panel) {
        for (i64 block = 0; block < K / 16; ++block) {
            for (int i = 0; i < LANES; ++i) {
                const float scale = E4M3_VALUES[columns->scales[i][block]] * columns->decode[i];
                const u8* codes = columns->codes[i] + block * 8;
                float* out = panel + block * 16 * LANES + i;
                for (int b = 0; b < 8; ++b) {
                    out[(2 * b) * LANES] = E2M1[codes[b] & 15] * scale;
                    out[(2 * b + 1) * LANES] = E2M1[codes[b] >> 4] * scale;
                }
            }
        }
    }

    // x [rows][stride] times the panel -> out [rows][out_stride], of which LANES are written
    static void multiply(int rows, int, const Packed* x, i64 stride, const Panel* panel, i64 K, const Columns*, float* out, i64 out_stride) {
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

struct GenericTier {
    using Wide = Panels<Generic>;
    template <class A>
    using Fast = Kernels<FewRows<Generic>, Panels<Generic>>;
    struct Thread {};
    static constexpr double ROWS_OF_DECODING = 8;
};

}  // namespace
