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
#include "gemm.cuh"

namespace {

template <class Segment, int CLUSTER>
struct Fp8Wgrad {
    static constexpr int TILE_M = 128, TILE_N = 256, HALF = 128, K_BLOCK = 128, STAGES = 4;
    static_assert(Segment::N % 32 == 0 && Segment::K % 32 == 0, "as place_in_tile has them");
    static_assert(CLUSTER <= 2, "each block of a cluster copies a half, or a block both");

    using Scheduler = WgradScheduler<Segment::GROUPS>;
    static constexpr i32 A_TILES = (Segment::N + CLUSTER * TILE_M - 1) / (CLUSTER * TILE_M),
                         B_TILES = (Segment::K + TILE_N - 1) / TILE_N,
                         TILES = A_TILES * B_TILES,  // of a group, for a cluster
        ROTATION = 8;

    struct alignas(1024) Stage {
        u8 a[TILE_M * TILE_ROW_BYTES], b[TILE_N * TILE_ROW_BYTES];
    };
    struct alignas(16) Scales {
        float a[TILE_M], b[TILE_N];
    };
    struct Shared {
        Stage stage[STAGES];
        Scales scales[STAGES];
        u64 full[STAGES], empty[STAGES];
        Scheduler scheduler;
    };
    static_assert(sizeof(Shared) <= Segment::MAX_SHARED_BYTES);

    __device__ static void run(const Segment& s, const TensorMap* a_map, const TensorMap* b_map) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        if (threadIdx.x < STAGES) {
            mbarrier_init(shared.full[threadIdx.x], 0, 1);
            mbarrier_init(shared.empty[threadIdx.x], CLUSTER * GEMM_CONSUMERS * 4);
            fence_mbarrier_init();
        }
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        shared.scheduler.build(s.ends, i32(s.rows()), blockIdx.x == 0 ? s.error : nullptr);
        cluster_arrive(), cluster_wait();  // barriers of the other block are there
        if (threadIdx.x < 128 * GEMM_CONSUMERS) {
            setmaxnreg_inc<232>();
            consume(s, shared);
        } else {
            setmaxnreg_dec<40>();
            if (threadIdx.x == 128 * GEMM_CONSUMERS) produce(s, shared, a_map, b_map);
        }
        __syncwarp();
        cluster_arrive(), cluster_wait();  // the other one still writes to this block's memory
    }

  private:
    // A block's tile: the first row and column of a group's matrix, and the blocks of rows. stores:
    // whether it is the only one to store it, since a cluster's second tile may be past the last
    // one, which it makes again. Rotations of tiles of a, with all tiles of b: see schedule.cuh.
    struct Tile {
        i32 group, a, b, first, count;
        bool stores;

        __device__ __forceinline__ Tile(const Scheduler& scheduler, i32 number) {
            const i32 place = number / TILES, within = number % TILES;
            const i32 rotation = within / (ROTATION * B_TILES),
                      rest = within % (ROTATION * B_TILES);
            const i32 height = min(ROTATION, A_TILES - rotation * ROTATION),
                      rows =
                          ((rotation * ROTATION + rest % height) * CLUSTER + i32(cluster_rank())) *
                          TILE_M;
            group = scheduler.group_of_place[place];
            a = min(rows, (Segment::N - 1) / TILE_M * TILE_M), b = rest / height * TILE_N;
            stores = Segment::N % (CLUSTER * TILE_M) == 0 || a == rows;
            first = scheduler.first[group] / K_BLOCK + group;
            count = (scheduler.size(group) + K_BLOCK - 1) / K_BLOCK;
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

    template <class Body>
    __device__ static __forceinline__ void for_all_tiles(const Shared& shared, Body body) {
        for (i32 number = i32(blockIdx.x) / CLUSTER; number < Segment::GROUPS * TILES;
             number += i32(gridDim.x) / CLUSTER)
            body(Tile(shared.scheduler, number));
    }

    // By one thread. A stage is empty when the consumers of both blocks have read it.
    __device__ static void produce(const Segment& s, Shared& shared, const TensorMap* a_map,
                                   const TensorMap* b_map) {
        PipelineState<STAGES> filling;
        filling.parity = 1;
        for_all_tiles(shared, [&](const Tile& tile) {
            const u32 a_scales = u32(sizeof(float)) * tile.height(),
                      b_scales = u32(sizeof(float)) * tile.columns(), columns = tile.copied();
#pragma unroll 1
            for (i32 block = tile.first; block < tile.first + tile.count; ++block) {
                mbarrier_wait(shared.empty[filling.stage], filling.parity);
                Stage& stage = shared.stage[filling.stage];
                Scales& scales = shared.scales[filling.stage];
                u64& full = shared.full[filling.stage];
                mbarrier_arrive_expect_bytes(
                    full, u32(sizeof(Stage::a)) + a_scales + columns * TILE_ROW_BYTES + b_scales);
                copy_box(shared_address(stage.a), *a_map, 0, tile.a, block, full);
                for (u32 half = cluster_rank() * HALF; half < columns; half += CLUSTER * HALF)
                    copy_box_to_cluster<CLUSTER>(shared_address(stage.b) + half * TILE_ROW_BYTES,
                                                 *b_map, 0, tile.b + half, block, full);
                copy_bulk(shared_address(scales.a), s.a_scales() + i64(block) * Segment::N + tile.a,
                          a_scales, full);
                copy_bulk(shared_address(scales.b), s.b_scales() + i64(block) * Segment::K + tile.b,
                          b_scales, full);
                filling.advance();
            }
        });
    }

    // A consumer has half of a tile's columns, a thread four rows and a quarter of these. So it
    // loads a scale of a column for four sums: shared memory, whose 128 bytes a cycle are shared by
    // the tensor cores, copies and registers, bounds the kernel.
    __device__ static void consume(const Segment& s, Shared& shared) {
        const i32 consumer = __shfl_sync(WHOLE_WARP, threadIdx.x / 128, 0),  // seen to be uniform
            lane = threadIdx.x % 32;
        const i32 row = place_in_tile(threadIdx.x / 32 % 4 * 16 + lane / 4);
        PipelineState<STAGES> reading;
        for_all_tiles(shared, [&](const Tile& tile) {
            mark_tile(threadIdx.x % 128 == 0, false);
            float sum[2][HALF / 2] = {};  // of 64 rows each
#pragma unroll 1
            for (i32 block = 0; block < tile.count; ++block) {
                mbarrier_wait(shared.full[reading.stage], reading.parity);
                const Stage& stage = shared.stage[reading.stage];
                const Scales& scales = shared.scales[reading.stage];
                const u64 b =
                    tile_descriptor(shared_address(stage.b) + consumer * HALF * TILE_ROW_BYTES);
                u32 of_columns[HALF / 8];  // pairs
#pragma unroll
                for (int rows = 0; rows < 2; ++rows) {
                    const u64 a =
                        tile_descriptor(shared_address(stage.a) + rows * 64 * TILE_ROW_BYTES);
                    const float of_row[2] = {scales.a[64 * rows + row],
                                             scales.a[64 * rows + row + NEXT_ROW]};
                    float part[HALF / 2];
                    wgmma_fence();
                    wgmma_e4m3<false>(part, a, b);
#pragma unroll
                    for (int v = 1; v < K_BLOCK / 32; ++v)
                        wgmma_e4m3<true>(part, a + 2 * v, b + 2 * v);
                    wgmma_commit();
                    if (rows == 0)
                        load_pairs(of_columns, scales.b + consumer * HALF + lane % 4 * 8);
                    wgmma_wait<0>();
#pragma unroll
                    for (int c = 0; c < HALF / 2; c += 4)
#pragma unroll
                        for (int v = 0; v < 4; ++v)
                            sum[rows][c + v] =
                                fmaf(part[c + v], of_pair(of_columns[c / 4], v % 2) * of_row[v / 2],
                                     sum[rows][c + v]);
                }
#pragma unroll
                for (u32 rank = 0; rank < CLUSTER; ++rank)
                    mbarrier_arrive_read(rank, shared.empty[reading.stage]);
                reading.advance();
            }
            mark_tile(threadIdx.x % 128 == 0, true);
            if (!tile.stores) return;
#pragma unroll
            for (int rows = 0; rows < 2; ++rows)
                if (Segment::K % TILE_N == 0 || consumer * HALF < tile.columns())
                    store(s, tile, 64 * rows + row, tile.b + consumer * HALF + lane % 4 * 8,
                          sum[rows]);
        });
    }

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
    // follow each other of each 32: the j-th of the i-th 32 is this one of its sums. h: of which of
    // its rows.
    static constexpr i32 NEXT_ROW = 2;
    __device__ static constexpr int in_run(int i, int j, int h) {
        return 4 * (4 * i + j / 2) + 2 * h + j % 2;
    }

    // column: of a thread's first sums.
    __device__ static __forceinline__ void store(const Segment& s, const Tile& tile, i32 row,
                                                 i32 column, const float (&sum)[HALF / 2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (Segment::N % TILE_M != 0 && row + NEXT_ROW * h >= tile.height()) continue;
            const i64 n = i64(tile.group) * Segment::N + tile.a + row + NEXT_ROW * h;
#pragma unroll
            for (int i = 0; i < HALF / 32; ++i) {
                float p[1][8], none[1];
#pragma unroll
                for (int j = 0; j < 8; ++j) p[0][j] = sum[in_run(i, j, h)];
                s.store(n, tile.group, column + 32 * i, p, none);
            }
        }
    }
};

}  // namespace
