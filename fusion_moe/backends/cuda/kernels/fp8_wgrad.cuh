// Grouped products of e4m3 codes over the rows of each group: a [M/g, n] x [M/g, k] -> [G, n, k],
// both with a scale for 128 rows of a column, as block_copies.cuh stores them by columns: [blocks,
// n, 128] codes, [blocks, n] scales. Codes of rows that a block does not have are zeros.
//
// Sums leave the tensor cores after each block of rows, as in fp8.cuh, where a consumer multiplies
// them by the scales of their row and column.
//
// A group has few blocks of rows, so tiles are read and stored often. The two blocks of a cluster
// have tiles of the same columns: each copies one half of the codes for both, or what the
// multiprocessors read together would be more than the cache delivers. Columns are in memory in the
// order in which a thread holds results (place_in_tile), so that it stores eight of a row at once.
#pragma once

#include "block_copies.cuh"
#include "product_wgmma.cuh"

namespace {

template <class Segment, int CLUSTER>
struct Fp8Wgrad {
    static constexpr int TILE_M = 128, TILE_N = 256, HALF = 128, K_BLOCK = 128, MOST_STAGES = 4;
    static_assert(Segment::N % 32 == 0 && Segment::K % 32 == 0, "as place_in_tile has them");
    static_assert(CLUSTER <= 2, "each block of a cluster copies a half, or a block both");
    using Schedule = WgradSchedule<Segment, TILE_M, TILE_N, CLUSTER, 8>;
    using Scheduler = typename Schedule::Scheduler;
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;

    struct alignas(16) Scales {
        float a[TILE_M], b[TILE_N];
    };
    using Ring =
        GemmRing<Segment, TILE_M, TILE_N, 1, int(sizeof(Scheduler) + MOST_STAGES * sizeof(Scales)),
                 false, false, true, FixedShares<CLUSTER>, CLUSTER>;
    using Stage = typename Ring::Stage;
    static_assert(Ring::STAGES <= MOST_STAGES);

    struct Shared {
        Ring ring;
        Scales scales[Ring::STAGES];
        Scheduler scheduler;
    };

  private:
    // A block's tile: the first row and column of a group's matrix, and the blocks of rows. stores:
    // whether it is the only one to store it, since a cluster's second tile may be past the last
    // one, which it makes again.
    struct Tile {
        i32 group, a, b, first, count;
        bool stores;

        __device__ __forceinline__ explicit Tile(const typename Schedule::Tile& of)
            : group(of.group),
              b(of.b),
              first(of.first / K_BLOCK + of.group),
              count((of.end - of.first + K_BLOCK - 1) / K_BLOCK) {
            const i32 rows = of.a + i32(cluster_rank()) * TILE_M;
            a = min(rows, (Segment::N - 1) / TILE_M * TILE_M);
            stores = Segment::N % (CLUSTER * TILE_M) == 0 || a == rows;
        }

        __device__ __forceinline__ i32 height() const {
            return Segment::N % TILE_M == 0 ? TILE_M : min(Segment::N - a, TILE_M);
        }
        __device__ __forceinline__ i32 columns() const { return min(Segment::K - b, TILE_N); }
        // With zeros past the last one, to whole halves.
        __device__ __forceinline__ i32 copied() const {
            return Segment::K % HALF == 0 ? columns() : columns() > HALF ? TILE_N : HALF;
        }
    };

  public:
    // By one thread. A stage is empty when the consumers of both blocks have read it.
    template <class Base>
    struct Copies : Base {
        using Base::s, Base::shared, Base::producer, Base::a_map, Base::b_map;

        __device__ __forceinline__ void copy(const typename Schedule::Tile& of) {
            const Tile tile(of);
            const u32 a_scales = u32(sizeof(float)) * tile.height(),
                      b_scales = u32(sizeof(float)) * tile.columns(), columns = tile.copied();
#pragma unroll 1
            for (i32 block = tile.first; block < tile.first + tile.count; ++block) {
                Stage& stage = producer.open();
                Scales& scales = shared.scales[producer.filling.stage];
                u64& full = producer.expect(u32(sizeof(Stage::a)) + a_scales +
                                            columns * TILE_ROW_BYTES + b_scales);
                copy_box(shared_address(stage.a), *a_map, 0, tile.a, block, full);
                for (u32 half = cluster_rank() * HALF; half < columns; half += CLUSTER * HALF)
                    copy_box_to_cluster<CLUSTER>(shared_address(stage.b) + half * TILE_ROW_BYTES,
                                                 *b_map, 0, tile.b + half, block, full);
                copy_bulk(shared_address(scales.a), s.a_scales() + i64(block) * Segment::N + tile.a,
                          a_scales, full);
                copy_bulk(shared_address(scales.b), s.b_scales() + i64(block) * Segment::K + tile.b,
                          b_scales, full);
                producer.close(false);
            }
        }
    };

    // A consumer has half of a tile's columns, a thread four rows and a quarter of these. So it
    // loads a scale of a column for four sums: shared memory, whose 128 bytes a cycle are shared by
    // the tensor cores, copies and registers, bounds the kernel.
    template <class Base>
    struct Sums : Base {
        using Base::s, Base::shared, Base::mainloop;
        const i32 consumer = __shfl_sync(WHOLE_WARP, Base::consumer, 0),  // seen to be uniform
            lane = threadIdx.x % 32, row = place_in_tile(threadIdx.x / 32 % 4 * 16 + lane / 4);

        __device__ __forceinline__ i32 column() const { return consumer * HALF + lane % 4 * 8; }

        struct Promote {
            const Sums& of;
            float row[2];
            u32 columns[HALF / 8];  // pairs

            __device__ __forceinline__ int a_row(int i) const { return 64 * i; }
            __device__ __forceinline__ int b_row(int) const { return HALF * of.consumer; }
            __device__ __forceinline__ void before(int i, u32 stage) {
                const float* scales = of.shared.scales[stage].a + 64 * i + of.row;
                row[0] = scales[0], row[1] = scales[NEXT_ROW];
            }
            __device__ __forceinline__ void meanwhile(int i, u32 stage) {
                if (i == 0) load_pairs(columns, of.shared.scales[stage].b + of.column());
            }
            __device__ __forceinline__ float factor(int c) const {
                return of_pair(columns[c / 4], c % 2) * row[c / 2 % 2];
            }
        };

        __device__ __forceinline__ void compute(const typename Schedule::Tile& of) {
            const Tile tile(of);
            float sum[2][HALF / 2] = {};  // of 64 rows each
            mainloop.multiply_codes(sum, tile.count, Promote{*this});
            if (!tile.stores) return;
#pragma unroll
            for (int rows = 0; rows < 2; ++rows) {
                const auto eight = [&](float (&p)[8], int i, int h) {
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        p[j] = sum[rows][4 * (4 * i + j / 2) + 2 * h + j % 2];
                };
                if (Segment::K % TILE_N == 0 || consumer * HALF < tile.columns())
                    store_wgrad<TILE_M, HALF, NEXT_ROW>(s, tile.group, tile.a + 64 * rows + row,
                                                        tile.b + column(), eight);
            }
        }
    };

  private:
    // Scales are powers of two: a register holds those of two columns, as their upper halves.
    __device__ static __forceinline__ void load_pairs(u32 (&pairs)[HALF / 8], const float* scales) {
#pragma unroll
        for (int i = 0; i < HALF / 32; ++i) {
            const Eight<float> of = load_eight(scales + 32 * i);
#pragma unroll
            for (int j = 0; j < 8; j += 2)
                pairs[4 * i + j / 2] =
                    __byte_perm(__float_as_uint(of.at[j]), __float_as_uint(of.at[j + 1]), 0x7632);
        }
    }
    __device__ static __forceinline__ float of_pair(u32 pair, int which) {
        return __uint_as_float(which == 0 ? pair << 16 : pair & 0xFFFF0000);
    }

    // Columns and rows of a tile lie where place_in_tile says. So a thread has eight columns that
    // follow each other of each 32, of rows two apart.
    static constexpr i32 NEXT_ROW = 2;
};

}  // namespace
