// The epilogue transpose: how a consumer warpgroup stores its accumulators of a work tile
// (large_m.cuh). A thread has those of two columns of the product for many rows, and stores several
// columns of one: they are transposed in shared memory, EPILOGUE_ROWS rows at a time.
//
// TransposeResults computes the elements of a result from the accumulators of a thread, then
// transposes the elements. TransposeExchanged does the same for elements that need two columns,
// after warps have exchanged accumulators. TransposeAccumulators transposes the accumulators
// themselves, then computes any number of results from any of their columns; a Segment without
// results (RESULTS is 0) has a function that stores a whole row and sums over it.
//
// Each thread has one object: `write` puts its part of the rows in a buffer; once the whole
// warpgroup has written, `load` reads the elements that this thread stores, and `store` stores
// them. `sum`: the accumulators of all rows of the work tile, for each repeat.
#pragma once

#include "choose.cuh"
#include "epilogue_rows.cuh"
#include "fragment_order.cuh"
#include "mma.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"

namespace {

// The part of a work tile that a consumer warpgroup has in some of its repeats, and the position of
// a thread in it. In each repeat, each of the four warps has 16 columns of the product.
template <class Segment, int REPEATS>
struct ConsumerTile {
    static constexpr int THREADS = 128, WARPS = 4, MAX_CONSUMERS = 5;  // of a warpgroup; of a block
    const Segment& s;
    const WorkTile work_tile;
    const i32 column;  // of the result: the warpgroup's first
    float factor[REPEATS]
                [2];  // of the accumulators of a thread's two columns of the product, eight apart

    static __device__ __forceinline__ i32 thread() { return threadIdx.x % THREADS; }
    static __device__ __forceinline__ i32 warp() { return threadIdx.x / 32 % WARPS; }
    static __device__ __forceinline__ i32 lane() { return threadIdx.x % 32; }

    // Barriers of the warpgroup, and of two of its warps.
    static __device__ __forceinline__ void sync() {
        named_barrier_sync(1 + threadIdx.x / THREADS, THREADS);
    }
    static __device__ __forceinline__ void sync_warp_pair() {
        named_barrier_sync_unaligned(1 + MAX_CONSUMERS + threadIdx.x / 64, 64);
    }

    // Element j of row m, from the row's columns of the product. Out-of-range indices are clamped;
    // their results are discarded.
    __device__ __forceinline__ u16 element(i32 m, i32 j,
                                           const float (&p)[Segment::COLUMNS_PER_RESULT]) const {
        return s
            .template result<0>(min(m, work_tile.m_tile.end - 1), work_tile.m_tile.group,
                                min(j, Segment::WIDTH - 1), p)
            .bits;
    }
};

// Where a thread stores elements of 16 bits: V of its warpgroup's COLUMNS columns, in each
// ROWS_PER_STEP-th row of EPILOGUE_ROWS.
template <class Segment, class ConsumerTile, int COLUMNS, int V_>
class RowStores {
    using Columns = typename Segment::Columns;
    using Element = typename Segment::Element;
    static constexpr int PIECES = COLUMNS / V_;  // of a row

  public:
    static constexpr int V = V_, ROWS_PER_STEP = ConsumerTile::THREADS / PIECES, EPILOGUE_ROWS = 32;
    struct Rows {
        Vector<Element, V> of[EPILOGUE_ROWS / ROWS_PER_STEP];
    };

    __device__ __forceinline__ explicit RowStores(const ConsumerTile& tile) {
        const Columns at{tile.column + piece() * (Columns::FRAGMENT_ORDER ? 2 : V)};
        to_ = tile.s.template array<0>() +
              i64(tile.work_tile.m_tile.first + row()) * Segment::WIDTH + at.place();
        left_ = at.j < Segment::WIDTH
                    ? tile.work_tile.m_tile.end - tile.work_tile.m_tile.first - row()
                    : 0;
        asm volatile("" : "+l"(to_), "+r"(left_));  // kept, not computed again
    }

    static __device__ __forceinline__ i32 piece() { return ConsumerTile::thread() % PIECES; }
    static __device__ __forceinline__ i32 row() { return ConsumerTile::thread() / PIECES; }

    __device__ __forceinline__ void store(const Rows& rows, i32 first_row) const {
#pragma unroll
        for (int i = 0; i < EPILOGUE_ROWS / ROWS_PER_STEP; ++i) {
            const i32 t = first_row + i * ROWS_PER_STEP;
            if (t < left_) store_vector<V>(to_ + i64(t) * Segment::WIDTH, rows.of[i]);
        }
    }

  private:
    Element* to_;  // where the thread's columns of its first row lie
    i32 left_;     // of its rows, counted by all
};

template <class Segment>
using RowsOfResults = RowStores<Segment, ConsumerTile<Segment, Segment::COLUMNS_PER_RESULT>,
                                128 / sizeof(typename Segment::Element), 8>;
template <class Segment>
using RowsOfExchanged =
    RowStores<Segment, ConsumerTile<Segment, 1>, 8 * 4, Segment::Columns::FRAGMENT_ORDER ? 4 : 8>;

// Elements of 16 bits, each made of columns of the product that one thread has: of one, or of one
// in each repeat, as gate and up are. Row t of a buffer has 128 bytes; piece i of 16 lies where i ^
// (t % 8) would.
template <class Segment>
class TransposeResults : public RowsOfResults<Segment> {
    using Base = RowsOfResults<Segment>;
    using Columns = typename Segment::Columns;
    using Element = typename Segment::Element;
    using Base::ROWS_PER_STEP, Base::V, Base::piece, Base::row;
    static constexpr int ROW = 128;  // bytes

  public:
    using typename Base::Rows, Base::EPILOGUE_ROWS;
    static constexpr int REPEATS = Segment::COLUMNS_PER_RESULT, COLUMNS = ROW / sizeof(Element),
                         BUFFER_BYTES = EPILOGUE_ROWS * ROW;
    static constexpr bool APPLIES = Segment::RESULTS == 1 && Segment::BLOCK_TILES == REPEATS &&
                                    Segment::WIDTH % 8 == 0 && sizeof(Element) == 2;

    __device__ __forceinline__ explicit TransposeResults(const ConsumerTile<Segment, REPEATS>& tile)
        : Base(tile), tile_(tile) {}

    template <int Sums>
    __device__ __forceinline__ void write(u8* buffer, const float (*sum)[Sums],
                                          int first_row) const {
        const i32 lane = tile_.lane(), piece = 2 * tile_.warp() + lane / 8 % 2;
        const u32 to =
            shared_address(buffer) + (lane / 16 * 8 + lane % 8) * ROW + (piece ^ lane % 8) * 16;
#pragma unroll
        for (int t = 0; t < EPILOGUE_ROWS; t += ROWS_PER_STEP) {
            if (first_row + t >= 2 * Sums) break;
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = (first_row + t) / 2 + 2 * i;
                const i32 m =
                    tile_.work_tile.m_tile.first + first_row + t + i / 2 * 8 + lane % 4 * 2;
                pair[i] = u32(element(m, i % 2, sum, at)) | u32(element(m + 1, i % 2, sum, at + 1))
                                                                << 16;
            }
            store_matrices_transposed(to + t * ROW, pair);
        }
    }

    __device__ __forceinline__ Rows load(const u8* buffer) const {
        const i32 q = piece(), first = row();
        const u8* from = buffer + first * ROW;
        Rows rows;
#pragma unroll
        for (int i = 0; i < EPILOGUE_ROWS / ROWS_PER_STEP; ++i, from += ROWS_PER_STEP * ROW) {
            if constexpr (Columns::FRAGMENT_ORDER) {
                Vector<u32, 4> pairs;  // the q-th of each 16 columns
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    pairs.at[b] = *reinterpret_cast<const u32*>(
                        from + ((2 * b + q / 4) ^ first % 8) * 16 + q % 4 * 4);
                rows.of[i] = reinterpret_cast<const Vector<Element, V>&>(pairs);
            } else {
                rows.of[i] =
                    load_vector<V>(reinterpret_cast<const Element*>(from + (q ^ first % 8) * 16));
            }
        }
        return rows;
    }

  private:
    const ConsumerTile<Segment, REPEATS>& tile_;

    // Of row m and the thread's lower or upper column, from its at-th accumulators.
    template <int Sums>
    __device__ __forceinline__ u16 element(i32 m, int upper, const float (*sum)[Sums],
                                           int at) const {
        float p[REPEATS];
#pragma unroll
        for (int h = 0; h < REPEATS; ++h) p[h] = sum[h][at] * tile_.factor[h][upper];
        return tile_.element(m, tile_.column + 16 * tile_.warp() + tile_.lane() / 4 + 8 * upper, p);
    }
};

// Transposes accumulators in float32; results are computed from whole rows afterwards.
template <class Segment>
class TransposeAccumulators {
    using Columns = typename Segment::Columns;
    using ConsumerTile = ::ConsumerTile<Segment, 1>;
    static constexpr int V = Segment::COLUMNS_PER_RESULT == 1 || Segment::BLOCK == 8
                                 ? 8
                                 : 4;      // columns that a thread stores at a time
    static constexpr int STRIDE = 64 + 4;  // of rows: no two of a warp's stores meet in a bank

  public:
    static constexpr int REPEATS = 1,
                         COLUMNS = Segment::BLOCK * ConsumerTile::WARPS / Segment::BLOCK_TILES;
    static constexpr int EPILOGUE_ROWS = 16, BUFFER_BYTES = EPILOGUE_ROWS * STRIDE * sizeof(float);

  private:
    static constexpr int EACH = Columns::FRAGMENT_ORDER ? COLUMNS / 8 : V,
                         PIECES = COLUMNS / EACH;  // of a row

  public:
    struct Rows {
        float p[Segment::COLUMNS_PER_RESULT][EACH];
    };

    __device__ __forceinline__ explicit TransposeAccumulators(const ConsumerTile& tile)
        : tile_(tile) {}

    template <int Sums>
    __device__ __forceinline__ void write(u8* buffer, const float (*sum)[Sums],
                                          int first_row) const {
        float* to = reinterpret_cast<float*>(buffer) + tile_.lane() % 4 * 2 * STRIDE +
                    16 * tile_.warp() + tile_.lane() / 4;
#pragma unroll
        for (int i = 0; i < EPILOGUE_ROWS / 2; ++i)
            to[(i / 4 * 8 + i % 2) * STRIDE + i % 4 / 2 * 8] =
                sum[0][first_row / 2 + i] * tile_.factor[0][i % 4 / 2];
    }

    __device__ __forceinline__ Rows load(const u8* buffer) const {
        Rows rows;
        if (row() < EPILOGUE_ROWS)
            read(rows.p, reinterpret_cast<const float*>(buffer) + row() * STRIDE, first());
        return rows;
    }

    __device__ __forceinline__ void store(const Rows& rows, i32 first_row) const {
        const i32 m = tile_.work_tile.m_tile.first + first_row + row();
        const bool good = row() < EPILOGUE_ROWS && m < tile_.work_tile.m_tile.end;
        if constexpr (Segment::RESULTS == 0)
            store_row<PIECES>(tile_.s, m, tile_.work_tile.m_tile.group, tile_.column + first(),
                              good, rows.p);
        else if (good)
            store_columns<EACH>(tile_.s, m, tile_.work_tile.m_tile.group,
                                Columns{tile_.column + first()}, rows.p);
    }

  private:
    const ConsumerTile& tile_;

    __device__ __forceinline__ i32 row() const { return tile_.thread() / PIECES; }
    __device__ __forceinline__ i32 first() const {
        return tile_.thread() % PIECES * (Columns::FRAGMENT_ORDER ? 2 : EACH);
    }

    // Columns that follow each other; or, in fragment order for the next product, a pair of each 16
    // of the warpgroup's columns.
    template <int Count>
    __device__ static __forceinline__ void read(float (&p)[Segment::COLUMNS_PER_RESULT][Count],
                                                const float* row, i32 first) {
        const float* block = row + first / Segment::BLOCK * (16 * Segment::BLOCK_TILES);
        if constexpr (Columns::FRAGMENT_ORDER) {
            const Columns at{first};
#pragma unroll
            for (int v = 0; v < Count; ++v)
#pragma unroll
                for (int f = 0; f < Segment::COLUMNS_PER_RESULT; ++f) {
                    const i32 j = at.column(v);
                    p[f][v] = row[j / Segment::BLOCK * (16 * Segment::BLOCK_TILES) +
                                  Segment::local(f, j % Segment::BLOCK)];
                }
        } else if constexpr (Segment::BLOCK == V) {
            float tile[16 * Segment::BLOCK_TILES];
            read(tile, block);
#pragma unroll
            for (int f = 0; f < Segment::COLUMNS_PER_RESULT; ++f)
#pragma unroll
                for (int v = 0; v < V; ++v) p[f][v] = tile[Segment::local(f, v)];
        } else {
#pragma unroll
            for (int f = 0; f < Segment::COLUMNS_PER_RESULT; ++f)
                read(p[f], block + Segment::local(f, first % Segment::BLOCK));
        }
    }

    template <int Count>
    __device__ static __forceinline__ void read(float (&to)[Count], const float* from) {
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(from + i);
            to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
        }
    }
};

// Elements of 16 bits, each made of two columns of the product that are in tiles of their own, as
// gate and up are. Of 32 rows the warp of the one sends the other half of its accumulators to the
// warp of the other, and receives what it lacks of its own half. Then it computes the elements of
// 16 rows and 16 columns, and writes them where it received accumulators: eight columns of all
// rows, then the other eight.
template <class Segment>
class TransposeExchanged : public RowsOfExchanged<Segment> {
    using Base = RowsOfExchanged<Segment>;
    using Columns = typename Segment::Columns;
    using Element = typename Segment::Element;
    using Base::ROWS_PER_STEP, Base::V;
    static constexpr int HALF = 16, RECEIVED_BYTES = 1024,
                         PIECE =
                             HALF * 16;  // rows; bytes that a warp receives, and of eight columns
    using ConsumerTile = ::ConsumerTile<Segment, 1>;

  public:
    using typename Base::Rows, Base::EPILOGUE_ROWS;
    static constexpr int REPEATS = 1, COLUMNS = 8 * ConsumerTile::WARPS,
                         BUFFER_BYTES = ConsumerTile::WARPS * RECEIVED_BYTES;
    static_assert(EPILOGUE_ROWS == 2 * HALF, "a warp has half of the rows");
    static constexpr bool APPLIES = Segment::RESULTS == 1 && Segment::COLUMNS_PER_RESULT == 2 &&
                                    Segment::BLOCK == 16 && Segment::WIDTH % 8 == 0 &&
                                    sizeof(Element) == 2;

    __device__ __forceinline__ explicit TransposeExchanged(const ConsumerTile& tile)
        : Base(tile), tile_(tile) {}

    template <int Sums>
    __device__ __forceinline__ void write(u8* buffer, const float (*sum)[Sums],
                                          int first_row) const {
        if (__any_sync(WHOLE_WARP, tile_.warp() % 2 == 0))
            write_half<0>(buffer, sum[0], first_row);  // a vote: all of the warp agree
        else
            write_half<1>(buffer, sum[0], first_row);
    }

    __device__ __forceinline__ Rows load(const u8* buffer) const {
        const i32 q = this->piece();
        Rows rows;
#pragma unroll
        for (int i = 0; i < EPILOGUE_ROWS / ROWS_PER_STEP; ++i) {
            const i32 t = this->row() + i * ROWS_PER_STEP;
            const u8* from = buffer + t / HALF * RECEIVED_BYTES + t % HALF * 16;
            if constexpr (Columns::FRAGMENT_ORDER) {
                Vector<u32, 2> pairs;  // the q-th of each 16 columns
#pragma unroll
                for (int b = 0; b < 2; ++b)
                    pairs.at[b] = *reinterpret_cast<const u32*>(from + b * 2 * RECEIVED_BYTES +
                                                                q / 4 * PIECE + q % 4 * 4);
                rows.of[i] = reinterpret_cast<const Vector<Element, V>&>(pairs);
            } else {
                rows.of[i] = load_vector<V>(reinterpret_cast<const Element*>(
                    from + q / 2 * 2 * RECEIVED_BYTES + q % 2 * PIECE));
            }
        }
        return rows;
    }

  private:
    const ConsumerTile& tile_;

    // Called by the warp that has column f of each element: it keeps half F of its accumulators,
    // and sends the other half.
    template <int F, int Sums>
    __device__ __forceinline__ void write_half(u8* buffer, const float (&sum)[Sums],
                                               int first_row) const {
        const i32 lane = tile_.lane();
        u8 *theirs = buffer + (tile_.warp() ^ 1) * RECEIVED_BYTES,
           *ours = buffer + tile_.warp() * RECEIVED_BYTES;
        const auto scaled = [&](int half, int i) {
            const int at = first_row / 2 + half * (HALF / 2) + i;
            return at < Sums ? sum[at] * tile_.factor[0][i % 4 / 2] : 0.f;
        };
        float4* sent = reinterpret_cast<float4*>(theirs) + lane;
#pragma unroll
        for (int i = 0; i < HALF / 2; i += 4)
            sent[i / 4 * 32] = {scaled(1 - F, i), scaled(1 - F, i + 1), scaled(1 - F, i + 2),
                                scaled(1 - F, i + 3)};
        tile_.sync_warp_pair();
        const i32 m = tile_.work_tile.m_tile.first + first_row + F * HALF + lane % 4 * 2;
        const i32 j = tile_.column + tile_.warp() / 2 * 16 + lane / 4;
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < HALF / 2; i += 4) {
            const float4 x = reinterpret_cast<const float4*>(ours)[i / 4 * 32 + lane];
            const float received[4] = {x.x, x.y, x.z, x.w};
            u16 made[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float own = scaled(F, i + k),
                            p[2] = {F == 0 ? own : received[k], F == 0 ? received[k] : own};
                made[k] = tile_.element(m + i / 4 * 8 + k % 2, j + k / 2 * 8, p);
            }
            pair[i / 2] = u32(made[0]) | u32(made[1]) << 16,
                     pair[i / 2 + 1] = u32(made[2]) | u32(made[3]) << 16;
        }
        store_matrices_transposed(
            shared_address(ours) + lane / 8 % 2 * PIECE + (lane / 16 * 8 + lane % 8) * 16, pair);
    }
};

// Chooses one of the three by the columns that a result reads.
template <class Segment, int REPEATS>
using EpilogueTranspose =
    Choose<TransposeResults<Segment>::APPLIES && REPEATS % TransposeResults<Segment>::REPEATS == 0,
           TransposeResults<Segment>,
           Choose<TransposeExchanged<Segment>::APPLIES, TransposeExchanged<Segment>,
                  TransposeAccumulators<Segment>>>;

}  // namespace
