// Readers that are made from an encoding's descriptor alone (readers.py): codes of 1, 2, 4 or 8
// bits in the linear layout, of 4 or 8 in tiles; any number of block scales; zero points. Weights
// are made as the reference makes them, in float32, and are rounded once to the type of the
// activations, so they are those of a model that was dequantized to it. Integers of four bits are
// made in pairs of 16-bit numbers (pairs.cuh), as by a header of their own (int4.cuh), which is
// faster.
//
// The descriptor, E, says:
//
//     BITS, AFFINE, FLIP, FIRST     bits of a code. If AFFINE, a code's number is
//                                   (code ^ FLIP) + FIRST; if not, `number(code)` looks it up
//     E4M3                          whether codes are those of an instruction that converts two
//     Scales                        Parts<...>: the block scales and zero points, each with
//         BYTES, BLOCK              the size of a stored one; the columns that share one, 0 for all
//         ZERO_POINT                whether it is subtracted from numbers, and is no factor
//         of(s), value(bits)        where its array begins; the float32 that a stored one means
//     Outer                         the scale of a matrix: see reader.cuh
//     ScaleOrder, ElementOrder      of layouts that are not tiles
//     Step                          if it is there, numbers are made in pairs: pairs.cuh
#pragma once

#include "weights/pairs.cuh"
#include "weights/reader.cuh"

namespace {

template <class... Part>
struct Parts {
    static constexpr int COUNT = sizeof...(Part), STORED = COUNT > 0 ? COUNT : 1;
};

__device__ constexpr i32 at_least_1(i32 n) { return n > 0 ? n : 1; }

// Codes of a row, 2 to 16 bytes, by one load: several that have the same sectors would read them
// from the second-level cache as many times.
template <int BYTES>
__device__ __forceinline__ void load_codes(u32* words, const u8* p) {
    static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "16 codes of 1 to 8 bits");
    if constexpr (BYTES == 16) {
        const uint4 all = load_no_allocate(p);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (BYTES == 8) {
        const uint2 all = load_no_allocate_8(p);
        words[0] = all.x, words[1] = all.y;
    } else {
        words[0] = load_number<BYTES>(p);
    }
}

// What the scales of a row's block amount to.
struct Affine {
    float zero, step;
};

template <class E, class List = typename E::Scales>
struct Decode;

template <class E, class... Part>
struct Decode<E, Parts<Part...>> {
    static constexpr float BIG = 8388608.f;  // 2^23: of larger floats the last bit is worth 1
    static_assert(E::BITS == 1 || E::BITS == 2 || E::BITS == 4 || E::BITS == 8,
                  "a byte holds whole codes");

    static __device__ __forceinline__ Affine scales(const u32* stored) {
        Affine found = {0.f, 1.f};
        bool first = true;
        int p = 0;
        ((apply<Part>(found, stored[p++], first)), ...);
        return found;
    }

    // As activations are: the code at a bit of a word, and the one APART bits further, of two
    // columns, each with its scales.
    template <class T, int APART>
    static __device__ __forceinline__ u32 pair(u32 word, int bit, const Affine& of_first,
                                               const Affine& of_second) {
        float first, second;
        if constexpr (E::E4M3) {
            const u32 halves = halves_of(half_word(word, bit > 0));
            first = widen(f16{u16(halves)}), second = widen(f16{u16(halves >> 16)});
        } else {
            constexpr u32 MASK = (1u << E::BITS) - 1;
            first = number(word >> bit & MASK), second = number(word >> bit >> APART & MASK);
        }
        return narrow_pair<T>((first - of_first.zero) * of_first.step,
                              (second - of_second.zero) * of_second.step);
    }

  private:
    template <class P>
    static __device__ __forceinline__ void apply(Affine& found, u32 stored, bool& first) {
        const float value = P::value(stored);
        if constexpr (P::ZERO_POINT)
            found.zero = value;
        else
            found.step = first ? value : found.step * value, first = false;
    }

    static __device__ __forceinline__ float number(u32 code) {
        if constexpr (E::AFFINE)
            return __uint_as_float(0x4B000000u | (code ^ E::FLIP)) - (BIG - float(E::FIRST));
        else
            return E::number(code);
    }
};

// What pairs of a row, or single numbers, need of its scales.
template <class T, class E>
using Ready = Choose<Pairs<T, E>::FIT, ReadyPair, Affine>;

template <class T, class E, int PLACE, Which WHICH>
__device__ __forceinline__ Ready<T, E> ready(const u32* stored) {
    if constexpr (Pairs<T, E>::FIT)
        return Pairs<T, E>::template ready<PLACE, WHICH>(stored);
    else
        return Decode<E>::scales(stored);
}

// In the linear layout, or one of other orders: any N, and K in whole blocks. Rows past the last
// are read as the last, columns past the last as codes of 0 with its scales: by a scale of 0 that
// divides they would be infinite.
template <class T, class E, class List = typename E::Scales>
struct DerivedLinear;

template <class T, class E, class... Part>
struct DerivedLinear<T, E, Parts<Part...>> : E::Outer {
    using Order = typename E::ScaleOrder;
    using Elements = typename E::ElementOrder;
    static constexpr float RESCALE = 1.f;
    static constexpr int BITS = E::BITS, BYTES = 2 * BITS;  // of a lane's 16 columns of a row
    static constexpr int WORDS = (BYTES + 3) / 4, STORED = Parts<Part...>::STORED;
    static_assert(((Part::BLOCK % 16 == 0) && ...),
                  "a lane's 16 columns share a scale: blocks are multiples of 16");

    struct Packed {
        u32 codes[2][WORDS], scales[2][STORED];  // of rows r and r + 8
    };
    struct Scales {
        Ready<T, E> of_row[2];
    };

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block,
                                         i32 lane) {
        k_ = 64 * block + 16 * (lane % 4), size_ = Segment::K % 64 == 0 ? 0 : Segment::K;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const i32 n = min(first_row + lane / 4 + 8 * i, Segment::N - 1);
            const i64 row = i64(group) * Segment::N + n;
            codes_[i] = s.weight_codes;
            if constexpr (IS_LINEAR<Elements>)
                codes_[i] += (row * Segment::K + k_) / (8 / BITS);
            else
                codes_[i] += (group * Elements::size(Segment::N, Segment::K / 16) +
                              Elements::of_row(n, Segment::K / 16)) *
                             BYTES;
            int p = 0;
            ((scales_[i][p++] = Part::of(s) + row_of_scales<Part, Segment>(group, n) * Part::BYTES),
             ...);
        }
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        const u32 column = k_ + 64 * blocks_ahead;
        const bool there = size_ == 0 || column < size_;
        const u32 k = there ? column : size_ - 1;
        const i64 place =
            IS_LINEAR<Elements> ? blocks_ahead * (8 * BITS) : Elements::of_column(k / 16) * BYTES;
        Packed packed = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (there) load_codes<BYTES>(packed.codes[i], codes_[i] + place);
            int p = 0;
            ((packed.scales[i][p] = load_bytes<Part::BYTES>(
                  scales_[i][p] + Order::of_column(blocks_before<Part>(k)) * Part::BYTES),
              ++p),
             ...);
        }
        return packed;
    }

    __device__ __forceinline__ void advance(int blocks) {
        k_ += 64 * blocks;
#pragma unroll
        for (int i = 0; i < 2 && IS_LINEAR<Elements>; ++i) codes_[i] += blocks * (8 * BITS);
    }

    static __device__ __forceinline__ Scales scales(const Packed& packed) {
        return {{ready<T, E, 0, LOWER>(packed.scales[0]), ready<T, E, 0, LOWER>(packed.scales[1])}};
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales& scales,
                                                      int v, int half, u32* a) {
        const int first = (8 * half + 2 * v) * BITS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 word = packed.codes[i][first / 32];
            const auto& by = scales.of_row[i];
            if constexpr (Pairs<T, E>::FIT)
                a[i] = Pairs<T, E>::template weights<0>((word >> first % 32 & 0xFF) * 0x1001u, by);
            else
                a[i] = Decode<E>::template pair<T, BITS>(word, first % 32, by, by);
        }
    }

  private:
    template <class P>
    static __device__ __forceinline__ constexpr i32 blocks_before(u32 column) {
        return P::BLOCK > 0 ? column / at_least_1(P::BLOCK) : 0;
    }
    template <class P, class Segment>
    static __device__ __forceinline__ i64 row_of_scales(i32 group, i32 n) {
        constexpr i32 COUNT = blocks_before<P>(Segment::K - 1) + 1;
        if constexpr (IS_LINEAR<Order>) return (i64(group) * Segment::N + n) * COUNT;
        return group * Order::size(Segment::N, COUNT) + Order::of_row(n, COUNT);
    }

    const u8 *codes_[2], *scales_[2][STORED];
    u32 k_, size_;  // unsigned: a division by a block is a shift; size_: 0 if K is whole blocks
};

// The scales of a tile: of 16 rows, and of one or more blocks of its 64 columns. Blocks of more
// columns have a tile of scales for all of the tiles that they cover.
template <class Part>
struct ScaleTile {
    static_assert(Part::BLOCK == 0 || (Part::BLOCK >= 16 && (64 % at_least_1(Part::BLOCK) == 0 ||
                                                             Part::BLOCK % 64 == 0)),
                  "blocks of tiles cover 16, 32 or whole 64 columns");
    static constexpr i32 BLOCKS = Part::BLOCK == 16 || Part::BLOCK == 32 ? 64 / Part::BLOCK : 1;
    static constexpr i32 COVERS = Part::BLOCK >= 64 ? Part::BLOCK / 64 : 1;  // tiles of a row
    static constexpr i32 BYTES = 16 * BLOCKS * Part::BYTES;

    // Which one is that of a tile, of those of rows of row_tiles each.
    static __device__ __forceinline__ constexpr i32 number(i32 row_tiles, i32 tile) {
        if (Part::BLOCK == 0) return tile / row_tiles;
        if (row_tiles % COVERS == 0) return tile / COVERS;
        return tile / row_tiles * ((row_tiles + COVERS - 1) / COVERS) + tile % row_tiles / COVERS;
    }

    // Of row r of a tile, which that of row r + 8 follows, and of the columns from 16 * block on.
    static __device__ __forceinline__ constexpr i32 in_tile(i32 r, i32 block) {
        return 2 * Part::BYTES * (BLOCKS * r + block * BLOCKS / 4);
    }
};

__device__ constexpr i32 most() { return 1; }
template <class... More>
__device__ constexpr i32 most(i32 first, More... more) {
    return first > most(more...) ? first : most(more...);
}

// Stored numbers of rows r and r + 8: in one word if they are used in pairs.
template <class T, class E>
struct OfRows {
    static constexpr int WORDS = Pairs<T, E>::FIT ? 1 : 2;
    u32 scales[WORDS][E::Scales::STORED];

    // Of one part, the first of which lies at p.
    template <class Part>
    __device__ __forceinline__ void read(int part, const u8* p) {
        constexpr int BYTES = 2 * Part::BYTES / WORDS;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) scales[i][part] = read_shared<BYTES>(p + i * BYTES);
    }
    template <class Part>
    __device__ __forceinline__ void load(int part, const u8* p) {
        constexpr int BYTES = 2 * Part::BYTES / WORDS;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) scales[i][part] = load_number<BYTES>(p + i * BYTES);
    }

    // I: row r or r + 8.
    template <int I>
    __device__ __forceinline__ Ready<T, E> of_row() const {
        return ready<T, E, 4 * I, I == 0 ? LOWER : UPPER>(scales[I * (WORDS - 1)]);
    }
};

// The codes that a lane has of a tile, of rows r (i = 0) and r + 8: those of columns 16 c + 8 half
// + 2 v + j are in word v at bit 16 j + 8 half + 4 i, or, of eight bits, in word 2 v + half at bit
// 16 i + 8 j.
template <int BITS>
struct TileCodes;

template <>
struct TileCodes<4> {
    static constexpr int RUNS = 1, APART = 16;
    u32 words[4];

    static __device__ constexpr int word(int v, int) { return v; }
    static __device__ constexpr int bit(int half, int i) { return 8 * half + 4 * i; }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int) { return 16 * lane; }

    // From shared memory. BY_STEP: of block v of 16 columns those of lane column c, for every v.
    template <bool BY_STEP>
    __device__ __forceinline__ void read(const u8* tile, i32 r, i32 c) {
        const u32* row = reinterpret_cast<const u32*>(tile + 64 * r);
#pragma unroll
        for (int v = 0; v < 4; ++v) words[v] = BY_STEP ? row[4 * v + c] : row[4 * c + v];
    }
};

// Two runs of 512 bytes, of v = 0, 1 and of v = 2, 3. In shared memory the 16 bytes of lane
// 4 r + c in a run lie where no two of those share a bank that lanes read at once: all of two rows,
// or block v of four rows in both runs.
template <>
struct TileCodes<8> {
    static constexpr int RUNS = 2, APART = 8;
    u32 words[8];

    static __device__ constexpr int word(int v, int half) { return 2 * v + half; }
    static __device__ constexpr int bit(int, int i) { return 16 * i; }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) {
        return 16 * (lane ^ lane / 8 ^ 2 * run);
    }

    // The eight bytes of step v in block c of row r.
    static __device__ __forceinline__ uint2 of_step(const u8* tile, i32 r, i32 c, i32 v) {
        return *reinterpret_cast<const uint2*>(tile + RUN * (v / 2) +
                                               swizzled_lane(4 * r + c, v / 2) + 8 * (v % 2));
    }

    template <bool BY_STEP>
    __device__ __forceinline__ void read(const u8* tile, i32 r, i32 c) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const uint2 two = BY_STEP ? of_step(tile, r, v, c) : of_step(tile, r, c, v);
            words[2 * v] = two.x, words[2 * v + 1] = two.y;
        }
    }
};

// Columns 16 c + 8 half + 2 v and the next one of row r (I = 0) or r + 8.
template <class T, class E, int I>
__device__ __forceinline__ u32 pair_of_tile(const TileCodes<E::BITS>& codes, int v, int half,
                                            const Ready<T, E>& scales) {
    if constexpr (Pairs<T, E>::FIT) {
        return Pairs<T, E>::template weights<4 * I>(codes.words[v] >> 8 * half, scales);
    } else {
        using Codes = TileCodes<E::BITS>;
        return Decode<E>::template pair<T, Codes::APART>(codes.words[Codes::word(v, half)],
                                                         Codes::bit(half, I), scales, scales);
    }
}

// Tiles of codes in shared memory, each run of lanes as `swizzled_lane` says.
template <class T, class E, bool FRAGMENT_ORDER, class List = typename E::Scales>
struct DerivedShared;

template <class T, class E, bool FRAGMENT_ORDER, class... Part>
struct DerivedShared<T, E, FRAGMENT_ORDER, Parts<Part...>> {
    // With activations in fragment order a step multiplies by columns that lie in one block; else
    // steps by as many blocks as a tile has.
    static constexpr int STORED = Parts<Part...>::STORED,
                         BLOCKS = FRAGMENT_ORDER ? 1 : most(ScaleTile<Part>::BLOCKS...);

    struct Packed {
        TileCodes<E::BITS> codes;
        OfRows<T, E> of_block[BLOCKS];
    };
    u32 codes, scales[STORED], lane;

    __device__ __forceinline__ DerivedShared(u32 first_code, u32 first_scale, i32 lane_)
        : codes(first_code), lane(lane_) {
        if constexpr (Pairs<T, E>::FIT) codes += SharedNibbles<!FRAGMENT_ORDER>::place(lane);
        int p = 0;
        ((scales[p++] =
              first_scale + ScaleTile<Part>::in_tile(lane / 4, FRAGMENT_ORDER ? lane % 4 : 0),
          first_scale += ScaleTile<Part>::BYTES),
         ...);
    }

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) {
        if constexpr (Pairs<T, E>::FIT) return SharedNibbles<!FRAGMENT_ORDER>::swizzled_lane(lane);
        return TileCodes<E::BITS>::swizzled_lane(lane, run);
    }

    __device__ __forceinline__ Packed load(const u8* all_codes, const u8* all_scales) const {
        Packed packed = {};
        if constexpr (Pairs<T, E>::FIT)
            SharedNibbles<!FRAGMENT_ORDER>::read(packed.codes.words, all_codes + codes);
        else
            packed.codes.template read<!FRAGMENT_ORDER>(all_codes + codes, lane / 4, lane % 4);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            int p = 0;
            ((packed.of_block[block].template read<Part>(
                  p, all_scales + scales[p] + ScaleTile<Part>::in_tile(0, block * 4 / BLOCKS)),
              ++p),
             ...);
        }
        return packed;
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, int v, u32 (&a)[4]) {
        row<0>(packed, v, a), row<1>(packed, v, a);
    }

  private:
    template <int I>
    static __device__ __forceinline__ void row(const Packed& packed, int v, u32 (&a)[4]) {
        const Ready<T, E> scales = packed.of_block[v * BLOCKS / 4].template of_row<I>();
#pragma unroll
        for (int half = 0; half < 2; ++half)
            a[2 * half + I] = pair_of_tile<T, E, I>(packed.codes, v, half, scales);
    }
};

// For dgrad, which contracts a tile's 16 rows (four_bits_shared.cuh): of each of four tiles lane 4
// r
// + c of warp w has columns 16 w + r and 16 w + 8 + r (half) of rows 2 c, 2 c + 1 (j), and of those
// 8 further on (i).
template <class T, class E, int APART, int ELEMENTS, int SCALES, class List = typename E::Scales>
struct DerivedTransposed;

template <class T, class E, int APART, int ELEMENTS, int SCALES, class... Part>
struct DerivedTransposed<T, E, APART, ELEMENTS, SCALES, Parts<Part...>> {
    static constexpr int STORED = Parts<Part...>::STORED;

    // Of each step; scales of i, j. Word half of a step has pairs of rows (j), i = 0 before 1; if
    // codes have four bits, both halves share word 0, at bit 16 j + 8 half + 4 i.
    struct Packed {
        u32 codes[4][E::BITS / 4], scales[4][2][2][STORED];
    };
    u32 codes, scales, warp, lane;

    __device__ __forceinline__ DerivedTransposed(u32 first_code, u32 first_scale, i32 warp_,
                                                 i32 lane_)
        : codes(first_code), scales(first_scale), warp(warp_), lane(lane_) {}

    static __device__ __forceinline__ i32 swizzled_lane(i32 lane, int run) {
        return TileCodes<E::BITS>::swizzled_lane(lane, run);
    }

    __device__ __forceinline__ Packed load(const u8* all_codes, const u8* all_scales) const {
        Packed packed = {};
        const i32 r = lane / 4, row = 2 * (lane % 4);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const u8* tile = all_codes + codes + v * APART * ELEMENTS;
            if constexpr (E::BITS == 4) {
                const u8* place = tile + 64 * row + 16 * warp + 2 * r;
                packed.codes[v][0] = read_shared<2>(place) | read_shared<2>(place + 64) << 16;
            } else {
                const uint2 one = TileCodes<8>::of_step(tile, row, warp, r / 2),
                            next = TileCodes<8>::of_step(tile, row + 1, warp, r / 2);
                const u32 bytes = 0x6240 + 0x1111 * (r % 2);  // both of column j = r % 2 in turn
                packed.codes[v][0] = __byte_perm(one.x, next.x, bytes);
                packed.codes[v][1] = __byte_perm(one.y, next.y, bytes);
            }
#pragma unroll
            for (int ij = 0; ij < 4; ++ij) {
                const u8* from = all_scales + scales + v * APART * SCALES;
                int p = 0;
                ((packed.scales[v][ij / 2][ij % 2][p++] = read_shared<Part::BYTES>(
                      from + ScaleTile<Part>::in_tile(row + ij % 2, warp) + ij / 2 * Part::BYTES),
                  from += ScaleTile<Part>::BYTES),
                 ...);
            }
            if constexpr (Pairs<T, E>::FIT)  // rows 2 c and 2 c + 1 in one word
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32(&of_rows)[2][STORED] = packed.scales[v][i];
                    int p = 0;
                    ((of_rows[0][p] |= of_rows[1][p] << 8 * Part::BYTES, ++p), ...);
                }
        }
        return packed;
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, int v, u32 (&a)[4]) {
        if constexpr (Pairs<T, E>::FIT) {
            rows<0>(packed, v, a), rows<1>(packed, v, a);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Affine first = Decode<E>::scales(packed.scales[v][i][0]),
                             second = Decode<E>::scales(packed.scales[v][i][1]);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    using Codes = TileCodes<E::BITS>;
                    a[half + 2 * i] = Decode<E>::template pair<T, Codes::APART>(
                        packed.codes[v][Codes::word(0, half)], Codes::bit(half, i), first, second);
                }
            }
        }
    }

  private:
    template <int I>
    static __device__ __forceinline__ void rows(const Packed& packed, int v, u32 (&a)[4]) {
        const ReadyPair scales = Pairs<T, E>::template ready<4 * I, EACH>(packed.scales[v][I][0]);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            a[half + 2 * I] =
                Pairs<T, E>::template weights<4 * I>(packed.codes[v][0] >> 8 * half, scales);
    }
};

// In tiles (w16x64) of codes in their usual order.
template <class T, class E, class List = typename E::Scales>
struct DerivedTiled;

template <class T, class E, class... Part>
struct DerivedTiled<T, E, Parts<Part...>> : E::Outer {
    static constexpr float RESCALE = 1.f;
    static constexpr int ELEMENTS = TileCodes<E::BITS>::RUNS * RUN,
                         SCALES = (0 + ... + ScaleTile<Part>::BYTES);
    static constexpr bool SCALES_FOLLOW = false;

    template <bool FRAGMENT_ORDER>
    using Shared = DerivedShared<T, E, FRAGMENT_ORDER>;
    template <int APART>
    using Transposed = DerivedTransposed<T, E, APART, ELEMENTS, SCALES>;

    struct Packed {
        TileCodes<E::BITS> codes;
        OfRows<T, E> rows;
    };
    struct Scales {
        Ready<T, E> of_row[2];
    };

    template <class Segment>
    static __device__ __forceinline__ const u8* elements(const Segment& s) {
        return s.weight_codes;
    }

    // The 16 bytes of a piece of a tile's scales, the parts one after the other: where those of the
    // first tile lie, how far apart they are, and the how manieth are those of a tile. row_tiles:
    // in a row of a matrix.
    template <class Segment>
    static __device__ __forceinline__ const u8* first_piece(const Segment& s, i32 piece) {
        const u8* found = nullptr;
        i32 from = 0;
        ((found = 16 * piece < from ? found : Part::of(s) + (16 * piece - from),
          from += ScaleTile<Part>::BYTES),
         ...);
        return found;
    }
    static __device__ __forceinline__ i32 pieces_apart(i32 piece) {
        i32 found = 0, from = 0;
        ((found = 16 * piece < from ? found : ScaleTile<Part>::BYTES,
          from += ScaleTile<Part>::BYTES),
         ...);
        return found;
    }
    static __device__ __forceinline__ i32 piece_of_tile(i32 piece, i32 row_tiles, i32 tile) {
        i32 found = 0, from = 0;
        ((found = 16 * piece < from ? found : ScaleTile<Part>::number(row_tiles, tile),
          from += ScaleTile<Part>::BYTES),
         ...);
        return found;
    }

    template <class Segment>
    __device__ __forceinline__ void open(const Segment& s, i32 group, i32 first_row, i32 block,
                                         i32 lane) {
        constexpr i32 TILES = Segment::K / 64;
        const i64 tile = tile_number<Segment>(group, first_row, block);
        block_ = block;
        codes_ = s.weight_codes + tile * ELEMENTS + lane * 16;
        int p = 0;
        ((scales_[p++] =
              Part::of(s) +
              i64(ScaleTile<Part>::number(TILES, i32(tile - block))) * ScaleTile<Part>::BYTES +
              ScaleTile<Part>::in_tile(lane / 4, lane % 4)),
         ...);
    }

    __device__ __forceinline__ Packed load(int blocks_ahead) const {
        Packed packed = {};
#pragma unroll
        for (int run = 0; run < TileCodes<E::BITS>::RUNS; ++run) {
            const uint4 codes = load_no_allocate(codes_ + ELEMENTS * blocks_ahead + RUN * run);
            u32* words = packed.codes.words + 4 * run;
            words[0] = codes.x, words[1] = codes.y, words[2] = codes.z, words[3] = codes.w;
        }
        const i32 block = block_ + blocks_ahead;
        int p = 0;
        ((packed.rows.template load<Part>(
              p, scales_[p] + (Part::BLOCK > 0 ? block / ScaleTile<Part>::COVERS : 0) *
                                  ScaleTile<Part>::BYTES),
          ++p),
         ...);
        return packed;
    }

    __device__ __forceinline__ void advance(int blocks) {
        codes_ += ELEMENTS * blocks, block_ += blocks;
    }

    static __device__ __forceinline__ Scales scales(const Packed& packed) {
        return {{packed.rows.template of_row<0>(), packed.rows.template of_row<1>()}};
    }

    static __device__ __forceinline__ void dequantize(const Packed& packed, const Scales& scales,
                                                      int v, int half, u32* a) {
        a[0] = pair_of_tile<T, E, 0>(packed.codes, v, half, scales.of_row[0]);
        a[1] = pair_of_tile<T, E, 1>(packed.codes, v, half, scales.of_row[1]);
    }

  private:
    const u8 *codes_, *scales_[Parts<Part...>::STORED];
    i32 block_;
};

}  // namespace
