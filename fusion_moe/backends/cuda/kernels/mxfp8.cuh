// Copies of numbers in MXFP8: e4m3 codes, and a power of two for 32 of them in a row, or of a
// column; both from one read.
//
// A warp looks for a tile of 32 rows once and has up to four strips of it, of 64 columns; a lane
// has eight columns of every fourth row, and loads all before it needs the first. Rows of groups
// are in tiles that no group shares.
#pragma once

#include "routing.cuh"

namespace {

// The byte of a scale, from the bits of the largest magnitude: amax / 448, rounded up to a power of
// two. Without branches: 254 for infinity, 255 for NaN, which a product makes 0x7FFFFFFF.
__device__ __forceinline__ u32 e8m0_of(u32 most) {
    const u32 bits = __float_as_uint(__uint_as_float(most) * (1.f / 448.f)),
              up = (bits + 0x7FFFFF) >> 23;
    return up - u32(up >= 255) - u32(bits - 1 < 0x400000);
}

// What a number is multiplied by before it is rounded: 1 over a scale.
__device__ __forceinline__ float over_e8m0(u32 byte) {
    return __uint_as_float(byte == 255 ? 0x7FC00000 : max((254 - byte) << 23, 0x400000u));
}

// Two numbers as codes, the first in the low byte; beyond 448 they saturate.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 bits = __float_as_uint(i ? high : low), size = bits & 0x7FFFFFFF;
        const u32 normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - 8 * 120,
                  subnormal = __float2uint_rn(__uint_as_float(size) * 0x1p9f);
        const u32 code = size > 0x7F800000   ? 0x7F
                         : size < 0x3C800000 ? subnormal  // below 2^-6
                                             : min(normal, 0x7Eu);
        codes |= (code | (code == 0x7F ? 0 : bits >> 24 & 0x80)) << 8 * i;
    }
    return u16(codes);
#endif
}

// What two codes and their scales stand for, which bf16 holds.
__device__ __forceinline__ u32 numbers_of(u16 codes, float low_scale, float high_scale) {
    const u32 halves = halves_of(codes);
    return narrow_pair<bf16>(widen(f16{u16(halves)}) * low_scale,
                             widen(f16{u16(halves >> 16)}) * high_scale);
}

// Eight numbers of a row as bits, whose magnitudes compare as the numbers do, NaN above all.
template <class T>
struct Bits {
    static constexpr int WORDS = 8;
    u32 at[WORDS];

    Bits() = default;
    __device__ __forceinline__ explicit Bits(const float (&x)[8]) {
#pragma unroll
        for (int v = 0; v < 8; ++v) at[v] = __float_as_uint(x[v]);
    }
    __device__ __forceinline__ float number(int v) const { return __uint_as_float(at[v]); }
    __device__ __forceinline__ static u32 magnitude(u32 word) { return word & 0x7FFFFFFF; }
    __device__ __forceinline__ static u32 larger(u32 a, u32 b) { return max(a, b); }
    __device__ __forceinline__ static u32 largest(u32 word) {
        return word;
    }  // of its magnitudes, as float32
};

// bf16 numbers are two in a word.
template <>
struct Bits<bf16> {
    static constexpr int WORDS = 4;
    u32 at[WORDS];

    Bits() = default;
    __device__ __forceinline__ explicit Bits(const float (&x)[8]) {
#pragma unroll
        for (int v = 0; v < 8; v += 2) {
            at[v / 2] = __float_as_uint(x[v]) >> 16 | (__float_as_uint(x[v + 1]) & 0xFFFF0000);
            asm("" : "+r"(at[v / 2]));  // as it was loaded: the compiler takes it apart otherwise
        }
    }
    __device__ __forceinline__ float number(int v) const {
        return __uint_as_float(v % 2 ? at[v / 2] & 0xFFFF0000 : at[v / 2] << 16);
    }
    __device__ __forceinline__ static u32 magnitude(u32 word) { return word & 0x7FFF7FFF; }
    __device__ __forceinline__ static u32 larger(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
        u32 both;
        asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
#else
        return __vmaxu2(a, b);
#endif
    }
    __device__ __forceinline__ static u32 largest(u32 word) {
        return max(word << 16, word & 0xFFFF0000);
    }
};

// Scales of eight columns.
struct Scales {
    u32 byte[8];
    float scale[8], over[8];

    // most: the magnitude in each.
    template <class T>
    __device__ __forceinline__ explicit Scales(const Bits<T>& most) {
#pragma unroll
        for (int v = 0; v < 8; ++v) set(v, e8m0_of(__float_as_uint(most.number(v))));
    }

    // One for all.
    __device__ __forceinline__ explicit Scales(u32 byte_of_all) {
#pragma unroll
        for (int v = 0; v < 8; ++v) set(v, byte_of_all);
    }

  private:
    __device__ __forceinline__ void set(int v, u32 e8m0) {
        byte[v] = e8m0, scale[v] = e8m0_(e8m0), over[v] = over_e8m0(e8m0);
    }
};

// Where a copy is stored; null where it is not needed. numbers: those that codes and scales stand
// for.
struct Copy {
    u8 *codes = nullptr, *scales = nullptr;
    bf16* numbers = nullptr;

    // Eight of a row, from place `at` on.
    template <class T>
    __device__ __forceinline__ void store(i64 at, const Bits<T>& x, const Scales& by) const {
        Vector<u16, 4> made;
        Vector<u32, 4> wide;
#pragma unroll
        for (int v = 0; v < 8; v += 2) {
            made.at[v / 2] = e4m3_pair(x.number(v) * by.over[v], x.number(v + 1) * by.over[v + 1]);
            wide.at[v / 2] = numbers_of(made.at[v / 2], by.scale[v], by.scale[v + 1]);
        }
        if (codes) store_vector<4>(reinterpret_cast<u16*>(codes + at), made);
        if (numbers) store_vector<4>(reinterpret_cast<u32*>(numbers + at), wide);
    }
};

// Rows from the first on, as many as a tile has at most. in_group: whether some group has them.
struct RowTile {
    i64 first;
    i32 rows;
    bool in_group;
};

// Rows of matrices.
template <i32 TILE>
struct PlainTiles {
    i64 rows;

    __device__ __forceinline__ i64 tiles() const { return (rows + TILE - 1) / TILE; }
    __device__ __forceinline__ i64 blocks() const { return tiles(); }
    __device__ __forceinline__ RowTile at(i64 tile) const {
        return {TILE * tile, i32(min(rows - TILE * tile, i64(TILE))), true};
    }
};

using PlainRows = PlainTiles<32>;

// Rows of groups, each of which begins with a tile of its own, as groups.block_slots has it; then
// those of no group. Tiles may be empty.
template <i32 GROUPS, i32 TILE = 32>
struct GroupedRows {
    const i32* ends;
    i64 rows;
    i64* error;

    __device__ __forceinline__ i64 tiles() const { return blocks() + 1; }
    __device__ __forceinline__ i64 blocks() const { return (rows + TILE - 1) / TILE + GROUPS; }

    // By whole warps. Ends that are wrong are reported, and nothing is read past the rows.
    __device__ __forceinline__ RowTile at(i64 number) const {
        const i32 tile = i32(number), all = i32(rows);
        if (tile == 0) check_ends();
        i32 before = 0;
        for (i32 g = threadIdx.x % 32; g < GROUPS; g += 32)
            before += ends[g] / TILE + g + 1 <= tile;
        const i32 group = __reduce_add_sync(WHOLE_WARP, before);
        const i32 start = group > 0 ? min(max(ends[group - 1], 0), all) : 0;
        const i32 end = group < GROUPS ? min(max(ends[group], start), all) : all;
        const i32 first = min(max(start + TILE * (tile - start / TILE - group), start), end);
        return {first, min(end - first, TILE), group < GROUPS};
    }

  private:
    __device__ __forceinline__ void check_ends() const {
        for (i32 g = threadIdx.x % 32; g < GROUPS; g += 32) {
            const i32 end = ends[g], least = g > 0 ? ends[g - 1] : 0;
            if (end < least || end > rows) report(error, BAD_END, g, end);
        }
    }
};

// Calls body(tile, its number, strip) on warps: the first of the strips that a warp has of a tile,
// of which every WARPS-th is its own.
template <i32 K>
struct Strips {
    static constexpr i32 COUNT = (K + 63) / 64, WARPS = (COUNT + 3) / 4;  // of a tile

    template <class Tiles, class Body>
    __device__ __forceinline__ static void for_all(const Tiles& tiles, Body body) {
        for_all_warps(tiles.tiles() * WARPS, [&](i64 i) {
            const i64 number = i / WARPS;
            body(tiles.at(number), number, i32(i % WARPS));
        });
    }

    // A lane's first column, whether there is one, and its rows: s below 8.
    __device__ __forceinline__ static i32 column(i32 strip) {
        return 64 * strip + threadIdx.x % 8 * 8;
    }
    __device__ __forceinline__ static bool there(i32 strip) {
        return K % 64 == 0 || column(strip) < K;
    }
    __device__ __forceinline__ static i32 row(int s) { return 4 * s + threadIdx.x % 32 / 8; }
    __device__ __forceinline__ static i64 row_inside(const RowTile& tile, int s) {
        return tile.first + min(row(s), tile.rows - 1);
    }
};

// The byte of the scale of 32 numbers of a row, eight in each of four lanes.
template <class T>
__device__ __forceinline__ u32 e8m0_of_row(const Bits<T>& x) {
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < x.WORDS; ++w) most = x.larger(most, x.magnitude(x.at[w]));
    most = x.larger(most, __shfl_xor_sync(WHOLE_WARP, most, 1));
    most = x.larger(most, __shfl_xor_sync(WHOLE_WARP, most, 2));
    return e8m0_of(x.largest(most));
}

// The largest magnitudes of columns, eight in each of eight lanes, whose rows are in four of them.
template <class T>
__device__ __forceinline__ Bits<T> largest_of_columns(const Bits<T> (&x)[8]) {
    Bits<T> most{};
#pragma unroll
    for (int w = 0; w < most.WORDS; ++w) {
#pragma unroll
        for (int s = 0; s < 8; ++s)
            most.at[w] = most.larger(most.at[w], most.magnitude(x[s].at[w]));
        most.at[w] = most.larger(most.at[w], __shfl_xor_sync(WHOLE_WARP, most.at[w], 8));
        most.at[w] = most.larger(most.at[w], __shfl_xor_sync(WHOLE_WARP, most.at[w], 16));
    }
    return most;
}

// Copies of [rows, K] numbers of type T. row(m)(j0, x): columns j0 .. j0 + 7 of row m. IN_ROWS,
// IN_COLUMNS: which of the two are made.
template <class T, i32 K, bool IN_ROWS, bool IN_COLUMNS, class Tiles, class Row>
__device__ __forceinline__ void make_copies(const Tiles& tiles, Row row, const Copy& in_rows,
                                            const Copy& in_columns) {
    using S = Strips<K>;
    S::for_all(tiles, [&](const RowTile& tile, i64 number, i32 first) {
        const auto store_scales = [&](i32 strip, const Vector<u8, 8>& bytes) {
            if (in_columns.scales && threadIdx.x % 32 < 8 && S::there(strip) &&
                number < tiles.blocks())
                store_vector<8>(in_columns.scales + number * K + S::column(strip), bytes);
        };
        if (tile.rows == 0) {
            for (i32 strip = first; strip < S::COUNT; strip += S::WARPS) store_scales(strip, {});
            return;
        }
        const auto at = [&](int s) { return row(S::row_inside(tile, s)); };
        const decltype(at(0)) rows[8] = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)};
#pragma unroll 1
        for (i32 strip = first; strip < S::COUNT; strip += S::WARPS) {
            const i32 j0 = S::column(strip);
            Bits<T> x[8] = {};
            if (S::there(strip)) {
#pragma unroll
                for (int s = 0; s < 8; ++s) {
                    float wide[8];
                    rows[s](j0, wide);
                    x[s] = Bits<T>(wide);
                }
            }
            if constexpr (IN_ROWS) {
                u32 byte[8];
#pragma unroll
                for (int s = 0; s < 8; ++s) byte[s] = e8m0_of_row(x[s]);
#pragma unroll
                for (int s = 0; s < 8; ++s) {
                    const i64 m = tile.first + S::row(s);
                    const Scales by(byte[s]);
                    if (S::row(s) < tile.rows && S::there(strip)) {
                        if (in_rows.scales && threadIdx.x % 4 == 0)
                            in_rows.scales[m * (K / 32) + j0 / 32] = byte[s];
                        in_rows.store(m * K + j0, x[s], by);
                    }
                }
            }
            if constexpr (IN_COLUMNS) {
                if (!tile.in_group) {
#pragma unroll
                    for (int s = 0; s < 8; ++s) x[s] = {};
                }
                const Scales by(largest_of_columns(x));
                Vector<u8, 8> bytes;
#pragma unroll
                for (int v = 0; v < 8; ++v) bytes.at[v] = by.byte[v];
                store_scales(strip, bytes);
#pragma unroll
                for (int s = 0; s < 8; ++s) {
                    const i64 m = tile.first + S::row(s);
                    if (S::row(s) < tile.rows && S::there(strip))
                        in_columns.store(m * K + j0, x[s], by);
                }
            }
        }
    });
}

// The bf16 numbers of a copy [rows, K] in blocks along rows of groups; zeros in rows of none.
template <i32 K, i32 GROUPS>
__device__ __forceinline__ void read_copy(const GroupedRows<GROUPS>& tiles, const u8* codes,
                                          const u8* scales, bf16* numbers) {
    using S = Strips<K>;
    S::for_all(tiles, [&](const RowTile& tile, i64 number, i32 first) {
        if (tile.rows == 0) return;
#pragma unroll 1
        for (i32 strip = first; strip < S::COUNT; strip += S::WARPS) {
            if (!S::there(strip)) continue;
            const i32 j0 = S::column(strip);
            Vector<u16, 4> x[8] = {};
            Vector<u8, 8> bytes = {};
            if (tile.in_group) {
                bytes = load_vector<8>(scales + number * K + j0);
#pragma unroll
                for (int s = 0; s < 8; ++s)
                    x[s] = load_vector<4>(
                        reinterpret_cast<const u16*>(codes + S::row_inside(tile, s) * K + j0));
            }
            float scale[8];
#pragma unroll
            for (int v = 0; v < 8; ++v) scale[v] = e8m0_(bytes.at[v]);
#pragma unroll
            for (int s = 0; s < 8; ++s) {
                const i64 m = tile.first + S::row(s);
                Vector<u32, 4> wide;
#pragma unroll
                for (int v = 0; v < 8; v += 2)
                    wide.at[v / 2] = numbers_of(x[s].at[v / 2], scale[v], scale[v + 1]);
                if (S::row(s) < tile.rows)
                    store_vector<4>(reinterpret_cast<u32*>(numbers + m * K + j0), wide);
            }
        }
    });
}

}  // namespace
