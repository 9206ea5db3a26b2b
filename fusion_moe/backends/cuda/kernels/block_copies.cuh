// Copies of numbers in e4m3 codes with a scale for 128 of them in a row, 128 in a column, or 128 x
// 128; all from one read.
//
// A block of threads has a tile of 128 x 128. A warp has 16 of its rows, a lane eight columns of
// eight rows that follow each other, so that a column's codes are in order too. Rows of groups are
// in tiles that no group shares; a block has some that lie side by side, since finding rows takes
// as long as reading them.
//
// Instructions bound these kernels next to memory. So stores are predicated, not branched around;
// 16 lanes share a row's scale, which one of them computes; and addresses differ by constants.
#pragma once

#include "mxfp8.cuh"

namespace {

// The largest power of two that takes the magnitude to 448 at most, and is at most 2^127; 1 for
// zeros, NaN for what is not finite. By whole numbers: there are as many scales as numbers / 8.
struct PowerOfTwoScale {
    using Stored = float;
    float stored, scale, over;

    __device__ __forceinline__ explicit PowerOfTwoScale(u32 most) {
        const u32 exponent = most == 0 ? 127 : max((most + 0x1FFFFF) >> 23, 8u) - 8,  // 1.75 * 2^8
            nan = 0x7FC00000, finite = most < 0x7F800000;
        over = __uint_as_float(finite ? (254 - exponent) << 23 : nan);
        stored = scale = __uint_as_float(finite ? max(exponent << 23, 0x400000u) : nan);
    }
};

// 448 over the magnitude; 1 for zeros, NaN for what is not finite.
struct Float32Scale {
    using Stored = float;
    float stored, scale, over;

    __device__ __forceinline__ explicit Float32Scale(u32 most) {
        const float whole = fminf(__fdiv_rn(448.f, __uint_as_float(most)), 0x1.FEp127f);
        over = most == 0 ? 1.f : most >= 0x7F800000 ? __uint_as_float(0x7FC00000) : whole;
        stored = scale = __fdiv_rn(1.f, over);
    }
};

// Where column c of each 32 lies in a copy by columns, and which column lies at place c: in the
// order in which the threads of a tensor core have sums, so that each has eight that follow each
// other.
__device__ __forceinline__ constexpr i32 place_in_tile(i32 c) {
    return (c & ~30) | c >> 2 & 6 | (c & 6) << 2;
}

// A copy in blocks along rows of groups whose codes are stored by columns: [blocks, K, 128], with
// columns where place_in_tile says.
template <class Scale_>
struct TurnedCopy {
    using Scale = Scale_;
    static constexpr bool MADE = true;
    u8* codes;
    typename Scale::Stored* scales;
};

// A copy of matrices of N rows in blocks of 128 x 128, and of the transposed matrices, whose codes
// and scales are the same ones.
template <class Scale_, i32 N>
struct BothWays : BlockCopy<Scale_> {
    u8* turned;
    typename Scale_::Stored* turned_scales;
};

template <class Copy>
constexpr bool TURNED = false;
template <class Scale>
constexpr bool TURNED<TurnedCopy<Scale>> = true;
template <class Scale, i32 N>
constexpr bool TURNED<BothWays<Scale, N>> = true;

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

// A lane's place in a tile.
template <i32 K_>
struct Square {
    static constexpr i32 K = K_, ACROSS = (K + 127) / 128;  // tiles
    static constexpr i32 STEPS = 8;                         // rows of a lane

    __device__ __forceinline__ static i32 column(i32 across) {
        return 128 * across + threadIdx.x % 16 * 8;
    }
    __device__ __forceinline__ static bool there(i32 across) {
        return K % 128 == 0 || column(across) < K;
    }
    __device__ __forceinline__ static i32 row(int s) { return threadIdx.x / 16 * 8 + s; }

    // Calls body(tile, its number, tiles before it in its rows, tiles before the end of its run) on
    // all threads of a block, for the first COUNT tiles of rows.
    template <i32 COUNT = ACROSS, class Tiles, class Body>
    __device__ __forceinline__ static void for_all_runs(const Tiles& tiles, Body body) {
        constexpr i32 RUNS = (COUNT + 3) / 4, RUN = (COUNT + RUNS - 1) / RUNS;
        for (i64 i = blockIdx.x; i < tiles.tiles() * RUNS; i += gridDim.x) {
            const i32 first = i32(i % RUNS) * RUN;
            body(tiles.at(i / RUNS), i / RUNS, first, min(first + RUN, COUNT));
        }
    }

    // The same for each tile of a run.
    template <class Tiles, class Body>
    __device__ __forceinline__ static void for_all(const Tiles& tiles, Body body) {
        for_all_runs(tiles, [&](const RowTile& tile, i64 number, i32 first, i32 end) {
#pragma unroll 1
            for (i32 across = first; across < end; ++across) body(tile, number, across);
        });
    }
};

// The largest magnitude of a lane's numbers, as bits.
template <class T, int COUNT>
__device__ __forceinline__ u32 largest_of(const Bits<T>* x) {
    u32 most = 0;
#pragma unroll
    for (int s = 0; s < COUNT; ++s) {
#pragma unroll
        for (int w = 0; w < Bits<T>::WORDS; ++w)
            most = x[s].larger(most, x[s].magnitude(x[s].at[w]));
    }
    return Bits<T>::largest(most);
}

// The largest magnitudes in each of eight rows that 16 lanes share, bf16 numbers of two rows in a
// word. Each lane gets that of one row, as bits.
template <class T>
struct RowsOfLanes {
    static constexpr bool PAIRS = Bits<T>::WORDS == 4;
    static constexpr int COUNT = PAIRS ? 4 : 8;

    // The row of this lane, and the lane of a row among 16.
    __device__ __forceinline__ static i32 row() {
        const i32 lane = threadIdx.x % 16;
        return PAIRS ? lane / 4 * 2 + lane % 2 : lane / 2;
    }
    __device__ __forceinline__ static i32 lane_of(int s) {
        return PAIRS ? s / 2 * 4 + s % 2 : 2 * s;
    }
    // What the lane of a row has.
    __device__ __forceinline__ static float of(int s, float x) {
        return __uint_as_float(__shfl_sync(WHOLE_WARP, __float_as_uint(x), lane_of(s), 16));
    }

    // each: of the words of each row.
    __device__ __forceinline__ static u32 largest(const u32 (&each)[8]) {
        const auto larger = Bits<T>::larger;
        u32 most[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            most[i] = each[i];
            if constexpr (PAIRS)
                most[i] = larger(__byte_perm(each[2 * i], each[2 * i + 1], 0x5410),
                                 __byte_perm(each[2 * i], each[2 * i + 1], 0x7632));
        }
        int lanes = 8;  // halves of 16 lanes change halves of the rows; then all have the same ones
#pragma unroll
        for (int n = COUNT / 2; n > 0; n /= 2, lanes /= 2) {
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
        if constexpr (PAIRS) return threadIdx.x % 2 ? most[0] & 0xFFFF0000 : most[0] << 16;
        return most[0];
    }
};

// What a block has of the columns of a tile: the largest magnitudes of its warps, and scales.
struct ColumnsOfTile {
    u32 most[8][128];
    float over[128], scale[128];
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

// The same of the codes of a tile of matrices [N, K], both multiples of 16, which are those of the
// rows.
template <i32 K, class Scale, i32 N>
__device__ __forceinline__ void store_turned_square(const BothWays<Scale, N>& copy, i64 tile,
                                                    i32 across, const Scale& by,
                                                    const u32 (&codes)[8][2], TurnedTile& shared) {
    constexpr i32 DOWN = (N + 127) / 128;
    const i64 row = tile / DOWN * K + 128 * across;
    const i32 columns = left_in_tile<K>(128 * across),
              rows = left_in_tile<N>(i32(tile % DOWN) * 128);
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
        for (int v = 0; v < 4; ++v) shared.put(4 * w + v, made[0][v], made[1][v]);
    }
    __syncthreads();
    shared.store(copy.turned + (row + threadIdx.x / 8) * N + tile % DOWN * 128, 32 * N, columns,
                 rows);
    if (threadIdx.x < columns)
        copy.turned_scales[(row + threadIdx.x) * DOWN + tile % DOWN] = by.stored;
}

// Copies of [rows, K] numbers of type T, by blocks of 256 threads. row(m)(j0, x): columns j0 .. j0
// + 7 of row m. LOOKED_UP: whether row(m) reads memory, and is therefore called once for all tiles
// of a run. CUT: a column from which on rows are made in another way, if there is one: the way is
// then chosen once, not for each row, whose numbers would be waited for one after another. If it is
// half of them, and tiles are in halves, columns j and CUT + j are made at once, since they are
// made of the same numbers.
template <class T, i32 K, bool LOOKED_UP = false, i32 CUT = 0, class Tiles, class Row, class InRows,
          class InColumns, class InSquares>
__device__ __forceinline__ void make_block_copies(const Tiles& tiles, Row row,
                                                  const InRows& in_rows,
                                                  const InColumns& in_columns,
                                                  const InSquares& in_squares) {
    using S = Square<K>;
    __shared__ __align__(16) ColumnsOfTile shared;
    __shared__ __align__(16) TurnedTile turned;
    // whether the next tile is read before this one is stored; others have too many numbers to read
    constexpr bool AHEAD = InSquares::MADE;
    constexpr i32 PARTS = CUT > 0 && K == 2 * CUT && CUT % 128 == 0 ? 2 : 1;
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    S::template for_all_runs<S::ACROSS / PARTS>(tiles, [&](const RowTile& tile, i64 number,
                                                           i32 first, i32 end) {
        // By the first 128 threads, each for its column.
        const auto make_column_scale = [&](i32 across, u32 most) {
            if constexpr (InColumns::MADE) {
                const typename InColumns::Scale by(most);
                const i32 j = 128 * across + threadIdx.x;
                // of no rows nobody reads them, and the last tile's may still be read
                if (tile.rows != 0)
                    shared.over[threadIdx.x] = by.over, shared.scale[threadIdx.x] = by.scale;
                if (in_columns.scales && (K % 128 == 0 || j < K) && number < tiles.blocks())
                    in_columns.scales[number * K + j] = by.stored;
            }
        };
        if (tile.rows == 0) {
            for (i32 across = first; across < end; ++across)
                for (i32 part = 0; part < PARTS && threadIdx.x < 128; ++part)
                    make_column_scale(across + part * (CUT / 128), 0);
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
        Bits<T> x[S::STEPS], ahead[S::STEPS];
        const auto read = [&](Bits<T>(&to)[8], i32 across) {
            const i32 j0 = S::column(across);
            const auto load = [&] {
#pragma unroll
                for (int s = 0; s < S::STEPS; ++s) {
                    float wide[8];
                    row_of(s)(j0, wide);
                    to[s] = Bits<T>(wide);
                }
            };
            if (K % 128 != 0 && j0 >= K) {
#pragma unroll
                for (int s = 0; s < S::STEPS; ++s) to[s] = {};
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
            for (int s = 0; s < S::STEPS; ++s) {
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
                    for (int s = 0; s < S::STEPS; ++s) x[s] = ahead[s];
                }
                if (AHEAD && across + 1 < end) read(ahead, across + 1);
            } else {
                read(x, across);
            }
            const i64 place = own * K + j0;
            if constexpr (InSquares::MADE) {
                const u32 most = __reduce_max_sync(WHOLE_WARP, largest_of<T, S::STEPS>(x));
                if (lane == 0) shared.most[warp][0] = most;
                __syncthreads();
                u32 of_tile = 0;
#pragma unroll
                for (int w = 0; w < 8; ++w) of_tile = max(of_tile, shared.most[w][0]);
                const typename InSquares::Scale by(of_tile);
                if (in_squares.scales && threadIdx.x < tile.rows)
                    in_squares.scales[(tile.first + threadIdx.x) * S::ACROSS + across] = by.stored;
                u32 made[S::STEPS][2];
#pragma unroll
                for (int s = 0; s < S::STEPS; ++s) {
                    make_codes(made[s], x[s], [&](int) { return by.over; });
                    in_squares.store(
                        place + s * K, made[s], [&](int) { return by.scale; }, s < left && there);
                }
                if constexpr (TURNED<InSquares>) {
                    store_turned_square<K>(in_squares, number, across, by, made, turned);
                }
                __syncthreads();  // the next tile writes what this one read
            }
            if constexpr (InRows::MADE || InColumns::MADE) {
                using Lanes = RowsOfLanes<T>;
                u32 of_row[S::STEPS] = {};
                Bits<T> of_columns{};
#pragma unroll
                for (int s = 0; s < S::STEPS; ++s) {
#pragma unroll
                    for (int w = 0; w < Bits<T>::WORDS; ++w) {
                        const u32 size = x[s].magnitude(x[s].at[w]);
                        of_row[s] = x[s].larger(of_row[s], size);
                        of_columns.at[w] = x[s].larger(of_columns.at[w], size);
                    }
                }
                float over = 0, scale = 0;  // of the lane's row
                if constexpr (InRows::MADE) {
                    const typename InRows::Scale by(Lanes::largest(of_row));
                    over = by.over, scale = by.scale;
                    if (in_rows.scales && Lanes::row() < left)
                        in_rows.scales[(own + Lanes::row()) * S::ACROSS + across] = by.stored;
                }
                Eight<float> over_columns, scale_columns;
                if constexpr (InColumns::MADE) {
#pragma unroll
                    for (int w = 0; w < Bits<T>::WORDS; ++w)
                        of_columns.at[w] = x[0].larger(
                            of_columns.at[w], __shfl_xor_sync(WHOLE_WARP, of_columns.at[w], 16));
                    if (lane < 16) {
#pragma unroll
                        for (int v = 0; v < 8; v += 4) {
                            Vector<u32, 4> four;
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                four.at[i] = __float_as_uint(of_columns.number(v + i));
                            *reinterpret_cast<Vector<u32, 4>*>(&shared.most[warp][8 * lane + v]) =
                                four;
                        }
                    }
                    __syncthreads();  // whose next one is before anything here is written again
                    if (threadIdx.x < 128) {
                        u32 of_column = 0;
#pragma unroll
                        for (int w = 0; w < 8; ++w)
                            of_column = max(of_column, shared.most[w][threadIdx.x]);
                        make_column_scale(across, tile.in_group ? of_column : 0);
                    }
                    __syncthreads();
                    over_columns = load_eight(shared.over + lane % 16 * 8);
                    if constexpr (!TURNED<InColumns>)
                        scale_columns = load_eight(shared.scale + lane % 16 * 8);
                }
                const auto clear = [&](i32 from) {
#pragma unroll
                    for (int s = 0; s < S::STEPS; ++s)
                        if (s >= from) x[s] = {};
                };
                if (TURNED<InColumns> && tile.rows < 128) {
                    asm volatile("");  // a branch, since few tiles are short
                    clear(left);
                }
                // Numbers are taken out of their words once for both copies, and once more for rows
                // of no group, which are zeros by columns.
                i32 stored = left;
#pragma unroll 1
                for (bool again = InColumns::MADE && !tile.in_group;; again = false) {
                    u32 by_column[8][2];
#pragma unroll
                    for (int s = 0; s < S::STEPS; ++s) {
                        u32 made[2];
                        if constexpr (InRows::MADE) {
                            const float by = Lanes::of(s, over), of = Lanes::of(s, scale);
                            make_codes(made, x[s], [&](int) { return by; });
                            in_rows.store(
                                place + s * K, made, [&](int) { return of; }, s < stored && there);
                        }
                        if constexpr (InColumns::MADE && !TURNED<InColumns>) {
                            make_codes(made, x[s], [&](int v) { return over_columns.at[v]; });
                            in_columns.store(
                                place + s * K, made, [&](int v) { return scale_columns.at[v]; },
                                s < left && there);
                        }
                        if constexpr (TURNED<InColumns>) {
                            if (s % 4 < 3) continue;
#pragma unroll
                            for (int v = 0; v < 8; ++v) {
                                const auto number = [&](int r) {
                                    return x[s - 3 + r].number(v) * over_columns.at[v];
                                };
                                by_column[v][s / 4] = e4m3_pair(number(0), number(1)) |
                                                      u32(e4m3_pair(number(2), number(3))) << 16;
                            }
                        }
                    }
                    if constexpr (TURNED<InColumns>) {
#pragma unroll
                        for (int v = 0; v < 8; ++v) turned.put(v, by_column[v][0], by_column[v][1]);
                    }
                    if (!again) break;
                    clear(0), stored = 0;
                }
                if constexpr (TURNED<InColumns>) {
                    __syncthreads();  // whose next one is before the tile is written again
                    const i64 column = number * K + 128 * across + place_in_tile(threadIdx.x / 8);
                    if (number < tiles.blocks())
                        turned.store(in_columns.codes + column * 128, 32 * 128,
                                     left_in_tile<K>(128 * across));
                }
            }
        }
    });
}

// Bytes of 128 rows, by columns. words: of the rows, four more after each 16, so that 8 of these
// are in banks of their own.
struct TileToTranspose {
    u32 words[128 * 32 + 8 * 4];

    __device__ __forceinline__ u32* word(i32 n, i32 w) { return words + n * 32 + n / 16 * 4 + w; }

    // from(row): the tile's part of a row, null for zeros; to(column): where its bytes go;
    // columns, rows: how many of both there are, multiples of 16.
    template <class From, class To>
    __device__ __forceinline__ void transpose(From from, To to, i32 columns, i32 rows = 128) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const i32 n = threadIdx.x / 8 + 32 * v, w = threadIdx.x % 8 * 4;
            const u8* row = from(n);
            Vector<u32, 4> x = {};
            if (row && 4 * w < columns && n < rows)
                x = load_vector<4>(reinterpret_cast<const u32*>(row + 4 * w));
            *reinterpret_cast<Vector<u32, 4>*>(word(n, w)) = x;
        }
        __syncthreads();
        const i32 n = threadIdx.x % 8 * 16, k = threadIdx.x / 8;  // 16 rows, a word of columns
        Vector<u32, 4> made[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            u32 x[4], of_column[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) x[r] = *word(n + 4 * q + r, k);
            turn_bytes(x, of_column);
#pragma unroll
            for (int c = 0; c < 4; ++c) made[c].at[q] = of_column[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (4 * k < columns && n < rows)
                store_vector<4>(reinterpret_cast<u32*>(to(4 * k + c) + n), made[c]);
        __syncthreads();  // the next tile writes what this one read
    }
};

// Codes [G, N, K], both multiples of 16, and scales [G, N, K / 128] of blocks of 128 x 128 -> those
// of the transposed matrices.
template <i32 N, i32 K, class Scale>
__device__ __forceinline__ void transpose_blocks(i64 groups, const u8* codes, const Scale* scales,
                                                 u8* turned, Scale* turned_scales) {
    constexpr i32 DOWN = (N + 127) / 128, ACROSS = (K + 127) / 128;
    __shared__ __align__(16) TileToTranspose tile;
    for (i64 i = blockIdx.x; i < groups * DOWN * ACROSS; i += gridDim.x) {
        const i64 g = i / (DOWN * ACROSS);
        const i32 n0 = i32(i / ACROSS % DOWN) * 128, k0 = i32(i % ACROSS) * 128;
        const i32 columns = left_in_tile<K>(k0);
        if (threadIdx.x < columns)
            turned_scales[(g * K + k0 + threadIdx.x) * DOWN + n0 / 128] =
                scales[(g * N + n0) * ACROSS + k0 / 128];
        const u8* from = codes + (g * N + n0) * K + k0;
        u8* to = turned + (g * K + k0) * N + n0;
        tile.transpose([=](i32 n) { return from + i64(n) * K; },
                       [=](i32 k) { return to + i64(k) * N; }, columns, left_in_tile<N>(n0));
    }
}

// Codes [rows, K] in blocks along rows of groups, K a multiple of 32 -> [blocks, K, 128].
template <i32 K, i32 GROUPS>
__device__ __forceinline__ void transpose_row_blocks(const GroupedRows<GROUPS, 128>& tiles,
                                                     const u8* codes, u8* turned) {
    __shared__ __align__(16) TileToTranspose shared;
    Square<K>::for_all(tiles, [&](const RowTile& tile, i64 number, i32 across) {
        if (tile.rows == 0 || number >= tiles.blocks()) return;
        const u8* from = codes + tile.first * K + 128 * across;
        u8* to = turned + (number * K + 128 * across) * 128;
        const i32 rows = tile.rows;
        shared.transpose([=](i32 n) { return n < rows ? from + i64(n) * K : nullptr; },
                         [=](i32 k) { return to + place_in_tile(k) * 128; },
                         left_in_tile<K>(128 * across));
    });
}

}  // namespace
