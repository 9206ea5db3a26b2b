// Grouped products of 16-bit matrices as they are in torch, both operands through shared memory to
// wgmma: fprop, dgrad and wgrad.
//
// One producer warpgroup fills a ring of stages. Rows that an index picks are copied 16 bytes at a
// time (`cp.async`): they are gathered while they are loaded, never permuted in memory. What lies
// in memory as it is needed is copied in boxes by the tensor memory accelerator. What lies outside
// of a matrix, or of a group whose rows are contracted, is not read: zeros are written in its
// place. So no row of another group enters a product, not even times zero. Two consumer warpgroups
// have half of a tile's rows each.
//
//     GroupedGemm  [M/g, k] x [G, n, k] or [G, k, n] -> [M/g, n]   fprop, dgrad
//     GroupedWgrad [M/g, n] x [M/g, k] -> [G, n, k]                wgrad, contracts the rows of
//     each group
//
// A_BOXES, B_BOXES say which operands are copied in boxes; else the maps are null. B_PACKED: the
// weight of a dgrad is stored in few bits, and the producer dequantizes it.
//
// Accumulators are exchanged among the four lanes that share rows, so that each has eight columns
// that follow each other of one row. Sums over a row's columns are stored for each N tile, and
// added in order by another kernel.
#pragma once

#include "gemm_tiles.cuh"
#include "tile_queue.cuh"
#include "timeline.cuh"

namespace {

constexpr int GEMM_CONSUMERS = 2, GEMM_PRODUCERS = 128;  // warpgroups; threads that copy

// The ring of stages and the queue of work tiles that both kernels have. A consumer warpgroup has
// HEIGHT * 64 rows of a tile, or, if the tile has only 64 rows, COLUMNS of its columns. COPIES:
// whether producer threads copy (cp.async); STORES: whether they also store numbers that they
// compute; BYTES_BESIDE: bytes of shared memory that the kernel needs in addition; Told: what the
// queue tells of a tile.
template <class Segment, int TILE_M, int TILE_N, int PRODUCERS, int BYTES_BESIDE, bool COPIES,
          bool STORES, class Told = i32>
struct GemmRing {
    static constexpr bool SHARES_ROWS = TILE_M == 64;
    static constexpr int HEIGHT = SHARES_ROWS ? 1 : TILE_M / (64 * GEMM_CONSUMERS),
                         COLUMNS = SHARES_ROWS ? TILE_N / GEMM_CONSUMERS : TILE_N;
    static constexpr bool BOXES = Segment::A_BOXES || Segment::B_BOXES;
    using Queue = TileQueue<8, Told>;
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
            mbarrier_init(empty[threadIdx.x], GEMM_CONSUMERS * 4);
        }
        queue.init(GEMM_CONSUMERS * 4 + PRODUCERS / 32);
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
                if (kb > 0) mbarrier_arrive(ring.empty[before]);
                before = now;
            }
            wgmma_wait<0>();
            if (k_blocks > 0) mbarrier_arrive(ring.empty[before]);
        }

        // Releases stages without multiplying: this warpgroup has no rows of the tile.
        __device__ __forceinline__ void skip(i32 k_blocks) {
            for (i32 kb = 0; kb < k_blocks; ++kb) {
                mbarrier_wait(ring.full[reading.stage], reading.parity);
                mbarrier_arrive(ring.empty[reading.stage]);
                reading.advance();
            }
        }
    };
};

// Consumer warpgroups come first, and take registers from the producers. FEW: whether accumulators
// are so few that nobody needs to give registers away.
template <bool DEQUANTIZES, bool FEW, class Consume, class Produce>
__device__ __forceinline__ void by_warpgroups(Consume consume, Produce produce) {
    if (threadIdx.x < 128 * GEMM_CONSUMERS) {
        if constexpr (!FEW) setmaxnreg_inc<DEQUANTIZES ? 192 : 208>();
        consume();
    } else {
        if constexpr (!FEW) setmaxnreg_dec<DEQUANTIZES ? 120 : 88>();
        produce();
    }
}

// fprop and dgrad
// -------------------------------------------------------------------------------------------------

template <class Segment, int TILE_M, int TILE_N>
struct GroupedGemm {
    using T = typename Segment::Activation;
    static constexpr int TILE_COLUMNS = TILE_N / Segment::COLUMNS_PER_RESULT;  // of a result
    static constexpr int N_TILES = (Segment::WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS;
    using Runs = typename WeightTiles<Segment, TILE_N, 128>::Runs;
    static constexpr int K_BLOCKS = Runs::COUNT * Runs::BLOCKS;
    using TileScheduler = ::TileScheduler<Segment::GROUPS, TILE_M, 1>;
    using WorkTiles = typename TileScheduler::WorkTiles;
    static constexpr bool COPIES = !Segment::A_BOXES || !(Segment::B_BOXES || Segment::B_PACKED);
    static constexpr int WARPGROUPS = Segment::B_PACKED && TILE_M == 64 ? 2 : 1;  // of producers
    static constexpr int PRODUCERS = COPIES || Segment::B_PACKED ? WARPGROUPS * GEMM_PRODUCERS : 32;
    using Weight = WeightTiles<Segment, TILE_N, PRODUCERS>;
    using Ring = GemmRing<Segment, TILE_M, TILE_N, PRODUCERS, sizeof(TileScheduler), COPIES,
                          Segment::B_PACKED>;
    using Stage = typename Ring::Stage;
    static_assert(TILE_COLUMNS % 32 == 0, "four lanes have eight columns each");
    static_assert(!Ring::SHARES_ROWS || Segment::COLUMNS_PER_RESULT == 1,
                  "a consumer has all columns that a result reads");

    struct Shared {
        Ring ring;
        TileScheduler scheduler;
    };
    static_assert(sizeof(Shared) <= Segment::MAX_SHARED_BYTES &&
                  4 * sizeof(i32) * (Segment::GROUPS + 1) <= sizeof(Stage) * Ring::STAGES);

    __device__ static void run(const Segment& s, const TensorMap* a_map, const TensorMap* b_map) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        shared.ring.init();
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        i64* error = blockIdx.x == 0 ? s.error : nullptr;
        shared.scheduler.build(s.ends, i32(s.rows()), N_TILES, Segment::SIZE_CLASS, error,
                               reinterpret_cast<i32*>(shared.ring.stage));
        by_warpgroups<Segment::B_PACKED, Ring::SHARES_ROWS>(
            [&] { consume(s, shared); }, [&] { produce(s, shared, a_map, b_map); });
    }

  private:
    // Producers
    // ---------------------------------------------------------------------------------------------

    static constexpr int A_STEP = PRODUCERS / 8,
                         A_ROWS = TILE_M / A_STEP;  // of a thread, every A_STEP-th
    static constexpr u32 BOX_BYTES =
        (Segment::A_BOXES ? sizeof(Stage::a) : 0) + (Segment::B_BOXES ? sizeof(Stage::b) : 0);

    __device__ static void produce(const Segment& s, Shared& shared, const TensorMap* a_map,
                                   const TensorMap* b_map) {
        const i32 thread = threadIdx.x - 128 * GEMM_CONSUMERS, piece = thread % 8;
        if (thread >= PRODUCERS) return;
        typename Ring::Producer producer(shared.ring);
        typename Ring::Queue::Taker numbers(shared.ring.queue, s.tile_counter, thread == 0);
        Weight weight(s, thread);
        for (WorkTiles tiles(shared.scheduler); tiles.more(); tiles.go_to(numbers.next())) {
            const WorkTile tile = tiles.current();
            if (tile.m_tile.group == Segment::GROUPS) continue;  // rows of no group
            i32 row[Segment::A_BOXES ? 1 : A_ROWS];
            if constexpr (!Segment::A_BOXES) {
                i64 index[A_ROWS] = {};  // all are read before any is needed
                const i32 first = tile.m_tile.first + thread / 8;
#pragma unroll
                for (int i = 0; i < A_ROWS; ++i)
                    if (first + A_STEP * i < tile.m_tile.end)
                        index[i] = s.a_index(first + A_STEP * i);
#pragma unroll
                for (int i = 0; i < A_ROWS; ++i)
                    row[i] = first + A_STEP * i < tile.m_tile.end ? i32(s.a_row_of(index[i])) : -1;
            }
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
                    if constexpr (Segment::B_BOXES) copy_b(stage, tile, *b_map, kb, barrier);
                }
                if constexpr (!Segment::A_BOXES) {
                    const u32 to = shared_address(stage.a);
#pragma unroll
                    for (int i = 0; i < A_ROWS; ++i) {
                        const u32 place = to + swizzled(thread / 8 + A_STEP * i, piece);
                        copy_piece<Segment::K>(place, s.a_matrix(), row[i], k + 8 * piece,
                                               row[i] >= 0);
                    }
                }
                weight.copy(runs, shared_address(stage.b), kb);
                producer.close(true);
            }
            producer.finish();
        }
    }

    // Boxes of rows [n, k], as many as follow each other, or of 64 columns [k, n].
    __device__ static __forceinline__ void copy_b(Stage& stage, const WorkTile& tile,
                                                  const TensorMap& map, i32 kb, u64& barrier) {
        constexpr int EACH = Segment::B_MN ? 64 : Segment::BOX_ROWS;
        const u32 to = shared_address(stage.b);
#pragma unroll
        for (int c = 0; c < TILE_N; c += EACH) {
            const i32 n =
                Segment::column(c / TILE_COLUMNS, tile.n_tile * TILE_COLUMNS + c % TILE_COLUMNS);
            if constexpr (Segment::B_MN)
                copy_box(to + c / 64 * PIECE_BYTES, map, n, kb * GEMM_K_BLOCK, tile.m_tile.group,
                         barrier);
            else
                copy_box(to + c * TILE_ROW_BYTES, map, kb * GEMM_K_BLOCK, n, tile.m_tile.group,
                         barrier);
        }
    }

    // Consumers
    // ---------------------------------------------------------------------------------------------

    __device__ static void consume(const Segment& s, Shared& shared) {
        const int consumer = threadIdx.x / 128;
        typename Ring::Consumer mainloop(shared.ring);
        typename Ring::Queue::Reader numbers(shared.ring.queue);
        for (WorkTiles tiles(shared.scheduler); tiles.more(); tiles.go_to(numbers.next())) {
            const WorkTile tile = tiles.current();
            const i32 first = tile.m_tile.first + (Ring::SHARES_ROWS ? 0 : 64 * consumer);
            const bool grouped = tile.m_tile.group < Segment::GROUPS;
            if (first >= tile.m_tile.end) {
                if (grouped) mainloop.skip(K_BLOCKS);
                continue;
            }
            mark_tile(threadIdx.x % 128 == 0, false);
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
                    for (int c = 0; c < Ring::COLUMNS / 2; ++c) sum[0][c] *= factor;
                }
            }
            using Part = GemmPart<Segment, TILE_N, Ring::COLUMNS>;
            if constexpr (Segment::ADDED > 0) {
                if (grouped) Part::add(s, tile, first, sum[0], consumer);
            }
            Part::store(s, tile, first, sum[0], consumer);
            mark_tile(threadIdx.x % 128 == 0, true);
        }
    }
};

// wgrad
// -------------------------------------------------------------------------------------------------

// a [M/g, N] and b [M/g, K]. What is gathered is best the one of which a tile has 128 columns. Of
// operands with few columns, which adapters have, a tile has 64.
template <class Segment, int TILE_M, int TILE_N>
struct GroupedWgrad {
    using T = typename Segment::Activation;
    using Tile = WgradTile<Segment, TILE_M, TILE_N>;
    using Scheduler = WgradScheduler<Segment::GROUPS>;
    static constexpr i32 WORK_TILES = Segment::GROUPS * Tile::EACH_GROUP;
    template <int COLUMNS>
    using Copies = RowCopies<COLUMNS, GEMM_PRODUCERS>;
    using Ring =
        GemmRing<Segment, TILE_M, TILE_N, GEMM_PRODUCERS, int(sizeof(Scheduler)), true, false>;
    using Stage = typename Ring::Stage;

    struct Shared {
        Ring ring;
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
        by_warpgroups<false, false>([&] { consume(s, shared); },
                                    [&] { produce(s, shared, a_map, b_map); });
    }

  private:
    // begin(kb) of each block in turn, then the known row: where an index picks it. The index is
    // read for AHEAD blocks at a time, while those before are copied: reading takes as long as a
    // block or two. Nothing is computed from it before it is needed, which would wait for memory,
    // not even a wider number.
    template <int COLUMNS, class Index, class Find, class Safe>
    struct Picked {
        static constexpr int AHEAD = 4;
        const Tile& tile;
        Find find;
        Safe safe;
        i32 thread;
        Index now[AHEAD], next[AHEAD];
        i32 known;

        __device__ __forceinline__ Picked(const Tile& tile_, Find find_, Safe safe_, i32 thread_)
            : tile(tile_), find(find_), safe(safe_), thread(thread_) {
            if (tile.first < tile.end) read(0);
        }

        __device__ __forceinline__ i32 row(i32) const { return known; }

        __device__ __forceinline__ void begin(i32 kb) {
            if (kb % AHEAD == 0) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) now[i] = next[i];
                read(kb + AHEAD);
            }
            Index index = now[0];
#pragma unroll
            for (int i = 1; i < AHEAD; ++i) index = kb % AHEAD == i ? now[i] : index;
            known = Copies<COLUMNS>::known_row(tile.first, kb, thread) < tile.end ? i32(safe(index))
                                                                                  : -1;
        }

        __device__ __forceinline__ void read(i32 kb) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const i32 m = Copies<COLUMNS>::known_row(tile.first, kb + i, thread);
                next[i] = Index(find(min(m, tile.end - 1)));
            }
        }
    };

    // The same where rows follow each other.
    template <int COLUMNS>
    struct Following {
        const Tile& tile;
        i32 thread;

        __device__ __forceinline__ void begin(i32) {}
        __device__ __forceinline__ i32 row(i32 kb) const {
            const i32 m = Copies<COLUMNS>::known_row(tile.first, kb, thread);
            return m < tile.end ? m : -1;
        }
    };

    template <int COLUMNS, bool BOXES, class Index, class Find, class Safe>
    __device__ static __forceinline__ auto rows_of(const Tile& tile, Find find, Safe safe,
                                                   i32 thread) {
        if constexpr (BOXES)
            return Following<COLUMNS>{tile, thread};
        else
            return Picked<COLUMNS, Index, Find, Safe>(tile, find, safe, thread);
    }

    // A group's last block, unless it is whole, is copied row by row: a box would have rows of the
    // next group.
    __device__ static void produce(const Segment& s, Shared& shared, const TensorMap* a_map,
                                   const TensorMap* b_map) {
        constexpr bool A = Segment::A_BOXES, B = Segment::B_BOXES;
        constexpr u32 BYTES = (A ? sizeof(Stage::a) : 0) + (B ? sizeof(Stage::b) : 0);
        const i32 thread = threadIdx.x - 128 * GEMM_CONSUMERS;
        typename Ring::Producer producer(shared.ring);
        typename Ring::Queue::Taker numbers(shared.ring.queue, s.tile_counter, thread == 0);
        for (i32 number = blockIdx.x; number < WORK_TILES; number = numbers.next()) {
            const Tile tile(shared.scheduler, number);
            auto a_rows = rows_of<TILE_M, A, typename Segment::AIndex>(
                tile, [&](i32 m) { return s.a_index(m); }, [&](i64 i) { return s.a_row_of(i); },
                thread);
            auto b_rows = rows_of<TILE_N, B, typename Segment::BIndex>(
                tile, [&](i32 m) { return s.b_index(m); }, [&](i64 i) { return s.b_row_of(i); },
                thread);
#pragma unroll 1
            for (i32 kb = 0; kb < tile.k_blocks(); ++kb) {
                const i32 m = tile.first + kb * GEMM_K_BLOCK;
                const bool whole = m + GEMM_K_BLOCK <= tile.end;
                a_rows.begin(kb), b_rows.begin(kb);
                Stage& stage = producer.open();
                const u32 to_a = shared_address(stage.a), to_b = shared_address(stage.b);
                if ((A || B) && thread == 0) {
                    u64& barrier = producer.expect(whole ? BYTES : 0);
                    if (A && whole) copy_boxes<TILE_M>(to_a, *a_map, tile.a, m, barrier);
                    if (B && whole) copy_boxes<TILE_N>(to_b, *b_map, tile.b, m, barrier);
                }
                if (!A || !whole)
                    Copies<TILE_M>::template copy<Segment::N>(to_a, s.a_matrix(), a_rows.row(kb),
                                                              tile.a, thread);
                if (!B || !whole)
                    Copies<TILE_N>::template copy<Segment::K>(to_b, s.b_matrix(), b_rows.row(kb),
                                                              tile.b, thread);
                producer.close(!A || !B || !whole);
            }
            producer.finish();
        }
    }

    template <int TILE>
    __device__ static __forceinline__ void copy_boxes(u32 to, const TensorMap& map, i32 column,
                                                      i32 m, u64& barrier) {
#pragma unroll
        for (int c = 0; c < TILE; c += 64)
            copy_box(to + c / 64 * PIECE_BYTES, map, column + c, m, barrier);
    }

    __device__ static void consume(const Segment& s, Shared& shared) {
        const int consumer = threadIdx.x / 128;
        typename Ring::Consumer mainloop(shared.ring);
        typename Ring::Queue::Reader numbers(shared.ring.queue);
        for (i32 number = blockIdx.x; number < WORK_TILES; number = numbers.next()) {
            mark_tile(threadIdx.x % 128 == 0, false);
            const Tile tile(shared.scheduler, number);
            float sum[Ring::HEIGHT][Ring::COLUMNS / 2] = {};
            mainloop.template multiply<T, true, true>(sum, tile.k_blocks(), consumer);
            const i32 first = Ring::SHARES_ROWS ? 0 : 64 * Ring::HEIGHT * consumer,
                      column = Ring::SHARES_ROWS ? Ring::COLUMNS * consumer : 0;
#pragma unroll
            for (int r = 0; r < Ring::HEIGHT; ++r)
                store_wgrad<Ring::COLUMNS>(s, tile.group,
                                           tile.a + first + 64 * r + threadIdx.x / 32 % 4 * 16,
                                           tile.b + column, sum[r]);
            mark_tile(threadIdx.x % 128 == 0, true);
        }
    }
};

}  // namespace
