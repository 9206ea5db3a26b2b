// Weight readers. Kernels see a weight through one of them and know no encoding; a library
// (fprop.cpp, dgrad.cpp) is compiled for one, `Weight`.
//
// Every reader is a struct with
//
//     BYTES            of an element in memory, its share of the scales included
//     dequantize       elements k .. k + count - 1 of row n of matrix g as float32: the reference's
//     numbers, for every byte there is.
//                      k is a multiple of ALIGNED, and so is count, which is at most RUN, but at
//                      the end of a row
//     ALIGNED          RUN, or less if it can do with less
//     open             row(i) of matrix g for each column i of sixteen -> Columns, which kernels
//     are given scales_in_range  whether fast kernels compute a work tile as well as the one for
//     everything begin            called by each thread before a product fetch_scales     brings
//     nearer what that reads of a work tile contracted       how long the contracted axis is
//
// All but the first two come from `PortableWeight`, as does all that the kernels of dequantized.h
// need. Readers of e2m1 codes have more: e2m1.h.
#pragma once

#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

#include "tiles.h"

namespace {

constexpr i64 RUN = 256;

#if defined(__AVX512VBMI__)
// Sixteen codes of four bits, each in the lowest bits of a lane: look-ups take no others.
inline __m512i nibbles_of(const u8* codes) {
    const __m512i shifts =
        _mm512_setr_epi64(0x0400000000, 0x0C00000008, 0x1400000010, 0x1C00000018, 0x2400000020,
                          0x2C00000028, 0x3400000030, 0x3C00000038);
    i64 all;
    std::memcpy(&all, codes, sizeof all);
    return _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(all));
}
#endif

struct PortableWeight {
    static constexpr i64 ALIGNED = RUN;

    struct Columns {
        const Problem* problem;
        i64 g, at[LANES];  // which rows of the matrix; in dgrad which columns
    };

    template <class Row>
    static Columns open(const Problem& p, i64 g, Row row) {
        Columns c{&p, g, {}};
        for (int i = 0; i < LANES; ++i) c.at[i] = row(i);
        return c;
    }

    static bool scales_in_range(const WorkTile&) { return true; }
    static void fetch_scales(const WorkTile&) {}
    static void begin() {}
    static i64 contracted(const Problem& p) { return p.K; }
};

}  // namespace
