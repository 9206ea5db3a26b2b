// Numbers as E2M1 codes with a scale for 16 or 32 of them in a row: NVFP4 and MXFP4, as the
// encodings have them bit for bit.
//
// A warp has a tile of 16 rows and 64 columns, a lane 16 columns of two of its rows: what it stores
// as 16 bytes in the order of tiles (layouts/w16x64.py).
#pragma once

#include "block_copies.cuh"

namespace {

// The code of a number, ties to the even one, beyond 6 that of 6, NaN 7; the sign of -0.0 is
// dropped.
__device__ __forceinline__ u32 e2m1_of(float x) {
    const float size = fabsf(x);
    const i32 below = (size <= 0.25f) + (size < 0.75f) + (size <= 1.25f) + (size < 1.75f) +
                      (size <= 2.5f) + (size < 3.5f) + (size <= 5.f);
    return 7 - below + 8 * (x < 0.f);
}

// The codes of numbers over a unit without dividing: those of the magnitudes that lie above limits,
// the largest numbers whose quotients are rounded to below the middle of two codes (or to it, if
// that is a tie of the lower code). For units from 2^-100, so that no limit is rounded twice, to 1,
// so that no quotient becomes zero.
template <class T>
class E2m1Limits {
    static constexpr int SIGN = Bits<T>::WORDS == 4 ? 15 : 31;  // its bit in a word's last number
    static constexpr u32 ONES = SIGN == 31 ? 1 : 0x10001;       // in each number of a word
    static constexpr u32 LARGEST = (1u << SIGN) - 1;
    u32 over_[7];  // what makes a magnitude above the limit set the bit of the sign

  public:
    __device__ __forceinline__ static bool suit(float unit) {
        return unit >= 0x1p-100f && unit <= 1.f;
    }

    __device__ __forceinline__ explicit E2m1Limits(float unit) {
        constexpr float MIDDLE[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f},
                        HALF_ULP[7] = {0x1p-26f, -0x1p-25f, 0x1p-24f, -0x1p-24f,
                                       0x1p-23f, -0x1p-23f, 0x1p-22f};
#pragma unroll
        for (int i = 0; i < 7; ++i) {
            const u32 limit = __float_as_uint(__fmaf_rd(MIDDLE[i], unit, HALF_ULP[i] * unit));
            over_[i] = (LARGEST - (limit >> (31 - SIGN))) * ONES;
        }
    }

    // Of each number of a word, in the low bits of its half.
    __device__ __forceinline__ u32 codes(u32 word) const {
        const u32 size = Bits<T>::magnitude(word);
        u32 above[7];
#pragma unroll
        for (int i = 0; i < 7; ++i) above[i] = size + over_[i];
        const u32 two = above[5] | (above[1] & ~above[3]),
                  one = above[6] | (above[4] & ~above[5]) | (above[2] & ~above[3]) |
                        (above[0] & ~above[1]),
                  negative = word & (size + LARGEST * ONES);
        return (one >> SIGN & ONES) | (two >> (SIGN - 1) & 2 * ONES) |
               (above[3] >> (SIGN - 2) & 4 * ONES) | (negative >> (SIGN - 3) & 8 * ONES);
    }
};

// Codes of eight numbers over a unit, two in a word, the first in its low half.
template <class T>
__device__ __forceinline__ void e2m1_pairs(u32* pairs, const Bits<T>& x, float unit,
                                           const E2m1Limits<T>& limits, bool suit) {
#pragma unroll
    for (int v = 0; v < 8; v += 2) {
        if (!suit) {
            pairs[v / 2] = e2m1_of(__fdiv_rn(x.number(v), unit)) |
                           e2m1_of(__fdiv_rn(x.number(v + 1), unit)) << 16;
        } else if constexpr (Bits<T>::WORDS == 4) {
            pairs[v / 2] = limits.codes(x.at[v / 2]);
        } else {
            pairs[v / 2] = limits.codes(x.at[v]) | limits.codes(x.at[v + 1]) << 16;
        }
    }
}

// The scale of numbers, a lane's, whose largest magnitude in the block has the bits `most`: as it
// is stored, and as in tiles; unit: the number that code 2 stands for. LEAST .. LARGEST: what a
// search stores.
struct E4m3Scale {
    static constexpr i32 BLOCK = 16, LEAST = 1, LARGEST = 0x7E;
    u32 stored;
    float unit;

    template <class Numbers>
    __device__ __forceinline__ E4m3Scale(u32 most, float of_matrix, const Numbers&) {
        const float wanted = __fdiv_rn(__uint_as_float(most), 6.f * of_matrix);
        const float inside = wanted != wanted ? wanted : fminf(fmaxf(wanted, 0x1p-9f), 448.f);
        stored = most == 0 ? 0x38 : e4m3_pair(inside, 0.f);
        unit = most == 0 ? 1.f : number(stored, of_matrix);
    }
    __device__ __forceinline__ static float number(u32 stored, float of_matrix) {
        return of_matrix * e4m3_(stored);
    }

    // With five bits of exponent: bytes of subnormal numbers, 0x80 more, NaN.
    __device__ __forceinline__ u32 in_tiles() const {
        constexpr u64 SUBNORMAL = 0x868482807C787000;
        return stored < 8 ? u8(SUBNORMAL >> 8 * stored) : stored == 0x7F ? 1 : stored + 0x80;
    }
};

struct PowerOfTwoOf4Bits {
    static constexpr i32 BLOCK = 32, LEAST = 0, LARGEST = 254;
    u32 stored;
    float unit;

    template <class Numbers>
    __device__ __forceinline__ PowerOfTwoOf4Bits(u32 most, float, const Numbers&) {
        stored = most >= 0x7F800000 ? 255 : max(most >> 23, 2u) - 2;
        unit = most == 0 ? 1.f : number(stored, 1.f);
    }
    __device__ __forceinline__ static float number(u32 stored, float) { return e8m0_(stored); }
    __device__ __forceinline__ u32 in_tiles() const { return stored; }
};

// The number of a code that is nearest to a magnitude, as `nearest` in encodings/e2m1.py; of NaN 6.
__device__ __forceinline__ float e2m1_nearest(float size) {
    const float inside = fminf(size, 6.f), power = fmaxf(inside, 1.f),
                large = __uint_as_float(__float_as_uint(power) & 0x7F800000) * 0x1p22f;
    return inside + large - large;
}

// The squared error of magnitudes that are rounded to codes times a step, summed in pairs. over:
// what divides by the step.
template <class Over>
__device__ __forceinline__ float squared_error(const float (&sizes)[16], float step, Over over) {
    float squares[16];
#pragma unroll
    for (int v = 0; v < 16; ++v) {
        const float off = e2m1_nearest(over(sizes[v])) * step - sizes[v];
        squares[v] = off * off;
    }
#pragma unroll
    for (int apart = 1; apart < 16; apart *= 2) {
#pragma unroll
        for (int v = 0; v < 16; v += 2 * apart) squares[v] += squares[v + apart];
    }
    return squares[0];
}

// The scale with the least squared error (encodings/search.py): the usual one, or one of FIRST ..
// LAST numbers up from that of so many halves of the largest magnitude.
//
// Quotients are products with the reciprocal, corrected once by what remains, to 2^-46. They are
// rounded as by dividing: tried for all steps from 1 to 2, and what lies within 6 ulp of each
// middle.
template <class Usual, i32 HALVES, i32 FIRST, i32 LAST>
struct Searched : Usual {
    template <class Numbers>
    __device__ __forceinline__ Searched(u32 most, float of_matrix, const Numbers& x)
        : Usual(most, of_matrix, x) {
        float sizes[16], least = INFINITY;
#pragma unroll
        for (int v = 0; v < 16; ++v) sizes[v] = fabsf(x[v / 8].number(v % 8));
        const float largest = __uint_as_float(most);
        const Usual beside(__float_as_uint(largest * (HALVES / 2.f)), of_matrix, x);
        const u32 usual = this->stored;
#pragma unroll 1
        for (i32 d = FIRST - 1; d <= LAST; d += HALVES == 2 && d == -1 ? 2 : 1) {
            const u32 tried =
                d < FIRST ? usual : min(max(i32(beside.stored) + d, Usual::LEAST), Usual::LARGEST);
            const float signed_step = Usual::number(tried, of_matrix), step = fabsf(signed_step);
            float error;
            if (step >= 0x1p-100f && step <= 0x1p100f && largest <= 0x1p20f * step) {
                const float over = __frcp_rn(step);
                error = squared_error(sizes, step, [=](float size) {
                    const float near = size * over;
                    return __fmaf_rn(__fmaf_rn(-near, step, size), over, near);
                });
            } else {
                error =
                    squared_error(sizes, step, [=](float size) { return __fdiv_rn(size, step); });
            }
            if (Usual::BLOCK == 32) error += __shfl_xor_sync(WHOLE_WARP, error, 1);
            if (!(error < least)) continue;
            least = error, this->stored = tried;
            if (most != 0) this->unit = signed_step;
        }
    }
};

// Both halves of a word of a tile (encodings/e2m1.py). at_hi: the codes of h and i, that of j = 0
// in the low half.
__device__ __forceinline__ u32 e2m1_word(u32 at_00, u32 at_01, u32 at_10, u32 at_11) {
    constexpr u32 SIGN = 0x80008, SIZE = 0x70007;
    const u32 rotated = __byte_perm(at_10 & SIZE, 0, 0x1032);
    return (at_00 & SIGN) << 12 | (at_00 & SIZE) << 6 | (at_01 & SIGN) << 6 | (at_01 & SIZE) |
           (at_10 & SIGN) | rotated << 10 | (at_11 & SIGN) << 10 | (at_11 & 0x40004) << 12 |
           (at_11 & 0x30003) << 4;
}

// A tile of [rows, K] numbers of type T, that begins at row `top` and column 64 * across; end: the
// row after the last of its matrix.
template <class T, class Scale, i32 K, bool TILES>
class E2m1Tile {
    static constexpr i32 LANES = Scale::BLOCK / 16;  // with one scale
    i64 first_, end_;                                // of a lane's rows; the other is eight below
    i32 k0_;
    Bits<T> x_[2][2] = {};

    __device__ __forceinline__ bool has(int i) const {
        return first_ + 8 * i < end_ && (K % 64 == 0 || k0_ < K);
    }

  public:
    static constexpr i32 ACROSS = (K + 63) / 64;

    // row(m)(j0, x): columns j0 .. j0 + 7 of row m.
    template <class Row>
    __device__ __forceinline__ E2m1Tile(i64 top, i64 end, i32 across, Row row)
        : first_(top + threadIdx.x % 32 / 4), end_(end), k0_(across * 64 + threadIdx.x % 4 * 16) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!has(i)) continue;
            const auto columns = row(first_ + 8 * i);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float wide[8];
                columns(k0_ + 8 * h, wide);
                x_[i][h] = Bits<T>(wide);
            }
        }
    }

    // The bits of a lane's largest magnitude.
    __device__ __forceinline__ u32 largest() const {
        return max(largest_of<T, 2>(x_[0]), largest_of<T, 2>(x_[1]));
    }

    // Stores codes and scales. of_matrix(m): the scale of the matrix of row m; place: the tile's
    // number in the order of tiles.
    template <class OfMatrix>
    __device__ __forceinline__ void store(OfMatrix of_matrix, i64 place, u8* codes,
                                          u8* scales) const {
        const i32 lane = threadIdx.x % 32;
        u32 pairs[2][8], in_tiles[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 most = largest_of<T, 2>(x_[i]);
            if (LANES == 2) most = max(most, __shfl_xor_sync(WHOLE_WARP, most, 1));
            const i64 m = min(first_ + 8 * i, end_ - 1);
            const Scale by(most, of_matrix(m), x_[i]);
            in_tiles[i] = by.in_tiles();
            const E2m1Limits<T> limits(by.unit);
            const bool suit = limits.suit(by.unit);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                e2m1_pairs(pairs[i] + 4 * h, x_[i][h], by.unit, limits, suit);
            if (TILES || !has(i)) continue;
            Vector<u32, 2> words = {};
#pragma unroll
            for (int p = 0; p < 8; ++p)
                words.at[p / 4] |= ((pairs[i][p] | pairs[i][p] >> 12) & 0xFF) << p % 4 * 8;
            store_vector<2>(reinterpret_cast<u32*>(codes + (m * K + k0_) / 2), words);
            if (lane % LANES == 0) scales[(m * K + k0_) / Scale::BLOCK] = u8(by.stored);
        }
        if constexpr (TILES) {
            Vector<u32, 4> words;
#pragma unroll
            for (int v = 0; v < 4; ++v)
                words.at[v] = e2m1_word(pairs[0][v], pairs[1][v], pairs[0][4 + v], pairs[1][4 + v]);
            store_vector<4>(reinterpret_cast<u32*>(codes + place * 512) + lane * 4, words);
            if (lane % LANES == 0)
                reinterpret_cast<u16*>(scales)[(place * 32 + lane) / LANES] =
                    u16(in_tiles[0] | in_tiles[1] << 8);
        }
    }
};

// Codes and scales of [rows, K] numbers of type T, in the order of tiles or of rows.
template <class T, class Scale, i32 K, bool TILES, class Row, class OfMatrix>
__device__ __forceinline__ void make_e2m1(i64 rows, Row row, OfMatrix of_matrix, u8* codes,
                                          u8* scales) {
    using Tile = E2m1Tile<T, Scale, K, TILES>;
    for_all_warps((rows + 15) / 16 * Tile::ACROSS, [&](i64 i) {
        const Tile tile(i / Tile::ACROSS * 16, rows, i32(i % Tile::ACROSS), row);
        tile.store(of_matrix, i, codes, scales);
    });
}

// The same for matrices [rows, K], each with the scale for which its largest magnitude is the
// largest product of a code and a scale, which is `largest`. state: zeros, 1 + 2 * matrices.
//
// Blocks claim pieces of matrices, in order: one to find the largest magnitude of matrix l, then
// one of matrix l - ahead to round, whose numbers come from the cache. Who rounds waits for pieces
// that were claimed before, and these wait for none that were claimed later. So a block claims its
// next piece while it has one. CLAIMED: pieces that all blocks have at once.
template <class T, class Scale, i32 K, bool TILES, i32 CLAIMED = 640, class Row>
__device__ __forceinline__ void make_e2m1_by_matrix(i64 matrices, i64 rows, Row row, float largest,
                                                    u32* state, u8* codes, u8* scales,
                                                    float* of_matrix) {
    using Tile = E2m1Tile<T, Scale, K, TILES>;
    constexpr i32 PIECE = 16;  // tiles
    const i64 tiles = (rows + 15) / 16 * Tile::ACROSS, pieces = (tiles + PIECE - 1) / PIECE,
              ahead = 2 + CLAIMED / (2 * pieces), all = (matrices + ahead) * 2 * pieces;
    u32 *const most = state + 1, *const done = most + matrices;
    __shared__ u32 claimed, found;
    const i32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 next = 0;
    if (threadIdx.x == 0) next = atomicAdd(state, 1u);
    while (true) {
        __syncthreads();  // all have read the last piece
        if (threadIdx.x == 0) claimed = next, next = atomicAdd(state, 1u);
        __syncthreads();
        if (claimed >= all) return;
        const bool rounds = claimed % 2;
        const i64 l = claimed / (2 * pieces) - (rounds ? ahead : 0),
                  first = claimed % (2 * pieces) / 2 * PIECE;
        if (l < 0 || l >= matrices) continue;
        const auto load = [&](i64 i) {
            return Tile(l * rows + i / Tile::ACROSS * 16, (l + 1) * rows, i32(i % Tile::ACROSS),
                        row);
        };
        const i64 end = min(first + PIECE, tiles);
        if (rounds) {
            Tile ahead = load(min(first + warp, end - 1));  // while one thread waits
            if (threadIdx.x == 0) {
                while (*const_cast<const volatile u32*>(done + l) < pieces) {
                }
                __threadfence();
                found = *const_cast<const volatile u32*>(most + l);
            }
            __syncthreads();
            const float scale = __fdiv_rn(__uint_as_float(found), largest);
            if (first == 0 && threadIdx.x == 0) of_matrix[l] = scale;
#pragma unroll 1
            for (i64 i = first + warp; i < end; i += warps) {
                const Tile tile = ahead;
                if (i + warps < end) ahead = load(i + warps);
                tile.store([=](i64) { return scale; }, l * tiles + i, codes, scales);
            }
            continue;
        }
        u32 here = 0;
#pragma unroll 2
        for (i64 i = first + warp; i < end; i += warps) here = max(here, load(i).largest());
        here = __reduce_max_sync(WHOLE_WARP, here);
        if (threadIdx.x % 32 == 0) {
            atomicMax(most + l, here);
            __threadfence();
        }
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(done + l, 1u);
    }
}

}  // namespace
