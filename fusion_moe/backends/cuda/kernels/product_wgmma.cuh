// Grouped products by wgmma, both operands through shared memory: what runs the policies of
// product.cuh, and those of 16-bit matrices as they are in torch.
//
// One producer warpgroup fills a ring of stages. Rows that an index picks are copied 16 bytes at a
// time (`cp.async`): they are gathered while they are loaded, never permuted in memory. What lies
// in memory as it is needed is copied in boxes by the tensor memory accelerator. Two consumer
// warpgroups have half of a tile's rows each.
//
//     GroupedGemm  [M/g, k] x [G, n, k] or [G, k, n] -> [M/g, n]   fprop, dgrad
//     GroupedWgrad [M/g, n] x [M/g, k] -> [G, n, k]                wgrad, contracts the rows of
//     each group
//
// A_BOXES, B_BOXES say which operands are copied in boxes; else the maps are null. B_PACKED: the
// weight of a dgrad is stored in few bits, and the producer dequantizes it.
#pragma once

#include "product.cuh"
#include "tile_queue.cuh"
#include "timeline.cuh"

namespace {

constexpr int GEMM_CONSUMERS = 2, GEMM_PRODUCERS = 128;  // warpgroups; threads that copy

// The ring of stages and the queue of work tiles that both kernels have. A consumer warpgroup has
// HEIGHT * 64 rows of a tile, or, if the tile has only 64 rows, COLUMNS of its columns. COPIES:
// whether producer threads copy (cp.async); STORES: whether they also store numbers that they
// compute; BOXES: whether one of them copies boxes; BYTES_BESIDE: bytes of shared memory that the
// kernel needs in addition; Queue: how blocks get work tiles; CLUSTER: blocks whose consumers read
// each stage.
template <class Segment, int TILE_M, int TILE_N, int PRODUCERS_, int BYTES_BESIDE, bool COPIES,
          bool STORES, bool BOXES, class Queue_ = TileQueue<8>, int CLUSTER_ = 1>
struct GemmRing {
    static constexpr int PRODUCERS = PRODUCERS_, CLUSTER = CLUSTER_;
    static constexpr bool SHARES_ROWS = TILE_M == 64;
    static constexpr int HEIGHT = SHARES_ROWS ? 1 : TILE_M / (64 * GEMM_CONSUMERS),
                         COLUMNS = SHARES_ROWS ? TILE_N / GEMM_CONSUMERS : TILE_N;
    using Queue = Queue_;
    struct alignas(1024) Stage {
        u8 a[TILE_M * TILE_ROW_BYTES], b[TILE_N * TILE_ROW_BYTES];
    };
    static constexpr int BESIDE = BYTES_BESIDE + int(sizeof(Queue)) + 1024;  // bytes
    static constexpr int FIT =
        (Segment::MAX_SHARED_BYTES - BESIDE) / int(sizeof(Stage) + 2 * sizeof(u64));
    static constexpr int STAGES = FIT < 6 ? FIT : 6;
    static_assert(STAGES >= 2, "two stages at least");
    static_assert(SHARES_ROWS || HEIGHT * 64 * GEMM_CONSUMERS == TILE_M, "consumers have all rows");
    static_assert(HEIGHT * COLUMNS <= 256, "accumulators are at most 128 registers");

    Stage stage[STAGES];
    u64 full[STAGES], empty[STAGES];
    Queue queue;

    __device__ __forceinline__ void init() {
        if (threadIdx.x < STAGES) {
            mbarrier_init(full[threadIdx.x], 0,
                          (COPIES || STORES ? PRODUCERS : 0) + (BOXES ? 1 : 0));
            mbarrier_init(empty[threadIdx.x], CLUSTER * GEMM_CONSUMERS * 4);
            if constexpr (CLUSTER > 1) fence_mbarrier_init();
        }
        queue.init(GEMM_CONSUMERS * 4 + PRODUCERS / 32);
    }

    // By a consumer's warp, which has read a stage that producers of the whole cluster write to.
    __device__ __forceinline__ void release(u32 of) {
        if constexpr (CLUSTER == 1) mbarrier_arrive(empty[of]);
#pragma unroll
        for (u32 rank = 0; CLUSTER > 1 && rank < CLUSTER; ++rank)
            mbarrier_arrive_read(rank, empty[of]);
    }

    // A producer thread's view of the ring: it acquires a stage, copies, and commits it.
    struct Producer {
        GemmRing& ring;
        PipelineState<STAGES> filling;

        __device__ __forceinline__ explicit Producer(GemmRing& ring_) : ring(ring_) {
            filling.parity = 1;
        }

        __device__ __forceinline__ Stage& open() {
            mbarrier_wait(ring.empty[filling.stage], filling.parity);
            return ring.stage[filling.stage];
        }

        // The barrier at which boxes arrive; one thread says how many bytes to expect.
        __device__ __forceinline__ u64& expect(u32 bytes) {
            mbarrier_arrive_expect_bytes(ring.full[filling.stage], bytes);
            return ring.full[filling.stage];
        }

        // wrote: whether threads wrote to the stage.
        __device__ __forceinline__ void close(bool wrote) {
            if constexpr (COPIES) cp_async_commit();
            filling.advance();
            if constexpr (COPIES || STORES) {
                ++waiting;
                if (!wrote && waiting == 1)
                    arrive<false>();
                else if (waiting > LAG)
                    cp_async_wait<LAG>(), arrive<true>();
            }
        }

        // All stages so far are full once boxes are there too.
        __device__ __forceinline__ void finish() {
            if constexpr (COPIES) cp_async_wait<0>();
            while (waiting > 0) arrive<true>();
        }

      private:
        // Copies of a stage are waited for when so many more have begun.
        static constexpr int LAG = !COPIES ? 0 : STAGES > 3 ? 2 : 1;
        int waiting = 0;  // stages that this thread has not arrived at
        PipelineState<STAGES> arriving;

        // The fence is between what this thread has written and the tensor cores, which read by
        // another proxy.
        template <bool WROTE>
        __device__ __forceinline__ void arrive() {
            if constexpr (WROTE) fence_proxy_async();
            mbarrier_arrive_thread(ring.full[arriving.stage]);
            arriving.advance();
            --waiting;
        }
    };

    // What a consumer warpgroup does: the products of `k_blocks` stages. A_MN, B_MN: how tiles lie.
    struct Consumer {
        GemmRing& ring;
        PipelineState<STAGES> reading;

        __device__ __forceinline__ explicit Consumer(GemmRing& ring_) : ring(ring_) {}

        template <class T, bool A_MN, bool B_MN>
        __device__ __forceinline__ void multiply(float (&sum)[HEIGHT][COLUMNS / 2], i32 k_blocks,
                                                 int consumer) {
            u32 before = 0;
#pragma unroll 1
            for (i32 kb = 0; kb < k_blocks; ++kb) {
                const u32 now = reading.stage;
                mbarrier_wait(ring.full[now], reading.parity);
                reading.advance();
                constexpr u32 ROWS_64 = A_MN ? PIECE_BYTES : 64 * TILE_ROW_BYTES,
                              COLUMNS_64 = B_MN ? PIECE_BYTES : 64 * TILE_ROW_BYTES;
                u32 a = shared_address(ring.stage[now].a), b = shared_address(ring.stage[now].b);
                if constexpr (SHARES_ROWS)
                    b += consumer * (COLUMNS / 64) * COLUMNS_64;
                else
                    a += consumer * HEIGHT * ROWS_64;
                const u64 a_tile = A_MN ? tile_descriptor_mn<PIECE_BYTES>(a) : tile_descriptor(a);
                const u64 b_tile = B_MN ? tile_descriptor_mn<PIECE_BYTES>(b) : tile_descriptor(b);
                wgmma_fence();
#pragma unroll
                for (int v = 0; v < GEMM_K_BLOCK / 16; ++v) {
#pragma unroll
                    for (int r = 0; r < HEIGHT; ++r) {
                        const u64 a_rows = a_tile + (ROWS_64 >> 4) * r + (A_MN ? 128 : 2) * v;
                        wgmma_shared<T, COLUMNS, A_MN, B_MN>(sum[r], a_rows,
                                                             b_tile + (B_MN ? 128 : 2) * v);
                    }
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (kb > 0) ring.release(before);
                before = now;
            }
            wgmma_wait<0>();
            if (k_blocks > 0) ring.release(before);
        }

        // The same of e4m3 codes, as PARTS products of 64 rows and 128 columns. The sums of the
        // tensor cores have some 14 bits: those of a stage are multiplied by scales, and added to
        // sums in float32. Promote: a_row(i), b_row(i) of a part in the tiles; before(i) loads
        // scales, meanwhile(i) too, while products run; factor(c) of the c-th sum. keeps_last:
        // whether the last stage is not released.
        template <int PARTS, class Promote>
        __device__ __forceinline__ void multiply_codes(float (&sum)[PARTS][64], i32 k_blocks,
                                                       Promote promote, bool keeps_last = false) {
#pragma unroll 1
            for (i32 kb = 0; kb < k_blocks; ++kb) {
                const bool last = keeps_last && kb == k_blocks - 1;
                mbarrier_wait(ring.full[reading.stage], reading.parity);
                const Stage& stage = ring.stage[reading.stage];
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
                    const u64 rows = tile_descriptor(shared_address(stage.a) +
                                                     promote.a_row(i) * TILE_ROW_BYTES),
                              columns = tile_descriptor(shared_address(stage.b) +
                                                        promote.b_row(i) * TILE_ROW_BYTES);
                    float part[64];
                    promote.before(i, reading.stage);
                    wgmma_fence();
                    wgmma_e4m3<false>(part, rows, columns);
#pragma unroll
                    for (int v = 1; v < TILE_ROW_BYTES / 32; ++v)
                        wgmma_e4m3<true>(part, rows + 2 * v, columns + 2 * v);
                    wgmma_commit();
                    promote.meanwhile(i, reading.stage);
                    wgmma_wait<0>();
                    if (i == PARTS - 1 && !last) ring.release(reading.stage);
#pragma unroll
                    for (int c = 0; c < 64; ++c)
                        sum[i][c] = fmaf(part[c], promote.factor(c), sum[i][c]);
                }
                if (!last) reading.advance();
            }
        }

        // Releases stages without multiplying: this warpgroup has no rows of the tile.
        __device__ __forceinline__ void skip(i32 k_blocks) {
            for (i32 kb = 0; kb < k_blocks; ++kb) {
                mbarrier_wait(ring.full[reading.stage], reading.parity);
                ring.release(reading.stage);
                reading.advance();
            }
        }
    };
};

// What a producer thread has, and what a consumer warpgroup has.
template <class Segment, class Shared, class Ring>
struct Producing {
    const Segment& s;
    Shared& shared;
    const TensorMap *const a_map, *const b_map;
    const i32 thread;
    typename Ring::Producer producer{shared.ring};

    __device__ __forceinline__ void finish() const {}
};
template <class Segment, class Shared, class Ring>
struct Consuming {
    const Segment& s;
    Shared& shared;
    const i32 consumer;
    typename Ring::Consumer mainloop{shared.ring};
};

// A kernel: by all threads. Consumer warpgroups come first, and take registers from the producers.
// A Product has, beside its Schedule and Ring,
//
//     Shared                                     ring, scheduler and what else is shared
//     CONSUMER_REGISTERS, PRODUCER_REGISTERS     0: accumulators are so few that nobody gives away
//     Copies<Base>: copy(tile), finish()         Base: Producing; finish: past the last tile
//     Sums<Base>: compute(tile)                  Base: Consuming
template <class Product, class Segment>
__device__ __forceinline__ void run(const Segment& s, const TensorMap* a_map,
                                    const TensorMap* b_map) {
    extern __shared__ __align__(1024) u8 memory[];
    using Ring = typename Product::Ring;
    using Schedule = typename Product::Schedule;
    using Tile = typename Schedule::Tile;
    using Shared = typename Product::Shared;
    auto& shared = *reinterpret_cast<Shared*>(memory);
    static_assert(sizeof(shared) <= Segment::MAX_SHARED_BYTES);
    static_assert(4 * sizeof(i32) * (Segment::GROUPS + 1) <= sizeof(shared.ring.stage));
    shared.ring.init();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    Schedule::build(s, shared.scheduler, reinterpret_cast<i32*>(shared.ring.stage));
    // barriers of the other blocks are there
    if constexpr (Ring::CLUSTER > 1) cluster_arrive(), cluster_wait();
    constexpr bool TRADES = Product::CONSUMER_REGISTERS > 0;
    if (threadIdx.x < 128 * GEMM_CONSUMERS) {
        if constexpr (TRADES) setmaxnreg_inc<Product::CONSUMER_REGISTERS>();
        using Base = Consuming<Segment, Shared, Ring>;
        typename Product::template Sums<Base> sums{{s, shared, i32(threadIdx.x / 128)}};
        typename Ring::Queue::Reader(shared.ring.queue)
            .template for_all<Schedule>(shared.scheduler, [&](const Tile& tile) {
                mark_tile(threadIdx.x % 128 == 0, false);
                sums.compute(tile);
                mark_tile(threadIdx.x % 128 == 0, true);
            });
    } else {
        if constexpr (TRADES) setmaxnreg_dec<Product::PRODUCER_REGISTERS>();
        const i32 thread = threadIdx.x - 128 * GEMM_CONSUMERS;
        if (thread < Ring::PRODUCERS) {
            using Base = Producing<Segment, Shared, Ring>;
            typename Product::template Copies<Base> copies{{s, shared, a_map, b_map, thread}};
            typename Ring::Queue::Taker(shared.ring.queue, s, thread == 0)
                .template for_all<Schedule>(shared.scheduler,
                                            [&](const Tile& tile) { copies.copy(tile); });
            copies.finish();
        }
    }
    // the others still write to this block's memory
    if constexpr (Ring::CLUSTER > 1) __syncwarp(), cluster_arrive(), cluster_wait();
}

// fprop and dgrad
// -------------------------------------------------------------------------------------------------

template <class Segment, int TILE_M, int TILE_N>
struct GroupedGemm {
    using T = typename Segment::Activation;
    using Schedule = FpropSchedule<Segment, TILE_M, TILE_N>;
    using Tile = WorkTile;
    using Runs = typename WeightTiles<Segment, TILE_N, 128>::Runs;
    static constexpr int TILE_COLUMNS = Schedule::TILE_COLUMNS;
    static constexpr int K_BLOCKS = Runs::COUNT * Runs::BLOCKS;
    static constexpr bool COPIES = !Segment::A_BOXES || !(Segment::B_BOXES || Segment::B_PACKED);
    static constexpr int WARPGROUPS = Segment::B_PACKED && TILE_M == 64 ? 2 : 1;  // of producers
    static constexpr int PRODUCERS = COPIES || Segment::B_PACKED ? WARPGROUPS * GEMM_PRODUCERS : 32;
    using Ring = GemmRing<Segment, TILE_M, TILE_N, PRODUCERS, sizeof(typename Schedule::Scheduler),
                          COPIES, Segment::B_PACKED, Segment::A_BOXES || Segment::B_BOXES>;
    using Stage = typename Ring::Stage;
    static constexpr int CONSUMER_REGISTERS = Ring::SHARES_ROWS   ? 0
                                              : Segment::B_PACKED ? 192
                                                                  : 208,
                         PRODUCER_REGISTERS = Segment::B_PACKED ? 120 : 88;
    static_assert(TILE_COLUMNS % 32 == 0, "four lanes have eight columns each");
    static_assert(!Ring::SHARES_ROWS || Segment::COLUMNS_PER_RESULT == 1,
                  "a consumer has all columns that a result reads");

    struct Shared {
        Ring ring;
        typename Schedule::Scheduler scheduler;
    };

    template <class Base>
    struct Copies : Base {
        using Base::s, Base::thread, Base::producer, Base::a_map, Base::b_map;
        static constexpr u32 BOX_BYTES =
            (Segment::A_BOXES ? sizeof(Stage::a) : 0) + (Segment::B_BOXES ? sizeof(Stage::b) : 0);
        PickedRows<Segment, TILE_M, PRODUCERS> rows;
        WeightTiles<Segment, TILE_N, PRODUCERS> weight{s, thread};

        __device__ __forceinline__ void copy(const Tile& tile) {
            if (!Schedule::grouped(tile)) return;
            if constexpr (!Segment::A_BOXES) rows.begin(s, tile.m_tile, thread);
            const Runs runs(s, tile.m_tile.group);
            weight.begin(tile.m_tile.group, tile.n_tile);
#pragma unroll 1
            for (i32 kb = 0; kb < K_BLOCKS; ++kb) {
                Stage& stage = producer.open();
                const i32 k = runs.first_row(kb);
                if (BOX_BYTES > 0 && thread == 0) {
                    u64& barrier = producer.expect(BOX_BYTES);
                    if constexpr (Segment::A_BOXES)
                        copy_box(shared_address(stage.a), *a_map, k, tile.m_tile.first, barrier);
                    if constexpr (Segment::B_BOXES) copy_b(stage, tile, kb, barrier);
                }
                if constexpr (!Segment::A_BOXES)
                    rows.template copy<Segment::K>(shared_address(stage.a), s.a_matrix(), k,
                                                   thread);
                weight.copy(runs, shared_address(stage.b), kb);
                producer.close(true);
            }
            producer.finish();
        }

        // Boxes of rows [n, k], as many as follow each other, or of 64 columns [k, n].
        __device__ __forceinline__ void copy_b(Stage& stage, const Tile& tile, i32 kb,
                                               u64& barrier) const {
            constexpr int EACH = Segment::B_MN ? 64 : Segment::BOX_ROWS;
            const u32 to = shared_address(stage.b);
#pragma unroll
            for (int c = 0; c < TILE_N; c += EACH) {
                const i32 n = Segment::column(c / TILE_COLUMNS,
                                              tile.n_tile * TILE_COLUMNS + c % TILE_COLUMNS),
                          k = kb * GEMM_K_BLOCK;
                copy_box(to + (Segment::B_MN ? c / 64 * PIECE_BYTES : c * TILE_ROW_BYTES), *b_map,
                         Segment::B_MN ? n : k, Segment::B_MN ? k : n, tile.m_tile.group, barrier);
            }
        }
    };

    template <class Base>
    struct Sums : Base {
        using Base::s, Base::consumer, Base::mainloop;

        __device__ __forceinline__ void compute(const Tile& tile) {
            const i32 first = tile.m_tile.first + (Ring::SHARES_ROWS ? 0 : 64 * consumer);
            const bool grouped = Schedule::grouped(tile);
            if (first >= tile.m_tile.end) {
                if (grouped) mainloop.skip(K_BLOCKS);
                return;
            }
            float sum[1][Ring::COLUMNS / 2] = {};
            if constexpr (!Segment::B_PACKED) {
                mainloop.template multiply<T, false, Segment::B_MN>(sum, grouped ? K_BLOCKS : 0,
                                                                    consumer);
            } else if (grouped) {
                const Runs runs(s, tile.m_tile.group);
#pragma unroll 1
                for (int i = 0; i < Runs::COUNT; ++i) {
                    mainloop.template multiply<T, false, true>(sum, Runs::BLOCKS, consumer);
                    const float factor = runs.factor(i);
#pragma unroll
                    for (float& each : sum[0]) each *= factor;
                }
            }
            using Part = GemmPart<Segment, TILE_N, Ring::COLUMNS>;
            if constexpr (Segment::ADDED > 0) {
                if (grouped) Part::add(s, tile, first, sum[0], consumer);
            }
            Part::store(s, tile, first, sum[0], consumer);
        }
    };
};

// wgrad
// -------------------------------------------------------------------------------------------------

// a [M/g, N] and b [M/g, K]. What is gathered is best the one of which a tile has 128 columns. Of
// operands with few columns, which adapters have, a tile has 64.
template <class Segment, int TILE_M, int TILE_N>
struct GroupedWgrad {
    using Schedule = WgradSchedule<Segment, TILE_M, TILE_N>;
    using Tile = typename Schedule::Tile;
    static constexpr bool A = Segment::A_BOXES, B = Segment::B_BOXES;
    using Ring = GemmRing<Segment, TILE_M, TILE_N, GEMM_PRODUCERS,
                          int(sizeof(typename Schedule::Scheduler)), true, false, A || B>;
    using Stage = typename Ring::Stage;
    static constexpr int CONSUMER_REGISTERS = 208, PRODUCER_REGISTERS = 88;

    struct Shared {
        Ring ring;
        typename Schedule::Scheduler scheduler;
    };

    // A group's last block, unless it is whole, is copied row by row: a box would have rows of the
    // next group.
    template <class Base>
    struct Copies : Base {
        using Base::s, Base::thread, Base::producer, Base::a_map, Base::b_map;
        ARows<Segment, TILE_M, GEMM_PRODUCERS, !A, 4> a_rows{s, thread};
        BRows<Segment, TILE_N, GEMM_PRODUCERS, !B, 4> b_rows{s, thread};

        __device__ __forceinline__ void copy(const Tile& tile) {
            constexpr u32 BYTES = (A ? sizeof(Stage::a) : 0) + (B ? sizeof(Stage::b) : 0);
            a_rows.begin(tile.first, tile.end, tile.a), b_rows.begin(tile.first, tile.end, tile.b);
#pragma unroll 1
            for (i32 kb = 0; kb < Schedule::k_blocks(tile); ++kb) {
                const i32 m = tile.first + kb * GEMM_K_BLOCK;
                const bool whole = m + GEMM_K_BLOCK <= tile.end;
                a_rows.next(kb), b_rows.next(kb);
                Stage& stage = producer.open();
                const u32 to_a = shared_address(stage.a), to_b = shared_address(stage.b);
                if ((A || B) && thread == 0) {
                    u64& barrier = producer.expect(whole ? BYTES : 0);
                    if (A && whole) copy_boxes<TILE_M>(to_a, *a_map, tile.a, m, barrier);
                    if (B && whole) copy_boxes<TILE_N>(to_b, *b_map, tile.b, m, barrier);
                }
                if (!A || !whole) a_rows.copy(to_a, kb);
                if (!B || !whole) b_rows.copy(to_b, kb);
                producer.close(!A || !B || !whole);
            }
            producer.finish();
        }

        template <int TILE>
        __device__ static __forceinline__ void copy_boxes(u32 to, const TensorMap& map, i32 column,
                                                          i32 m, u64& barrier) {
#pragma unroll
            for (int c = 0; c < TILE; c += 64)
                copy_box(to + c / 64 * PIECE_BYTES, map, column + c, m, barrier);
        }
    };

    template <class Base>
    struct Sums : Base {
        using Base::s, Base::consumer, Base::mainloop;

        __device__ __forceinline__ void compute(const Tile& tile) {
            float sum[Ring::HEIGHT][Ring::COLUMNS / 2] = {};
            mainloop.template multiply<typename Segment::Activation, true, true>(
                sum, Schedule::k_blocks(tile), consumer);
            const i32 first = Ring::SHARES_ROWS ? 0 : 64 * Ring::HEIGHT * consumer,
                      column = Ring::SHARES_ROWS ? Ring::COLUMNS * consumer : 0;
#pragma unroll
            for (int r = 0; r < Ring::HEIGHT; ++r)
                store_wgrad<TILE_M, Ring::COLUMNS>(
                    s, tile.group, tile.a + first + 64 * r + threadIdx.x / 32 % 4 * 16,
                    tile.b + column, sum[r]);
        }
    };
};

}  // namespace
