// Grouped products of e4m3 codes over the rows of each group: a [M/g, n] x [M/g, k] -> [G, n, k],
// both with a scale for 128 rows of a column, as block_copies.cuh stores them by columns: [blocks,
// n, 128] codes, [blocks, n] scales. Codes of rows that a block does not have are zeros.
//
// Sums leave the tensor cores after each block of rows, as in fp8.cuh, where a consumer multiplies
// them by the scales of their row and column.
#pragma once

#include "gemm.cuh"

namespace {

template <class Segment>
struct Fp8Wgrad {
    static constexpr int TILE_M = 128, TILE_N = 256, HALF = 128, K_BLOCK = 128, PRODUCERS = 32,
                         MOST_STAGES = 4;
    using Tile = typename GroupedWgrad<Segment, TILE_M, TILE_N>::Tile;
    using Scheduler = WgradScheduler<Segment::GROUPS>;
    static constexpr i32 TILES = GroupedWgrad<Segment, TILE_M, TILE_N>::TILES;
    static_assert(Segment::N % HALF == 0 && Segment::K % HALF == 0, "whole blocks");

    struct alignas(16) Scales {
        float a[TILE_M], b[TILE_N];
    };
    using Ring =
        GemmRing<Segment, TILE_M, TILE_N, PRODUCERS,
                 int(sizeof(Scheduler) + MOST_STAGES * sizeof(Scales) + 256), false, false>;
    using Stage = typename Ring::Stage;
    static_assert(Ring::STAGES <= MOST_STAGES);

    struct Shared {
        Ring ring;
        Scales scales[Ring::STAGES];
        Scheduler scheduler;
    };
    static_assert(sizeof(Shared) <= Segment::MAX_SHARED_BYTES);

    __device__ static void run(const Segment& s, const TensorMap* a_map, const TensorMap* b_map) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        shared.ring.init();
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        shared.scheduler.build(s.ends, i32(s.rows()), blockIdx.x == 0 ? s.error : nullptr);
        if (threadIdx.x < 128 * GEMM_CONSUMERS) {
            setmaxnreg_inc<216>();
            consume(s, shared);
        } else {
            setmaxnreg_dec<72>();
            produce(s, shared, a_map, b_map);
        }
    }

  private:
    __device__ static __forceinline__ i32 blocks(const Tile& tile) {
        return (tile.end - tile.first + K_BLOCK - 1) / K_BLOCK;
    }

    // By one warp. The last tile may have half of the columns.
    __device__ static void produce(const Segment& s, Shared& shared, const TensorMap* a_map,
                                   const TensorMap* b_map) {
        const i32 thread = threadIdx.x - 128 * GEMM_CONSUMERS;
        if (thread >= PRODUCERS) return;
        typename Ring::Producer producer(shared.ring);
        typename Ring::Queue::Taker numbers(shared.ring.queue, s.tile_counter, thread == 0);
        for (i32 number = blockIdx.x; number < Segment::GROUPS * TILES; number = numbers.next()) {
            const Tile tile(shared.scheduler, number);
            const i32 first = tile.first / K_BLOCK + tile.group, count = blocks(tile);
            const u32 columns = min(Segment::K - tile.b, TILE_N);
#pragma unroll 1
            for (i32 block = first; block < first + count; ++block) {
                Stage& stage = producer.open();
                Scales& scales = shared.scales[producer.filling.stage];
                if (thread == 0) {
                    u64& barrier = producer.expect(
                        u32(sizeof(Stage::a) + sizeof(Stage::b) + sizeof(Scales::a)) + 4 * columns);
                    copy_box(shared_address(stage.a), *a_map, 0, tile.a, block, barrier);
                    copy_box(shared_address(stage.b), *b_map, 0, tile.b, block, barrier);
                    copy_bulk(shared_address(scales.a),
                              s.a_scales() + i64(block) * Segment::N + tile.a, sizeof(Scales::a),
                              barrier);
                    copy_bulk(shared_address(scales.b),
                              s.b_scales() + i64(block) * Segment::K + tile.b, 4 * columns,
                              barrier);
                }
                __syncwarp();  // or lanes that only wait would miss phases
                producer.close(false);
            }
        }
    }

    // A consumer has 64 rows of a tile.
    __device__ static void consume(const Segment& s, Shared& shared) {
        const i32 consumer = threadIdx.x / 128, lane = threadIdx.x % 32,
                  row = 64 * consumer + threadIdx.x / 32 % 4 * 16 + lane / 4;
        PipelineState<Ring::STAGES> reading;
        typename Ring::Queue::Reader numbers(shared.ring.queue);
        for (i32 number = blockIdx.x; number < Segment::GROUPS * TILES; number = numbers.next()) {
            const Tile tile(shared.scheduler, number);
            const i32 count = blocks(tile);
            float sum[2][HALF / 2] = {};
#pragma unroll 1
            for (i32 block = 0; block < count; ++block) {
                mbarrier_wait(shared.ring.full[reading.stage], reading.parity);
                const Stage& stage = shared.ring.stage[reading.stage];
                const Scales& scales = shared.scales[reading.stage];
                const float of_row[2] = {scales.a[row], scales.a[row + 8]};
                const u64 a =
                    tile_descriptor(shared_address(stage.a) + consumer * 64 * TILE_ROW_BYTES);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u64 b =
                        tile_descriptor(shared_address(stage.b) + half * HALF * TILE_ROW_BYTES);
                    float part[HALF / 2];
                    wgmma_fence();
                    wgmma_e4m3<false>(part, a, b);
#pragma unroll
                    for (int v = 1; v < K_BLOCK / 32; ++v)
                        wgmma_e4m3<true>(part, a + 2 * v, b + 2 * v);
                    wgmma_commit();
                    wgmma_wait<0>();
                    const float* of_columns = scales.b + half * HALF + lane % 4 * 2;
#pragma unroll
                    for (int c = 0; c < HALF / 2; c += 4) {
                        const Vector<float, 2> of = load_vector<2>(of_columns + 2 * c);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            sum[half][c + i] =
                                fmaf(part[c + i], of.at[i % 2] * of_row[i / 2], sum[half][c + i]);
                    }
                }
                mbarrier_arrive(shared.ring.empty[reading.stage]);
                reading.advance();
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) store(s, tile, row, half, sum[half]);
        }
    }

    // If results are rounded to bf16 anyway, lanes exchange rounded numbers, two in a word.
    __device__ static __forceinline__ void store(const Segment& s, const Tile& tile, i32 row,
                                                 int half, const float (&sum)[HALF / 2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 n = i64(tile.group) * Segment::N + tile.a + row + 8 * h;
            const i32 column = tile.b + half * HALF + 8 * (threadIdx.x % 4);
#pragma unroll
            for (int i = 0; i < HALF / 32; ++i) {
                float p[1][8], none[1];
                if constexpr (Segment::ROUNDED) {
                    u32 words[4];
#pragma unroll
                    for (int b = 0; b < 4; ++b)
                        words[b] = narrow_pair<bf16>(sum[16 * i + 4 * b + 2 * h],
                                                     sum[16 * i + 4 * b + 2 * h + 1]);
                    transpose_quad(words);
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        p[0][2 * b] = __uint_as_float(words[b] << 16);
                        p[0][2 * b + 1] = __uint_as_float(words[b] & 0xFFFF0000);
                    }
                } else {
                    row_of_quad(p[0], sum, 4 * i, h);
                }
                s.store(n, tile.group, column + 32 * i, p, none);
            }
        }
    }
};

}  // namespace
