// Copies of numbers in MXFP8: e4m3 codes, and a power of two for 32 of them in a row, or of a
// column; both from one read. And what copies with other blocks share with these.
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

// The scale of numbers whose largest magnitude has the bits `most`, as it is stored and as a
// number; over: what they are multiplied by to become codes.
struct E8m0Scale {
    using Stored = u8;
    u8 stored;
    float scale, over;

    __device__ __forceinline__ explicit E8m0Scale(u32 most)
        : stored(u8(e8m0_of(most))), scale(e8m0_(stored)), over(over_e8m0(stored)) {}
};

// Codes of eight numbers. over: a function of a column, as in Scale.
template <class T, class Over>
__device__ __forceinline__ void make_codes(u32 (&made)[2], const Bits<T>& x, Over over) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const int v = 4 * w;
        made[w] = e4m3_pair(x.number(v) * over(v), x.number(v + 1) * over(v + 1)) |
                  u32(e4m3_pair(x.number(v + 2) * over(v + 2), x.number(v + 3) * over(v + 3)))
                      << 16;
    }
}

// Where a copy is stored, null where it is not needed. numbers: those that codes and scales stand
// for.
template <class Scale_>
struct BlockCopy {
    using Scale = Scale_;
    static constexpr bool MADE = true;
    u8* codes;
    typename Scale::Stored* scales;
    bf16* numbers;

    // Eight of a row, from place `at` on, if `good`. scale: a function of a column, as in Scale.
    template <class Of>
    __device__ __forceinline__ void store(i64 at, const u32 (&made)[2], Of scale, bool good) const {
        store_if<2>(codes + at, made, good && codes);
        if (numbers) {
            u32 wide[4];
#pragma unroll
            for (int v = 0; v < 8; v += 2)
                wide[v / 2] = numbers_of(u16(made[v / 4] >> v % 4 * 8), scale(v), scale(v + 1));
            store_if<4>(numbers + at, wide, good);
        }
    }
};

struct NoCopy {
    static constexpr bool MADE = false;
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

// A warp's strips of a tile: every WARPS-th.
template <i32 K_>
struct Strips {
    static constexpr i32 K = K_, COUNT = (K + 63) / 64, WARPS = (COUNT + 3) / 4;  // of a tile

    // Calls body(tile, its number, the first strip) on warps.
    template <class Tiles, class Body>
    __device__ __forceinline__ static void for_all_tiles(const Tiles& tiles, Body body) {
        for_all_warps(tiles.tiles() * WARPS, [&](i64 i) {
            const i64 number = i / WARPS;
            body(tiles.at(number), number, i32(i % WARPS));
        });
    }

    // The same for each strip.
    template <class Tiles, class Body>
    __device__ __forceinline__ static void for_all(const Tiles& tiles, Body body) {
        for_all_tiles(tiles, [&](const RowTile& tile, i64 number, i32 first) {
#pragma unroll 1
            for (i32 strip = first; strip < COUNT; strip += WARPS) body(tile, number, strip);
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

// The largest magnitude of 32 numbers of a row, eight in each of four lanes.
template <class T>
__device__ __forceinline__ u32 largest_of_row(const Bits<T>& x) {
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < x.WORDS; ++w) most = x.larger(most, x.magnitude(x.at[w]));
    most = x.larger(most, __shfl_xor_sync(WHOLE_WARP, most, 1));
    most = x.larger(most, __shfl_xor_sync(WHOLE_WARP, most, 2));
    return x.largest(most);
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

// Copies of [rows, K] numbers of type T. row(m)(j0, x): columns j0 .. j0 + 7 of row m.
template <class T, i32 K, class Tiles, class Row, class InRows, class InColumns>
__device__ __forceinline__ void make_copies(const Tiles& tiles, Row row, const InRows& in_rows,
                                            const InColumns& in_columns) {
    using S = Strips<K>;
    S::for_all_tiles(tiles, [&](const RowTile& tile, i64 number, i32 first) {
        const auto store_scales = [&](i32 strip, const Vector<u8, 8>& bytes) {
            if constexpr (InColumns::MADE)
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
            if constexpr (InRows::MADE) {
                u32 most[8];
#pragma unroll
                for (int s = 0; s < 8; ++s) most[s] = largest_of_row(x[s]);
#pragma unroll
                for (int s = 0; s < 8; ++s) {
                    const E8m0Scale by(most[s]);
                    if (in_rows.scales && threadIdx.x % 4 == 0 && S::row(s) < tile.rows &&
                        S::there(strip))
                        in_rows.scales[(tile.first + S::row(s)) * (K / 32) + j0 / 32] = by.stored;
                    u32 made[2];
                    make_codes(made, x[s], [&](int) { return by.over; });
                    in_rows.store((tile.first + S::row(s)) * K + j0, made,
                                  [&](int) { return by.scale; },
                                  S::row(s) < tile.rows && S::there(strip));
                }
            }
            if constexpr (InColumns::MADE) {
                if (!tile.in_group) {
#pragma unroll
                    for (int s = 0; s < 8; ++s) x[s] = {};
                }
                const Bits<T> most = largest_of_columns(x);
                Vector<u8, 8> bytes;
                float over[8], scale[8];
#pragma unroll
                for (int v = 0; v < 8; ++v) {
                    const E8m0Scale by(__float_as_uint(most.number(v)));
                    bytes.at[v] = by.stored, over[v] = by.over, scale[v] = by.scale;
                }
                store_scales(strip, bytes);
#pragma unroll
                for (int s = 0; s < 8; ++s) {
                    u32 made[2];
                    make_codes(made, x[s], [&](int v) { return over[v]; });
                    in_columns.store((tile.first + S::row(s)) * K + j0, made,
                                     [&](int v) { return scale[v]; },
                                     S::row(s) < tile.rows && S::there(strip));
                }
            }
        }
    });
}

// The scales of eight columns.
__device__ __forceinline__ Eight<float> load_scales(const float* scales) {
    return load_eight(scales);
}
__device__ __forceinline__ Eight<float> load_scales(const u8* scales) {
    const Vector<u8, 8> bytes = load_vector<8>(scales);
    Eight<float> found;
#pragma unroll
    for (int v = 0; v < 8; ++v) found.at[v] = e8m0_(bytes.at[v]);
    return found;
}

// The bf16 numbers of a copy [rows, K] in blocks along rows of groups, whose scales are powers of
// two; zeros in rows of none. S: how lanes share a tile, Strips or Square.
template <class S, class Tiles, class Scale>
__device__ __forceinline__ void read_copy(const Tiles& tiles, const u8* codes, const Scale* scales,
                                          bf16* numbers) {
    S::for_all(tiles, [&](const RowTile& tile, i64 number, i32 across) {
        if (tile.rows == 0 || !S::there(across)) return;
        const i32 j0 = S::column(across);
        Eight<float> scale = {};
        Vector<u16, 4> x[8] = {};
        if (tile.in_group) {
            scale = load_scales(scales + number * S::K + j0);
#pragma unroll
            for (int s = 0; s < 8; ++s) {
                const i64 m = tile.first + min(S::row(s), tile.rows - 1);
                x[s] = load_vector<4>(reinterpret_cast<const u16*>(codes + m * S::K + j0));
            }
        }
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            Vector<u32, 4> wide;
#pragma unroll
            for (int v = 0; v < 8; v += 2)
                wide.at[v / 2] = numbers_of(x[s].at[v / 2], scale.at[v], scale.at[v + 1]);
            if (S::row(s) < tile.rows)
                store_vector<4>(
                    reinterpret_cast<u32*>(numbers + (tile.first + S::row(s)) * S::K + j0), wide);
        }
    });
}

}  // namespace
