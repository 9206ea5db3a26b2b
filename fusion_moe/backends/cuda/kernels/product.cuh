// Grouped products by two operands in shared memory, as policies of which a kernel is made. What
// runs them is product_wgmma.cuh or, on GPUs without wgmma, product_mma.cuh. A kernel names
//
//     Schedule   its work tiles: FpropSchedule contracts columns (fprop, dgrad), WgradSchedule rows
//     Copies     how threads fill a stage: from a source of rows (boxes, PickedRows,
//     ContractedRows)
//                and one of weights (weight_tiles.cuh)
//     Sums       how a stage is multiplied, what becomes of sums between K blocks, and of the last
//                ones: GemmPart, store_wgrad, or what fp8*.cuh have for codes
//
// What lies outside of a matrix, or of a group whose rows are contracted, is not read: zeros are
// written in its place. So no row of another group enters a product, not even times zero.
//
// Accumulators are exchanged among the four lanes that share rows, so that each has eight columns
// that follow each other of one row. Sums over a row's columns are stored for each part of an N
// tile that is added up on its own, and added in order by another kernel.
#pragma once

#include "added.cuh"
#include "epilogue_rows.cuh"
#include "schedule.cuh"
#include "weight_tiles.cuh"

namespace {

// fprop and dgrad
// -------------------------------------------------------------------------------------------------

// [M/g, k] x [G, n, k] or [G, k, n] -> [M/g, n]. HEIGHTS: what heights of M tiles are multiples of.
template <class Segment, int TILE_M, int TILE_N, int HEIGHTS = 8>
struct FpropSchedule {
    static constexpr int TILE_COLUMNS = TILE_N / Segment::COLUMNS_PER_RESULT;  // of a result
    static constexpr i32 N_TILES = (Segment::WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS;
    using Scheduler = TileScheduler<Segment::GROUPS, TILE_M, 1, 1, 1, HEIGHTS>;
    using Tile = WorkTile;

    // By all threads of a block.
    __device__ static void build(const Segment& s, Scheduler& scheduler, i32* scratch) {
        scheduler.build(s.ends, i32(s.rows()), N_TILES, Segment::SIZE_CLASS,
                        blockIdx.x == 0 ? s.error : nullptr, scratch);
    }
    __device__ static __forceinline__ auto at(const Scheduler& scheduler, i32 number) {
        typename Scheduler::WorkTiles tiles(scheduler);
        tiles.go_to(number);
        return tiles;
    }
    __device__ static __forceinline__ bool more(const Scheduler& scheduler, i32 number) {
        return at(scheduler, number).more();
    }
    // By a whole warp.
    __device__ static __forceinline__ Tile tile(const Scheduler& scheduler, i32 number) {
        return at(scheduler, number).current();
    }
    // Rows of no group are zeros, for which nothing is copied or multiplied.
    __device__ static __forceinline__ bool grouped(const Tile& tile) {
        return tile.m_tile.group < Segment::GROUPS;
    }
};

// Rows as an index picks them: of those of an M tile, a thread copies a piece of every STEP-th.
template <class Segment, int TILE_M, int THREADS>
struct PickedRows : PiecesOfRows<TILE_M, THREADS> {
    using Base = PiecesOfRows<TILE_M, THREADS>;
    using Base::row, Base::STEP, Base::COUNT;

    __device__ __forceinline__ void begin(const Segment& s, const MTile& m_tile, i32 thread) {
        i64 index[COUNT] = {};  // all are read before any is needed
        const i32 first = m_tile.first + thread / 8;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (first + STEP * i < m_tile.end) index[i] = s.a_index(first + STEP * i);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            row[i] = first + STEP * i < m_tile.end ? i32(s.a_row_of(index[i])) : -1;
    }
};

// What a warp has of a work tile of fprop or dgrad: 16 rows and COLUMNS columns of the product, the
// part-th of EACH columns for each of those that a result reads. first: the row of the first of
// each four warps, one below the other.
template <class Segment, int TILE_N, int COLUMNS>
struct GemmPart {
    static constexpr int RESULTS = Segment::COLUMNS_PER_RESULT, TILE_COLUMNS = TILE_N / RESULTS,
                         EACH = COLUMNS / RESULTS, PARTS = TILE_COLUMNS / EACH;
    static_assert(EACH % 32 == 0, "four lanes have eight columns each");

    // The added (LoRA) product.
    __device__ static __forceinline__ void add(const Segment& s, const WorkTile& tile, i32 first,
                                               float (&sum)[COLUMNS / 2], int part) {
        constexpr int RUN = RESULTS == 1 ? TILE_COLUMNS : EACH;
        const i32 row = threadIdx.x % 32 / 4, m = first + threadIdx.x / 32 % 4 * 16 + row,
                  last = tile.m_tile.end - 1;
        using Added = AddedProduct<Segment>;
        const auto rows = Added::rows(s);
        const auto matrix = Added::columns(s, tile.m_tile.group);
        const i32 column = tile.n_tile * TILE_COLUMNS + (PARTS > 1 ? part * EACH : 0) + row;
        const auto columns = [&](int i, int k) {
            const i32 j = min(column + 8 * i % RUN, Segment::WIDTH - 1);
            return matrix.four(Segment::column(8 * i / RUN, j), k);
        };
        Added::template add<COLUMNS / 8>(
            sum, [&](int k) { return rows.four(min(m, last), k); },
            [&](int k) { return rows.four(min(m + 8, last), k); }, columns);
    }

    __device__ static __forceinline__ void store(const Segment& s, const WorkTile& tile, i32 first,
                                                 const float (&sum)[COLUMNS / 2], int number) {
        const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4,
                  part = PARTS == 1 ? 0 : number;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i32 m = first + 16 * warp + lane / 4 + 8 * h;
            const bool good = m < tile.m_tile.end;
            float total[Segment::SUMS > 0 ? Segment::SUMS : 1] = {};  // of this part's columns
#pragma unroll
            for (int i = 0; i < EACH / 32; ++i) {
                float p[RESULTS][8];
#pragma unroll
                for (int f = 0; f < RESULTS; ++f) row_of_quad(p[f], sum, f * EACH / 8 + 4 * i, h);
                const i32 j = tile.n_tile * TILE_COLUMNS + part * EACH + 32 * i + 8 * (lane % 4);
                if (good) s.store(m, tile.m_tile.group, j, p, total);
            }
            if constexpr (Segment::SUMS > 0)
                store_sums<4>(s, m, tile.n_tile * PARTS + part, good, total);
        }
    }
};

// wgrad
// -------------------------------------------------------------------------------------------------

// The tiles of all groups, those of the groups with the most rows first.
template <int GROUPS>
struct WgradScheduler {
    MTiles<GROUPS, 128> m_tiles;
    i32 group_of_place[GROUPS];

    // By all threads of a block.
    __device__ void build(const i32* ends, i32 rows, i64* error) {
        m_tiles.build(ends, rows, ALL_GROUPS, error);
        for (i32 g = threadIdx.x; g < GROUPS; g += blockDim.x) {
            const i32 mine = size(g);
            i32 place = 0;
            for (i32 other = 0; other < GROUPS; ++other)
                place += size(other) > mine || (size(other) == mine && other < g);
            group_of_place[place] = g;
        }
        __syncthreads();
    }

    __device__ __forceinline__ i32 size(i32 g) const {
        return m_tiles.first[g + 1] - m_tiles.first[g];
    }
};

// Of a group's result [N, K]: rotations of tiles of a, with all tiles of b (schedule.cuh).
template <class Segment, int TILE_M, int TILE_N, int CLUSTER = 1, int ROTATION = 2048 / TILE_M>
struct WgradSchedule {
    using Scheduler = WgradScheduler<Segment::GROUPS>;
    static constexpr i32 A_TILES = (Segment::N + CLUSTER * TILE_M - 1) / (CLUSTER * TILE_M),
                         B_TILES = (Segment::K + TILE_N - 1) / TILE_N;
    static constexpr i32 EACH_GROUP = A_TILES * B_TILES;  // for a cluster
    static_assert(i64(Segment::GROUPS) * EACH_GROUP < NO_WORK_TILE,
                  "numbers of work tiles are i32");

    // first, end: rows of the group; a: the first row of the tile, if it is a cluster's first one.
    struct Tile {
        i32 group, a, b, first, end;
    };

    // By all threads of a block.
    __device__ static void build(const Segment& s, Scheduler& scheduler, i32*) {
        scheduler.build(s.ends, i32(s.rows()), blockIdx.x == 0 ? s.error : nullptr);
    }
    __device__ static __forceinline__ bool more(const Scheduler&, i32 number) {
        return number < Segment::GROUPS * EACH_GROUP;
    }
    __device__ static __forceinline__ Tile tile(const Scheduler& scheduler, i32 number) {
        const i32 place = number / EACH_GROUP, within = number % EACH_GROUP;
        const i32 rotation = within / (ROTATION * B_TILES), rest = within % (ROTATION * B_TILES);
        const i32 height = min(ROTATION, A_TILES - rotation * ROTATION);
        const i32 group = scheduler.group_of_place[place];
        return {group, (rotation * ROTATION + rest % height) * CLUSTER * TILE_M,
                rest / height * TILE_N, scheduler.m_tiles.first[group],
                scheduler.m_tiles.first[group + 1]};
    }
    __device__ static __forceinline__ i32 k_blocks(const Tile& tile) {
        return (tile.end - tile.first + GEMM_K_BLOCK - 1) / GEMM_K_BLOCK;
    }
};

// How THREADS threads copy the 64 rows of a K block, of an operand of which a tile has TILE
// columns: eight columns at a time, of every STEP-th row, COUNT times. A lane knows one row, that
// of its thread's copy lane % COUNT, and tells the lanes that copy the same row.
//
// PICKS: whether an index picks rows; else they follow each other. It is read for AHEAD blocks at a
// time, while those before are copied: reading takes as long as a block or two. Nothing is computed
// from it before it is needed, which would wait for memory, not even a wider number.
//
// The Segment's functions of an operand, a or b, are INDEX and ROW_OF, MATRIX; COLUMNS: its own.
template <class Segment, class Index, auto INDEX, auto ROW_OF, auto MATRIX, int COLUMNS, int TILE,
          int THREADS, bool PICKS, int AHEAD>
class ContractedRows {
    static constexpr int PIECES = TILE / 8, STEP = THREADS / PIECES, COUNT = GEMM_K_BLOCK / STEP;
    static_assert(PIECES % COUNT == 0 && COUNT <= 32,
                  "lanes that tell each other copy the same rows");
    const Segment& s_;
    const i32 thread_;
    i32 first_, end_, column_, known_;
    Index now_[AHEAD], next_[AHEAD];

    __device__ __forceinline__ i32 row(i32 kb) const {
        return first_ + kb * GEMM_K_BLOCK + thread_ / PIECES + STEP * (thread_ % COUNT);
    }
    __device__ __forceinline__ void read(i32 kb) {
        if (first_ == end_) return;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) next_[i] = Index((s_.*INDEX)(min(row(kb + i), end_ - 1)));
    }

  public:
    __device__ __forceinline__ ContractedRows(const Segment& s, i32 thread)
        : s_(s), thread_(thread) {}

    // first, end: rows of the group; column: the tile's first.
    __device__ __forceinline__ void begin(i32 first, i32 end, i32 column) {
        first_ = first, end_ = end, column_ = column;
        if (PICKS) read(0);
    }

    // Before each block, in order.
    __device__ __forceinline__ void next(i32 kb) {
        if constexpr (PICKS) {
            if (kb % AHEAD == 0) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) now_[i] = next_[i];
                read(kb + AHEAD);
            }
            auto index = now_[0];
#pragma unroll
            for (int i = 1; i < AHEAD; ++i) index = kb % AHEAD == i ? now_[i] : index;
            known_ = row(kb) < end_ ? i32((s_.*ROW_OF)(index)) : -1;
        }
    }

    __device__ __forceinline__ void copy(u32 to, i32 kb) const {
        const i32 piece = thread_ % PIECES, first = thread_ / PIECES,
                  known = PICKS            ? known_
                          : row(kb) < end_ ? row(kb)
                                           : -1;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const i32 its = __shfl_sync(WHOLE_WARP, known, i, COUNT);
            const u32 place = to + piece / 8 * PIECE_BYTES + swizzled(first + STEP * i, piece % 8);
            copy_piece<COLUMNS>(place, (s_.*MATRIX)(), its, column_ + 8 * piece, its >= 0);
        }
    }
};

template <class Segment, int TILE, int THREADS, bool PICKS = true, int AHEAD = 1>
using ARows =
    ContractedRows<Segment, typename Segment::AIndex, &Segment::a_index, &Segment::a_row_of,
                   &Segment::a_matrix, Segment::N, TILE, THREADS, PICKS, AHEAD>;
template <class Segment, int TILE, int THREADS, bool PICKS = true, int AHEAD = 1>
using BRows =
    ContractedRows<Segment, typename Segment::BIndex, &Segment::b_index, &Segment::b_row_of,
                   &Segment::b_matrix, Segment::K, TILE, THREADS, PICKS, AHEAD>;

// Stores a lane's part of a group's result: of two rows, `row` and the one NEXT below, eight
// columns of each 32 from `column` on. of(p, i, h) makes the i-th eight of the h-th row, by whole
// warps.
template <int TILE_M, int COLUMNS, int NEXT, class Segment, class Of>
__device__ __forceinline__ void store_wgrad(const Segment& s, i32 group, i32 row, i32 column,
                                            Of of) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const i32 n = row + NEXT * h;
#pragma unroll
        for (int i = 0; i < COLUMNS / 32; ++i) {
            float p[1][8], none[1];
            of(p[0], i, h);
            if (Segment::N % TILE_M == 0 || n < Segment::N)
                s.store(i64(group) * Segment::N + n, group, column + 32 * i, p, none);
        }
    }
}

// The same of accumulators of a warp's 16 rows.
template <int TILE_M, int COLUMNS, class Segment>
__device__ __forceinline__ void store_wgrad(const Segment& s, i32 group, i32 row, i32 column,
                                            const float (&sum)[COLUMNS / 2]) {
    const i32 lane = threadIdx.x % 32;
    store_wgrad<TILE_M, COLUMNS, 8>(
        s, group, row + lane / 4, column + 8 * (lane % 4),
        [&](float (&p)[8], int i, int h) { row_of_quad(p, sum, 4 * i, h); });
}

}  // namespace
