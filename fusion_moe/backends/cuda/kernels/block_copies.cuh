// Copies of numbers in e4m3 codes, all from one read: with a scale for 128 of them in a row, 128 in
// a column, or 128 x 128; or for 32 in a row or a column (MXFP8).
//
// A tile has a block's rows and 128 columns. A warp has 16 of its rows, a lane eight columns of
// eight rows that follow each other, so that a column's codes are in order too. A block of threads
// has one tile of 128 rows, or four of 32 rows at a time; and some that lie side by side, since
// finding rows takes as long as reading them.
//
// Rows of groups are in tiles that no group shares. A lane loads all its numbers before it needs
// the first.
//
// Instructions bound these kernels next to memory. So stores are predicated, not branched around;
// 16 lanes share a row's scale, which one of them computes; and addresses differ by constants.
#pragma once

#include "codes.cuh"
#include "team.cuh"

namespace {

// Where column c of each 32 lies in a copy by columns, and which column lies at place c: in the
// order in which the threads of a tensor core have sums, so that each has eight that follow each
// other.
__device__ __forceinline__ constexpr i32 place_in_tile(i32 c) {
    return (c & ~30) | c >> 2 & 6 | (c & 6) << 2;
}

// Where a copy is stored, null where it is not needed. TURNED: whether codes are stored by columns,
// too or alone; numbers: those that codes and scales stand for.
template <class Scale_>
struct BlockCopy {
    using Scale = Scale_;
    static constexpr bool MADE = true, TURNED = false;
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
    using Scale = PowerOfTwo<float, 0, 0, 0, 0, 255>;
    static constexpr bool MADE = false, TURNED = false;
};

// A copy in blocks along rows of groups whose codes are stored by columns: [blocks, K, 128], with
// columns where place_in_tile says. Codes of tiles without rows are left as they are: nobody reads
// them, and saved copies differ there from call to call.
template <class Scale_>
struct TurnedCopy {
    using Scale = Scale_;
    static constexpr bool MADE = true, TURNED = true;
    u8* codes;
    typename Scale::Stored* scales;
};

// A copy of matrices of N rows in blocks of 128 x 128, and of the transposed matrices, whose codes
// and scales are the same ones.
template <class Scale_, i32 N>
struct BothWays : BlockCopy<Scale_> {
    static constexpr bool TURNED = true;
    static constexpr i32 ROWS = N;
    u8* turned;
    typename Scale_::Stored* turned_scales;
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
        for (i32 g = threadIdx.x % 32; g < GROUPS; g += 32) check_end(ends, g, rows, error);
    }
};

// Rows of matrices of N rows, each of which begins with a tile of its own.
template <i32 N>
struct MatrixTiles {
    static constexpr i32 EACH = (N + 127) / 128;
    i64 matrices;

    __device__ __forceinline__ i64 tiles() const { return matrices * EACH; }
    __device__ __forceinline__ i64 blocks() const { return tiles(); }
    __device__ __forceinline__ RowTile at(i64 tile) const {
        const i32 top = i32(tile % EACH) * 128;
        return {tile / EACH * N + top, min(N - top, 128), true};
    }
};

// Codes of a tile by columns, 16 of them in a piece. The piece i of column c lies where piece i ^ c
// / 8 % 8 would, with its halves in the other order in the upper columns: so that neither those who
// write eight codes of every eighth column meet in a bank, nor those who read pieces.
struct TurnedTile {
    u32 word[128 * 32];

    // Codes of a lane's eight rows: of the v-th of its columns.
    __device__ __forceinline__ void put(int v, u32 low, u32 high) {
        const i32 eighth = threadIdx.x / 16, columns = threadIdx.x % 16;
        const i32 piece = eighth / 2 ^ columns % 8, half = eighth % 2 ^ columns / 8;
        *reinterpret_cast<Vector<u32, 2>*>(word + columns * 256 + piece * 4 + half * 2 + v * 32) = {
            low, high};
    }
    // Stores pieces: eight lanes those of a column, in four turns. to: of the first turn's column,
    // that of the next turn is `pitch` bytes further on; columns, rows: how many there are.
    __device__ __forceinline__ void store(u8* to, i32 pitch, i32 columns, i32 rows = 128) const {
        const i32 column = threadIdx.x / 8, piece = threadIdx.x % 8;
        to += piece * 16;
        asm("" : "+l"(to));  // so that turns differ by constants
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i32 place = piece ^ (column / 8 + i % 2 * 4);
            const Vector<u32, 4> x =
                *reinterpret_cast<const Vector<u32, 4>*>(word + (column + 32 * i) * 32 + place * 4);
            u32 made[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) made[w] = x.at[i < 2 ? w : w ^ 2];
            store_if<4>(to + i * pitch, made, column + 32 * i < columns && piece * 16 < rows);
        }
    }
};

// Bytes of four rows, of each column.
__device__ __forceinline__ void turn_bytes(const u32 (&x)[4], u32 (&made)[4]) {
    const u32 low[2] = {__byte_perm(x[0], x[1], 0x5140), __byte_perm(x[2], x[3], 0x5140)},
              high[2] = {__byte_perm(x[0], x[1], 0x7362), __byte_perm(x[2], x[3], 0x7362)};
    made[0] = __byte_perm(low[0], low[1], 0x5410), made[1] = __byte_perm(low[0], low[1], 0x7632);
    made[2] = __byte_perm(high[0], high[1], 0x5410),
    made[3] = __byte_perm(high[0], high[1], 0x7632);
}

// Of a dimension that N is the size of: how many columns or rows a tile has from `first` on.
template <i32 N>
__device__ __forceinline__ i32 left_in_tile(i32 first) {
    return N % 128 == 0 ? 128 : min(N - first, 128);
}

// Codes of a lane's eight rows, eight columns each, by columns.
__device__ __forceinline__ void put_turned(TurnedTile& tile, const u32 (&codes)[8][2]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        u32 made[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int s = 4 * half;
            turn_bytes({codes[s][w], codes[s + 1][w], codes[s + 2][w], codes[s + 3][w]},
                       made[half]);
        }
#pragma unroll
        for (int v = 0; v < 4; ++v) tile.put(4 * w + v, made[0][v], made[1][v]);
    }
}

// A tile of matrices [N, K], both multiples of 16, and its scale, as those of the transposed ones.
template <i32 N, i32 K, class Stored>
__device__ __forceinline__ void store_turned_square(u8* to, Stored* scales, i64 tile, i32 across,
                                                    Stored scale, const u32 (&codes)[8][2],
                                                    TurnedTile& shared) {
    constexpr i32 DOWN = (N + 127) / 128;
    const i64 row = tile / DOWN * K + 128 * across;
    const i32 columns = left_in_tile<K>(128 * across),
              rows = left_in_tile<N>(i32(tile % DOWN) * 128);
    put_turned(shared, codes);
    __syncthreads();
    shared.store(to + (row + threadIdx.x / 8) * N + tile % DOWN * 128, 32 * N, columns, rows);
    if (threadIdx.x < columns) scales[(row + threadIdx.x) * DOWN + tile % DOWN] = scale;
}

// A tile's codes by columns of rows of groups: [blocks, K, 128].
template <i32 K>
__device__ __forceinline__ void store_turned_rows(u8* to, i64 tile, i32 across,
                                                  const TurnedTile& shared) {
    const i64 column = tile * K + 128 * across + place_in_tile(threadIdx.x / 8);
    shared.store(to + column * 128, 32 * 128, left_in_tile<K>(128 * across));
}

// The largest magnitudes in each of eight rows that LANES lanes share, bf16 numbers of two rows in
// a word. Each lane gets those of OWN rows, as bits.
template <class T, int LANES>
struct RowsOfLanes {
    static constexpr bool PAIRS = Bits<T>::WORDS == 4;
    static constexpr int COUNT = PAIRS ? 4 : 8, OWN = LANES < 8 ? 8 / LANES : 1;
    static_assert(LANES == 4 || LANES == 16, "a lane has two rows, or half of a pair");

    // The i-th row of this lane, and the lane of a row among them.
    __device__ __forceinline__ static i32 row(int i) {
        const i32 lane = threadIdx.x % LANES;
        if (OWN == 2) return 2 * lane + i;
        return PAIRS ? lane / 4 * 2 + lane % 2 : lane / 2;
    }
    __device__ __forceinline__ static i32 lane_of(int s) {
        if (OWN == 2) return s / 2;
        return PAIRS ? s / 2 * 4 + s % 2 : 2 * s;
    }
    // What the lane of a row has.
    __device__ __forceinline__ static float of(int s, const float (&x)[OWN]) {
        return __uint_as_float(
            __shfl_sync(WHOLE_WARP, __float_as_uint(x[s % OWN]), lane_of(s), LANES));
    }

    // each: of the words of each row.
    __device__ __forceinline__ static void largest(u32 (&own)[OWN], const u32 (&each)[8]) {
        const auto larger = Bits<T>::larger;
        u32 most[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            most[i] = each[i];
            if constexpr (PAIRS)
                most[i] = larger(__byte_perm(each[2 * i], each[2 * i + 1], 0x5410),
                                 __byte_perm(each[2 * i], each[2 * i + 1], 0x7632));
        }
        int lanes = LANES / 2;  // halves of lanes change halves of the rows; then all have the same
#pragma unroll
        for (int n = COUNT / 2; n > 0 && lanes > 0; n /= 2, lanes /= 2) {
            const bool upper = threadIdx.x & lanes;
#pragma unroll
            for (int i = 0; i < n; ++i) {
                const u32 given = upper ? most[i] : most[i + n];
                most[i] = larger(upper ? most[i + n] : most[i],
                                 __shfl_xor_sync(WHOLE_WARP, given, lanes));
            }
        }
#pragma unroll
        for (; lanes > 0; lanes /= 2)
            most[0] = larger(most[0], __shfl_xor_sync(WHOLE_WARP, most[0], lanes));
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const bool high = OWN == 2 ? i : threadIdx.x % 2;
            own[i] = !PAIRS ? most[i] : high ? most[0] & 0xFFFF0000 : most[0] << 16;
        }
    }
};

// A lane's place in tiles of blocks of BLOCK rows.
template <i32 K_, i32 BLOCK_ = 128>
struct Lanes {
    static constexpr i32 K = K_, BLOCK = BLOCK_, ACROSS = (K + 127) / 128;
    static constexpr i32 WARPS = BLOCK / 16, THREADS = 32 * WARPS;  // of a tile
    static constexpr i32 AT_ONCE = 256 / THREADS;                   // tiles of a block of threads
    using Team = ::Team<AT_ONCE, THREADS>;                          // the threads of a tile

    // A lane's first column, and whether there is one; its rows: s below 8.
    __device__ __forceinline__ static i32 column(i32 across) {
        return 128 * across + threadIdx.x % 16 * 8;
    }
    __device__ __forceinline__ static bool there(i32 across) {
        return K % 128 == 0 || column(across) < K;
    }
    __device__ __forceinline__ static i32 row(int s) { return Team::thread() / 16 * 8 + s; }

    // Calls body(tile, its number, tiles before it in its rows, tiles before the end of its run) on
    // all threads of a tile, for the first COUNT tiles of rows.
    template <i32 COUNT = ACROSS, class Tiles, class Body>
    __device__ __forceinline__ static void for_all_runs(const Tiles& tiles, Body body) {
        constexpr i32 RUNS = (COUNT + 3) / 4, RUN = (COUNT + RUNS - 1) / RUNS;
        u32 mine = Team::number();
        // the compiler sees that all of a warp have one
        if constexpr (AT_ONCE > 1) mine = __shfl_sync(WHOLE_WARP, mine, 0);
        for (i64 i = AT_ONCE * blockIdx.x + mine; i < tiles.tiles() * RUNS;
             i += AT_ONCE * gridDim.x) {
            const i32 first = i32(i % RUNS) * RUN;
            body(tiles.at(i / RUNS), i / RUNS, first, min(first + RUN, COUNT));
        }
    }

    // The scales of a lane's rows in a copy. A lane computes one or two, and tells the others.
    // most: of each row's words that it has.
    template <class T, class Copy>
    struct ByRow {
        static constexpr i32 BLOCKS = (K + BLOCK - 1) / BLOCK;  // of a row
        using Rows = RowsOfLanes<T, BLOCK / 8>;
        float own_over[Rows::OWN], own_scale[Rows::OWN];

        // own: the lane's first row; left: rows from there on.
        __device__ __forceinline__ ByRow(const u32 (&most)[8], const Copy& copy, i64 own, i32 left,
                                         i32 across) {
            if constexpr (Copy::MADE) {
                u32 largest[Rows::OWN];
                Rows::largest(largest, most);
                const i32 block = BLOCK == 128 ? across : column(across) / BLOCK;
#pragma unroll
                for (int i = 0; i < Rows::OWN; ++i) {
                    const typename Copy::Scale by(largest[i]);
                    own_over[i] = by.over, own_scale[i] = by.scale;
                    if (copy.scales && Rows::row(i) < left && (BLOCK == 128 || there(across)))
                        copy.scales[(own + Rows::row(i)) * BLOCKS + block] = by.stored;
                }
            }
        }
        __device__ __forceinline__ float over(int s) const { return Rows::of(s, own_over); }
        __device__ __forceinline__ float scale(int s) const { return Rows::of(s, own_scale); }
    };

    // The scales of a lane's columns, the number-th tile of all: each of 128 threads computes one.
    template <class T, class Copy>
    struct ByColumn {
        static constexpr i32 EACH = THREADS < 128 ? 128 / THREADS : 1;  // columns of a thread
        // What a block has of the columns of tiles: the largest magnitudes of its warps, and
        // scales.
        struct Shared {
            u32 most[8][128];
            float over[AT_ONCE][128], scale[AT_ONCE][128];
        };
        Eight<float> over, scale;

        __device__ __forceinline__ ByColumn(Bits<T> most, const Copy& copy, Shared& shared,
                                            bool in_group, i64 number, i32 across, bool good) {
            if constexpr (Copy::MADE) {
                const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
                for (int w = 0; w < Bits<T>::WORDS; ++w)
                    most.at[w] =
                        most.larger(most.at[w], __shfl_xor_sync(WHOLE_WARP, most.at[w], 16));
                if (lane < 16) {
#pragma unroll
                    for (int v = 0; v < 8; v += 4) {
                        Vector<u32, 4> four;
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            four.at[i] = __float_as_uint(most.number(v + i));
                        *reinterpret_cast<Vector<u32, 4>*>(&shared.most[warp][8 * lane + v]) = four;
                    }
                }
                Team::sync();  // whose next one is before anything here is written again
                for_all_columns([&](u32 c) {
                    u32 of_column = 0;
#pragma unroll
                    for (int w = 0; w < WARPS; ++w)
                        of_column = max(of_column, shared.most[WARPS * Team::number() + w][c]);
                    const auto by = store(copy, in_group ? of_column : 0, c, number, across, good);
                    shared.over[Team::number()][c] = by.over,
                    shared.scale[Team::number()][c] = by.scale;
                });
                Team::sync();
                over = load_eight(shared.over[Team::number()] + lane % 16 * 8);
                if constexpr (!Copy::TURNED)
                    scale = load_eight(shared.scale[Team::number()] + lane % 16 * 8);
            }
        }

        // Those of a tile without rows.
        __device__ __forceinline__ static void store_none(const Copy& copy, i64 number, i32 across,
                                                          bool good) {
            for_all_columns([&](u32 c) { store(copy, 0, c, number, across, good); });
        }

      private:
        template <class Body>
        __device__ __forceinline__ static void for_all_columns(Body body) {
#pragma unroll
            for (i32 i = 0; i < EACH; ++i)
                if (EACH > 1 || Team::thread() < 128) body(Team::thread() + THREADS * i);
        }

        __device__ __forceinline__ static typename Copy::Scale store(const Copy& copy, u32 most,
                                                                     u32 c, i64 number, i32 across,
                                                                     bool good) {
            const typename Copy::Scale by(most);
            const i32 j = 128 * across + c;
            if (copy.scales && (K % 128 == 0 || j < K) && good)
                copy.scales[number * K + j] = by.stored;
            return by;
        }
    };
};

// The runs of lanes S, tile by tile.
template <class S, class Tiles, class Body>
__device__ __forceinline__ void for_all_tiles(const Tiles& tiles, Body body) {
    S::for_all_runs(tiles, [&](const RowTile& tile, i64 number, i32 first, i32 end) {
#pragma unroll 1
        for (i32 across = first; across < end; ++across) body(tile, number, across);
    });
}

// Copies of [rows, K] numbers of type T, by blocks of 256 threads; S: their lanes.
// row(m)(j0, x): columns j0 .. j0 + 7 of row m. LOOKED_UP: whether row(m) reads memory, and is
// therefore called once for all tiles of a run. CUT: a column from which on rows are made in
// another way, if there is one: the way is then chosen once, not for each row, whose numbers would
// be waited for one after another. If it is half of them, and tiles are in halves, columns j and
// CUT + j are made at once, since they are made of the same numbers.
template <class S, class T, bool LOOKED_UP = false, i32 CUT = 0, class Tiles, class Row,
          class InRows, class InColumns, class InSquares>
__device__ __forceinline__ void make_copies(const Tiles& tiles, Row row, const InRows& in_rows,
                                            const InColumns& in_columns,
                                            const InSquares& in_squares) {
    constexpr i32 K = S::K;
    using ByRow = typename S::template ByRow<T, InRows>;
    using ByColumn = typename S::template ByColumn<T, InColumns>;
    __shared__ __align__(16) typename ByColumn::Shared shared;
    __shared__ __align__(16) TurnedTile turned;
    // whether the next tile is read before this one is stored; others have too many numbers to read
    constexpr bool AHEAD = InSquares::MADE;
    constexpr i32 PARTS = CUT > 0 && K == 2 * CUT && CUT % 128 == 0 ? 2 : 1;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    S::template for_all_runs<S::ACROSS / PARTS>(tiles, [&](const RowTile& tile, i64 number,
                                                           i32 first, i32 end) {
        const bool has_scales = number < tiles.blocks();
        if (tile.rows == 0) {
            for (i32 across = first; across < end; ++across)
                for (i32 part = 0; part < PARTS; ++part)
                    if constexpr (InColumns::MADE)
                        ByColumn::store_none(in_columns, number, across + part * (CUT / 128),
                                             has_scales);
            return;
        }
        const auto at = [&](int s, i32 last) { return row(tile.first + min(S::row(s), last)); };
        i32 last = tile.rows - 1;
        const decltype(at(0, 0)) found[8] = {at(0, last), at(1, last), at(2, last), at(3, last),
                                             at(4, last), at(5, last), at(6, last), at(7, last)};
        const auto row_of = [&](int s) {
            if constexpr (LOOKED_UP)
                return found[s];
            else
                return at(s, last);
        };
        Bits<T> x[8], ahead[8];
        const auto read = [&](Bits<T>(&to)[8], i32 across) {
            const i32 j0 = S::column(across);
            const auto load = [&] {
#pragma unroll
                for (int s = 0; s < 8; ++s) {
                    float wide[8];
                    row_of(s)(j0, wide);
                    to[s] = Bits<T>(wide);
                }
            };
            if (K % 128 != 0 && j0 >= K) {
#pragma unroll
                for (int s = 0; s < 8; ++s) to[s] = {};
                return;
            }
            __builtin_assume(i64(j0) < K);
            if (CUT > 0 && i64(j0) < CUT)
                load();
            else
                load();
        };
        const auto read_both = [&](i32 across) {
            const i64 j0 = S::column(across), j1 = j0 + CUT;
            __builtin_assume(j0 < CUT);
            __builtin_assume(j1 >= CUT);
            __builtin_assume(j1 < K);
#pragma unroll
            for (int s = 0; s < 8; ++s) {
                float wide[8], other[8];
                row_of(s)(j0, wide);
                row_of(s)(j1, other);
                x[s] = Bits<T>(wide), ahead[s] = Bits<T>(other);
            }
        };
        if constexpr (AHEAD) read(ahead, first);
#pragma unroll 1
        for (i32 step = first * PARTS; step < end * PARTS; ++step) {
            const i32 across = step / PARTS + step % PARTS * (CUT / 128);
            const i32 j0 = S::column(across);
            const bool there = S::there(across);
            i32 before = S::row(0);
            asm volatile(""
                         : "+r"(last),
                           "+r"(before));  // or registers would keep what is made of these
            const i64 own = tile.first + before;
            const i32 left = tile.rows - before;  // rows from the lane's first one on
            if constexpr (AHEAD || PARTS > 1) {
                if (PARTS > 1 && step % PARTS == 0) {
                    read_both(across);
                } else {
#pragma unroll
                    for (int s = 0; s < 8; ++s) x[s] = ahead[s];
                }
                if (AHEAD && across + 1 < end) read(ahead, across + 1);
            } else {
                read(x, across);
            }
            const i64 place = own * K + j0;
            if constexpr (InSquares::MADE) {
                const u32 most = __reduce_max_sync(WHOLE_WARP, largest_of<T, 8>(x));
                if (lane == 0) shared.most[warp][0] = most;
                __syncthreads();
                u32 of_tile = 0;
#pragma unroll
                for (int w = 0; w < 8; ++w) of_tile = max(of_tile, shared.most[w][0]);
                const typename InSquares::Scale by(of_tile);
                if (in_squares.scales && threadIdx.x < tile.rows)
                    in_squares.scales[(tile.first + threadIdx.x) * S::ACROSS + across] = by.stored;
                u32 made[8][2];
#pragma unroll
                for (int s = 0; s < 8; ++s) {
                    make_codes(made[s], x[s], [&](int) { return by.over; });
                    in_squares.store(
                        place + s * K, made[s], [&](int) { return by.scale; }, s < left && there);
                }
                if constexpr (InSquares::TURNED) {
                    store_turned_square<InSquares::ROWS, K>(in_squares.turned,
                                                            in_squares.turned_scales, number,
                                                            across, by.stored, made, turned);
                }
                __syncthreads();  // the next tile writes what this one read
            }
            if constexpr (InRows::MADE || InColumns::MADE) {
                u32 of_row[8] = {};
                Bits<T> of_columns{};
#pragma unroll
                for (int s = 0; s < 8; ++s) {
#pragma unroll
                    for (int w = 0; w < Bits<T>::WORDS; ++w) {
                        const u32 size = x[s].magnitude(x[s].at[w]);
                        of_row[s] = x[s].larger(of_row[s], size);
                        of_columns.at[w] = x[s].larger(of_columns.at[w], size);
                    }
                }
                const ByRow by_row(of_row, in_rows, own, left, across);
                const ByColumn by_column(of_columns, in_columns, shared, tile.in_group, number,
                                         across, has_scales);
                const auto clear = [&](i32 from) {
#pragma unroll
                    for (int s = 0; s < 8; ++s)
                        if (s >= from) x[s] = {};
                };
                if (InColumns::TURNED && tile.rows < 128) {
                    asm volatile("");  // a branch, since few tiles are short
                    clear(left);
                }
                // Numbers are taken out of their words once for both copies, and once more for rows
                // of no group, which are zeros by columns.
                i32 stored = left;
#pragma unroll 1
                for (bool again = InColumns::MADE && !tile.in_group;; again = false) {
                    u32 by_columns[8][2];
#pragma unroll
                    for (int s = 0; s < 8; ++s) {
                        u32 made[2];
                        if constexpr (InRows::MADE) {
                            const float by = by_row.over(s), of = by_row.scale(s);
                            make_codes(made, x[s], [&](int) { return by; });
                            in_rows.store(
                                place + s * K, made, [&](int) { return of; }, s < stored && there);
                        }
                        if constexpr (InColumns::MADE && !InColumns::TURNED) {
                            make_codes(made, x[s], [&](int v) { return by_column.over.at[v]; });
                            in_columns.store(
                                place + s * K, made, [&](int v) { return by_column.scale.at[v]; },
                                s < left && there);
                        }
                        if constexpr (InColumns::TURNED) {
                            if (s % 4 < 3) continue;
#pragma unroll
                            for (int v = 0; v < 8; ++v) {
                                const auto number = [&](int r) {
                                    return x[s - 3 + r].number(v) * by_column.over.at[v];
                                };
                                by_columns[v][s / 4] = e4m3_pair(number(0), number(1)) |
                                                       u32(e4m3_pair(number(2), number(3))) << 16;
                            }
                        }
                    }
                    if constexpr (InColumns::TURNED) {
#pragma unroll
                        for (int v = 0; v < 8; ++v)
                            turned.put(v, by_columns[v][0], by_columns[v][1]);
                    }
                    if (!again) break;
                    clear(0), stored = 0;
                }
                if constexpr (InColumns::TURNED) {
                    __syncthreads();  // whose next one is before the tile is written again
                    if (has_scales) store_turned_rows<K>(in_columns.codes, number, across, turned);
                }
            }
        }
    });
}

// The bf16 numbers of a copy [rows, K] in blocks along rows of groups, whose scales are powers of
// two; zeros in rows of none.
template <class S, class Tiles, class Scale>
__device__ __forceinline__ void read_copy(const Tiles& tiles, const u8* codes, const Scale* scales,
                                          bf16* numbers) {
    for_all_tiles<S>(tiles, [&](const RowTile& tile, i64 number, i32 across) {
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

// A lane's codes of a tile of rows [K]; zeros past the last row.
template <i32 K>
__device__ __forceinline__ void load_codes(u32 (&x)[8][2], const u8* codes, const RowTile& tile,
                                           i32 across) {
    using S = Lanes<K>;
#pragma unroll
    for (int s = 0; s < 8; ++s) {
        Vector<u32, 2> eight = {};
        if (S::row(s) < tile.rows && S::there(across))
            eight = load_vector<2>(reinterpret_cast<const u32*>(
                codes + (tile.first + S::row(s)) * K + S::column(across)));
        x[s][0] = eight.at[0], x[s][1] = eight.at[1];
    }
}

// Codes [G, N, K], both multiples of 16, and scales [G, N, K / 128] of blocks of 128 x 128 -> those
// of the transposed matrices.
template <i32 N, i32 K, class Stored>
__device__ __forceinline__ void transpose_blocks(i64 groups, const u8* codes, const Stored* scales,
                                                 u8* turned, Stored* turned_scales) {
    using S = Lanes<K>;
    __shared__ __align__(16) TurnedTile shared;
    for_all_tiles<S>(MatrixTiles<N>{groups}, [&](const RowTile& tile, i64 number, i32 across) {
        u32 x[8][2];
        load_codes<K>(x, codes, tile, across);
        store_turned_square<N, K>(turned, turned_scales, number, across,
                                  scales[tile.first * S::ACROSS + across], x, shared);
        __syncthreads();  // the next tile writes what this one read
    });
}

// Codes [rows, K] in blocks along rows of groups, K a multiple of 32 -> [blocks, K, 128].
template <i32 K, i32 GROUPS>
__device__ __forceinline__ void transpose_row_blocks(const GroupedRows<GROUPS, 128>& tiles,
                                                     const u8* codes, u8* turned) {
    __shared__ __align__(16) TurnedTile shared;
    for_all_tiles<Lanes<K>>(tiles, [&](const RowTile& tile, i64 number, i32 across) {
        if (tile.rows == 0 || number >= tiles.blocks()) return;
        u32 x[8][2];
        load_codes<K>(x, codes, tile, across);
        put_turned(shared, x);
        __syncthreads();
        store_turned_rows<K>(turned, number, across, shared);
        __syncthreads();  // the next tile writes what this one read
    });
}

}  // namespace
