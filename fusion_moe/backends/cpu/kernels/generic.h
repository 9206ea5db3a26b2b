// Plain C++: right everywhere, fast nowhere. Weights are read as `dequantize` of their reader makes
// them.
#pragma once

#include "dequantized.h"
#include "e2m1.h"
#include "words.h"

namespace {

struct GenericF32 : F32Words {  // panels are [K][COLUMN_BLOCKS][16]
    static constexpr int ROWS = 4, COLUMN_BLOCKS = 1;

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

}  // namespace
