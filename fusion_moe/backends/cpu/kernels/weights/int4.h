// INT4: integers of -8 to 7 as codes, 8 more, [G, N, K/2], a bfloat16 scale for 32 of them [G, N,
// K/32].
#pragma once

#include "weight.h"

namespace {

struct INT4 : PortableWeight {
    static constexpr double BYTES = 0.5625;
    static constexpr i64 BLOCK = 32, ALIGNED = LANES;
    static_assert(BLOCK % LANES == 0, "sixteen codes of a row share a block scale");

    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        const i64 first = (g * p.N + n) * p.K + k;
        const u8* codes = static_cast<const u8*>(p.parts[0]) + first / 2;
        const bf16* scales = static_cast<const bf16*>(p.parts[1]) + first / BLOCK;
        u8 of_run[RUN];
        spread(codes, count / 2, of_run);
        for (i64 i = 0; i < count; i += LANES) {
            const float scale = widen(scales[(k % BLOCK + i) / BLOCK]);
            for (i64 j = i; j < i + LANES; ++j) out[j] = float(of_run[j] - 8) * scale;
        }
    }

  private:
    // Bytes of two codes -> one code a byte, by arithmetic that compilers make vectors of.
    static void spread(const u8* two, i64 bytes, u8* one) {
        u16 pairs[RUN / 2];
        for (i64 i = 0; i < bytes; ++i) pairs[i] = u16((two[i] | two[i] << 4) & 0x0F0F);
        std::memcpy(one, pairs, 2 * bytes);
    }
};

}  // namespace

using Weight = INT4;
