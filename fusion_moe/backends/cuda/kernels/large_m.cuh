// Large-M grouped products. Producer warps copy packed weights and activations to shared memory.
// Consumer warpgroups load weights to registers, dequantize them to fragments there, and multiply
// them by tiles of activations in shared memory (wgmma). Copies, dequantizing and products overlap.
// docs/extend/large_m.md builds the kernel up in five levels.
//
// The kernel is persistent: a block loops over work tiles (schedule.cuh), each of up to TILE_M rows
// of a group and 64 * REPEATS * CONSUMERS rows of its matrix. The matrix is on the side of wgmma's
// 64 rows; the other side is as wide as the group's M tiles are high. Each of CONSUMERS warpgroups
// multiplies REPEATS times 64 rows of the matrix. Warpgroups share nothing but the ring of stages
// that producers fill: some dequantize while others keep the tensor cores busy, and one may store a
// finished work tile while others still multiply.
//
// Groups that are much heavier or lighter than others can be left to concurrent launches of other
// variants. Each launch computes a size class: the groups with more than above_rows and at most
// max_rows rows; the host does not know which they are. No launch needs what another computes, so
// none waits for the one before it. But the last block of each waits once it is done, so that
// whatever waits for the last launch waits for all.
//
// If there are fewer work tiles than multiprocessors, the SPLIT_K blocks of a cluster share each
// one: a block multiplies its part of K, and sends its sums to the block that stores them, which is
// a different one for each consumer warpgroup. Work tiles of a last wave that is not full are
// shared by consumer warpgroups of several blocks (waves.cuh).
//
// Activations are in fragment order (fragment_order.cuh), or row-major, which takes more
// instructions for each weight (weights/).
//
// A dgrad contracts the weight's rows: its tiles lie elsewhere, and fragments are transposed
// (stored_tiles.cuh). Everything else is the same.
#pragma once

#include "large_m_tile.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

namespace {

// Where a block of a cluster receives the partial sums of the other blocks, in the order of their
// registers, for the warpgroups whose results it stores.
template <int TILE_M, int CONSUMERS, int SPLIT_K>
struct Exchange {
    static constexpr int THREADS = 128,
                         OWNED = (CONSUMERS + SPLIT_K - 1) /
                                 SPLIT_K;  // of a warpgroup; warpgroups for which a block stores
    alignas(1024) float partials[OWNED][SPLIT_K - 1][TILE_M / 8][THREADS][4];
    u64 sent[OWNED], taken[CONSUMERS];  // the latter in the blocks that send

    // Called by one thread of the block, before a barrier of the cluster.
    __device__ __forceinline__ void init() {
        for (u64& barrier : sent) mbarrier_init(barrier, THREADS / 32 * (SPLIT_K - 1));
        for (u64& barrier : taken) mbarrier_init(barrier, THREADS / 32);
    }

    // Called by one warpgroup per block. Returns true in the owner block, where `sum` is now the
    // cluster's total; the others have only sent theirs. parity: tile count mod 2.
    __device__ __forceinline__ bool add_up(float (&sum)[TILE_M / 2], i32 tile_m, u32 parity) {
        const u32 warpgroup = threadIdx.x / THREADS, thread = threadIdx.x % THREADS,
                  owner = warpgroup % SPLIT_K, rank = cluster_rank();
        auto& from = partials[warpgroup / SPLIT_K];
        if (rank != owner) {
            mbarrier_wait_in_cluster(taken[warpgroup], parity ^ 1);
            const u32 to =
                in_block(owner, shared_address(from[rank < owner ? rank : rank - 1][0][thread]));
#pragma unroll
            for (int i = 0; i < TILE_M / 8; ++i)
                if (8 * i < tile_m) store_in_cluster(to + i * sizeof(from[0][0]), sum + 4 * i);
            mbarrier_arrive_in_block(owner, sent[warpgroup / SPLIT_K]);
            return false;
        }
        mbarrier_wait_in_cluster(sent[warpgroup / SPLIT_K], parity);
#pragma unroll 1
        for (int sender = 0; sender < SPLIT_K - 1; ++sender)
#pragma unroll
            for (int i = 0; i < TILE_M / 8; ++i) {
                if (8 * i >= tile_m) break;
                const float4 four = *reinterpret_cast<const float4*>(from[sender][i][thread]);
                sum[4 * i] += four.x, sum[4 * i + 1] += four.y, sum[4 * i + 2] += four.z,
                    sum[4 * i + 3] += four.w;
            }
        for (u32 other = 0; other < SPLIT_K; ++other)
            if (other != owner) mbarrier_arrive_in_block(other, taken[warpgroup]);
        return true;
    }
};

template <int TILE_M, int CONSUMERS>
struct Exchange<TILE_M, CONSUMERS, 1> {};

// K blocks of a stage.
template <class Reader>
constexpr int STAGE_K_BLOCKS_OF = Reader::ELEMENTS + Reader::SCALES < 1024 ? 2 : 1;

template <class Segment, int TILE_M, int CONSUMERS, int REPEATS>
using LargeMTileOf =
    LargeMTile<Segment, TILE_M, CONSUMERS, REPEATS, STAGE_K_BLOCKS_OF<typename Segment::Weights>,
               128, Segment::FRAGMENT_ORDER, true>;

template <class Segment, int TILE_M, int CONSUMERS, int REPEATS, int SPLIT_K = 1>
struct LargeM : LargeMTileOf<Segment, TILE_M, CONSUMERS, REPEATS> {
    using Tile = LargeMTileOf<Segment, TILE_M, CONSUMERS, REPEATS>;
    using Tile::ALL_K_BLOCKS, Tile::K_STEPS, Tile::N_TILES, Tile::REPEATS_PER_RESULT,
        Tile::WARPGROUP, Tile::WARPGROUP_WARPS, Tile::repeat_of, Tile::weight_tile_of;
    using typename Tile::Packed, typename Tile::RepeatWeights, typename Tile::Scales,
        typename Tile::SharedWeights, typename Tile::Tiles, typename Tile::Weights;
    static constexpr int PRODUCER_WARPS = 4, PRODUCERS = 32 * PRODUCER_WARPS;
    static constexpr int THREADS = WARPGROUP * CONSUMERS + PRODUCERS;
    // Producers give registers to consumers. Two repeats of high M tiles leave producers the
    // fewest, which suffice if tiles are equally spaced (see Weights).
    static constexpr int MIN_PRODUCER_REGISTERS = REPEATS > 1 && TILE_M > 32 ? 32 : 64;
    static constexpr int REGISTER_POOL = 65536 / THREADS / 8 * 8 * (CONSUMERS + 1);
    static constexpr int CONSUMER_REGISTERS =
        (REGISTER_POOL - MIN_PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
    static constexpr int PRODUCER_REGISTERS = REGISTER_POOL - CONSUMERS * CONSUMER_REGISTERS;
    static constexpr int K_BLOCKS = ALL_K_BLOCKS / SPLIT_K;  // of a block's part
    // Maximum parts per work tile. Splitting does not pay when K is small or there is one group.
    static constexpr int MOST_PARTS =
        SPLIT_K == 1 && Segment::GROUPS > 1 && ALL_K_BLOCKS >= 64 ? CONSUMERS : 1;
    static constexpr int STAGE_K_BLOCKS = STAGE_K_BLOCKS_OF<typename Segment::Weights>;
    static constexpr int UNROLL_K_BLOCKS =
        REPEATS == 1 ? 2 * STAGE_K_BLOCKS
                     : STAGE_K_BLOCKS;  // of the producers' loop, as registers last
    static constexpr int EPILOGUE_STAGES = REPEATS == 1 && K_BLOCKS > STAGE_K_BLOCKS
                                               ? 2
                                               : 1;  // that a consumer releases after its stores
    static constexpr int EPILOGUE_BUFFERS =
        REPEATS > 1 ? 2 : EPILOGUE_STAGES;  // in which it transposes: where its weights were
    static constexpr int RUNS = Scales::COUNT,
                         RUN_K_BLOCKS = K_BLOCKS / RUNS;  // of what is contracted
    static_assert(SPLIT_K == 1 || ALL_K_BLOCKS % (SPLIT_K * STAGE_K_BLOCKS) == 0,
                  "equal parts of whole stages");
    static_assert(SPLIT_K == 1 || (RUNS == 1 && REPEATS == 1),
                  "sums are exchanged once, of one repeat");
    static_assert(TILE_M % 16 == 0 && TILE_M <= 256,
                  "M tiles are transposed 16 rows at a time, and fit an instruction");

    struct alignas(1024) Stage {
        u8 activations[STAGE_K_BLOCKS][TILE_M * TILE_ROW_BYTES];
        RepeatWeights weights[CONSUMERS * REPEATS];
    };

    using TileScheduler = ::TileScheduler<Segment::GROUPS, TILE_M,
                                          Segment::GROUPS_READ_PER_TWO_TILES, SPLIT_K, MOST_PARTS>;
    using Exchange = ::Exchange<TILE_M, CONSUMERS, SPLIT_K>;
    static constexpr int EXCHANGE_BYTES = SPLIT_K > 1 ? sizeof(Exchange) : 0;

    // As many stages as fit. Producers publish which work tiles they load: each of these has at
    // least one stage, except one that they are about to begin.
    static constexpr int OTHER_BYTES =
        EXCHANGE_BYTES + int(sizeof(TileScheduler) + sizeof(WorkTile));
    static constexpr int STAGE_BYTES =
        Segment::MAX_SHARED_BYTES - OTHER_BYTES;  // left for all stages
    static constexpr int STAGES =
                             STAGE_BYTES / (sizeof(Stage) + 2 * sizeof(u64) + sizeof(WorkTile)),
                         WORK_SLOTS = STAGES + 1;

    struct Shared : Exchange {
        Stage stage[STAGES];
        WorkTile work_tiles[WORK_SLOTS];
        u64 full[STAGES], empty[STAGES];
        TileScheduler scheduler;
    };
    static_assert(sizeof(Shared) <= Segment::MAX_SHARED_BYTES);

    __device__ static void run(const Segment& s, const SizeClass& size_class) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        if (threadIdx.x < STAGES) {
            mbarrier_init(shared.full[threadIdx.x], PRODUCER_WARPS);
            mbarrier_init(shared.empty[threadIdx.x], WARPGROUP_WARPS * CONSUMERS);
        }
        if constexpr (SPLIT_K > 1) {
            if (threadIdx.x == 0) shared.Exchange::init();
            cluster_arrive();
        }
        if (!size_class.reads_before_wait) griddepcontrol_wait();
        i64* error = blockIdx.x == 0 ? s.error : nullptr;
        shared.scheduler.build(s.partition(), i32(s.rows()), N_TILES, size_class, error,
                               reinterpret_cast<i32*>(shared.stage));
        if (size_class.reads_before_wait && !size_class.concurrent_with_previous)
            griddepcontrol_wait();
        if (size_class.concurrent_with_next) griddepcontrol_launch_dependents();
        if constexpr (SPLIT_K > 1) cluster_wait();  // barriers of other blocks are there
        if (threadIdx.x < WARPGROUP * CONSUMERS) {
            // Each thread of two warpgroups may have all registers that an instruction can name.
            if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
            consume(s, shared);
        } else {
            if constexpr (CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
            produce(s, shared);
        }
        griddepcontrol_launch_dependents();
        if (size_class.concurrent_with_previous && blockIdx.x == gridDim.x - 1)
            griddepcontrol_wait();
        if constexpr (SPLIT_K > 1)
            cluster_arrive(), cluster_wait();  // others still write to this block's memory
    }

  private:
    using WorkTiles = typename TileScheduler::WorkTiles;
    // Producers
    // ---------------------------------------------------------------------------------------------

    // The activations of a work tile. A thread copies 16 bytes of every ROWS_PER_STEP-th row.
    struct Activations {
        static constexpr int ROWS_PER_STEP = PRODUCERS / (TILE_ROW_BYTES / 16),
                             ROW_STEPS = (TILE_M + ROWS_PER_STEP - 1) / ROWS_PER_STEP;
        const u8* row[ROW_STEPS];
        i32 row_steps;
        bool last;  // whether the thread has a row in the last step

        __device__ __forceinline__ void open(const Segment& s, const WorkTile& work_tile,
                                             i32 thread) {
            const i32 mine = thread / (TILE_ROW_BYTES / 16);
            row_steps = (work_tile.tile_m + ROWS_PER_STEP - 1) / ROWS_PER_STEP;
            last = mine + ROWS_PER_STEP * (row_steps - 1) < work_tile.tile_m;
#pragma unroll
            for (int i = 0; i < ROW_STEPS; ++i) {
                // accumulators past the end are not stored
                const i32 m = min(work_tile.m_tile.first + mine + ROWS_PER_STEP * i,
                                  work_tile.m_tile.end - 1);
                if (i < row_steps)
                    row[i] =
                        reinterpret_cast<const u8*>(s.row(m)) + thread % (TILE_ROW_BYTES / 16) * 16;
            }
        }

        template <int Steps, int Blocks>
        __device__ __forceinline__ void copy(Stage& to, i32 thread, int kb) const {
            const u32 place =
                shared_address(to.activations) +
                swizzled(thread / (TILE_ROW_BYTES / 16), thread % (TILE_ROW_BYTES / 16));
#pragma unroll
            for (int i = 0; i < Steps; ++i)
#pragma unroll
                for (int b = 0; b < Blocks; ++b) {
                    const u32 to_row = place + (i * ROWS_PER_STEP + b * TILE_M) * TILE_ROW_BYTES;
                    if (i + 1 < Steps)
                        cp_async_16(to_row, row[i] + (kb + b) * TILE_ROW_BYTES);
                    else
                        cp_async_16(to_row, row[i] + (kb + b) * TILE_ROW_BYTES, last);
                }
        }

        template <int Steps>
        __device__ __forceinline__ void advance(i32 blocks) {
#pragma unroll
            for (int i = 0; i < Steps; ++i) row[i] += blocks * i32(TILE_ROW_BYTES);
        }
    };

    // The producers' view of the ring. A stage is signalled once its copies have arrived, which is
    // checked after the copies of the next stage have begun; a work tile's last stage is signalled
    // when the next work tile has been found, which takes as long. (A fence by the consumers
    // instead would wait for running products: 10 % on an H200.)
    struct ProducerPipeline {
        static_assert(
            STAGES >= 3,
            "one that is not committed yet, and one that is not released yet, leave one to fill");
        Shared& shared;
        PipelineState<STAGES> next, last;

        __device__ __forceinline__ Stage& acquire() {
            mbarrier_wait(shared.empty[next.stage], next.parity ^ 1);
            return shared.stage[next.stage];
        }

        // first: of a work tile.
        __device__ __forceinline__ void commit(bool first) {
            cp_async_commit();
            if (!first) signal<1>();
            next.advance();
        }

        // Signals the last stage of a work tile.
        __device__ __forceinline__ void commit_last() { signal<0>(); }

      private:
        template <int Pending>
        __device__ __forceinline__ void signal() {
            cp_async_wait<Pending>();
            fence_proxy_async();
            mbarrier_arrive(shared.full[last.stage]);
            last.advance();
        }
    };

    __device__ static __forceinline__ void produce(const Segment& s, Shared& shared) {
        const i32 thread = threadIdx.x % PRODUCERS;
        ProducerPipeline pipeline{shared};
        PipelineState<WORK_SLOTS> work_ring;
        WorkTiles work(shared.scheduler);
        for (; work.more_grouped(); work.advance(), work_ring.advance()) {
            const WorkTile work_tile = work.current();
            if (thread == 0) shared.work_tiles[work_ring.stage] = work_tile;
            if (!work.first()) pipeline.commit_last();
            Weights weights;
            weights.open(s, work_tile, thread);
            Activations rows;
            rows.open(s, work_tile, thread);
            load_work_tile<1>(Scales(s, work_tile.m_tile.group), weights, rows, pipeline, thread);
        }
        if (!work.first()) pipeline.commit_last();
    }

    // One loop for each number of steps has fewer instructions than a loop with a branch.
    template <int Steps>
    __device__ static __forceinline__ void load_work_tile(const Scales& scales, Weights& weights,
                                                          Activations& rows,
                                                          ProducerPipeline& pipeline, i32 thread) {
        if constexpr (Steps < Activations::ROW_STEPS) {
            if (rows.row_steps > Steps)
                return load_work_tile<Steps + 1>(scales, weights, rows, pipeline, thread);
        }
        if constexpr (SPLIT_K > 1) {
            const i32 first = i32(cluster_rank()) * K_BLOCKS;
            weights.advance(first), rows.template advance<Steps>(first);
        }
        i32 at = 0;  // the K block that the copies have come to
#pragma unroll 1
        for (int run = 0; run < RUNS; ++run) {
            if constexpr (RUNS > 1) {
                const i32 further = scales.first_k_block(run) - at;
                weights.advance(further), rows.template advance<Steps>(further);
                at += further + RUN_K_BLOCKS / UNROLL_K_BLOCKS * UNROLL_K_BLOCKS;
            }
            load_run<Steps>(weights, rows, pipeline, thread, run == 0);
        }
    }

    template <int Steps>
    __device__ static __forceinline__ void load_run(Weights& weights, Activations& rows,
                                                    ProducerPipeline& pipeline, i32 thread,
                                                    bool first) {
#pragma unroll 1
        for (i32 kb = 0; kb <= RUN_K_BLOCKS - UNROLL_K_BLOCKS; kb += UNROLL_K_BLOCKS) {
#pragma unroll
            for (int b = 0; b < UNROLL_K_BLOCKS; b += STAGE_K_BLOCKS)
                load_stage<Steps, STAGE_K_BLOCKS>(weights, rows, pipeline, thread, b,
                                                  first && kb + b == 0);
            weights.advance(UNROLL_K_BLOCKS), rows.template advance<Steps>(UNROLL_K_BLOCKS);
        }
        constexpr int LEFT = RUN_K_BLOCKS % UNROLL_K_BLOCKS,
                      HALF_STAGE = RUN_K_BLOCKS % STAGE_K_BLOCKS;
        if constexpr (LEFT >= STAGE_K_BLOCKS)
            load_stage<Steps, STAGE_K_BLOCKS>(weights, rows, pipeline, thread, 0,
                                              first && RUN_K_BLOCKS < UNROLL_K_BLOCKS);
        if constexpr (HALF_STAGE != 0)
            load_stage<Steps, HALF_STAGE>(weights, rows, pipeline, thread, LEFT - HALF_STAGE,
                                          first && RUN_K_BLOCKS < STAGE_K_BLOCKS);
    }

    template <int Steps, int Blocks>
    __device__ static __forceinline__ void load_stage(const Weights& weights,
                                                      const Activations& rows,
                                                      ProducerPipeline& pipeline, i32 thread,
                                                      int kb, bool first) {
        Stage& stage = pipeline.acquire();
        weights.template copy<Blocks>(stage.weights, thread, kb);
        rows.template copy<Steps, Blocks>(stage, thread, kb);
        pipeline.commit(first);
    }

    // Consumers
    // ---------------------------------------------------------------------------------------------

    __device__ static __forceinline__ void consume(const Segment& s, Shared& shared) {
        PipelineState<STAGES> ring;
        PipelineState<WORK_SLOTS> work_ring;
        WorkTiles work(shared.scheduler);
        u32 odd = 0;  // whether so many work tiles were before
        for (; work.more_grouped(); work.advance(), work_ring.advance(), odd ^= 1) {
            mbarrier_wait(shared.full[ring.stage], ring.parity);
            const WorkTile current = shared.work_tiles[work_ring.stage];
            // a vote: all of the warp agree
            if (MOST_PARTS > 1 &&
                !__any_sync(WHOLE_WARP, current.consumers >> threadIdx.x / WARPGROUP & 1)) {
                skip(shared, ring);
                continue;
            }
            mark_tile(threadIdx.x % WARPGROUP == 0, false);
            const Scales scales(s, current.m_tile.group);
            float outer[REPEATS]
                       [2];  // loaded while products run, not when the epilogue waits for them
#pragma unroll
            for (int h = 0; h < REPEATS; ++h)
                scales.of_lane(outer[h], current.n_tile, weight_tile_of(h), threadIdx.x % 32);
            float sum[REPEATS][TILE_M / 2] = {};
            Mainloop mainloop(shared, ring, current.tile_m);
            mainloop.run(sum, scales);
            const WorkTile work_tile =
                shared.work_tiles[work_ring.stage];  // registers are short while products run
            bool stores = true;
            if constexpr (SPLIT_K > 1) stores = shared.add_up(sum[0], work_tile.tile_m, odd);
#pragma unroll
            for (int h = 0; h < REPEATS; h += REPEATS_PER_RESULT)
                if (stores)
                    Tile::template store<EPILOGUE_BUFFERS>(sum + h, outer + h, s, mainloop,
                                                           work_tile, h);
#pragma unroll
            for (int i = 0; i < EPILOGUE_STAGES; ++i) mainloop.release();
            mark_tile(threadIdx.x % WARPGROUP == 0, true);
        }
        if (SPLIT_K > 1 && cluster_rank() != 0) return;
        for (; work.more(); work.advance())
            Tile::store_ungrouped_rows(s, work.current(), threadIdx.x);
    }

    // The stages of a work tile of which other blocks compute this consumer's columns.
    __device__ static __forceinline__ void skip(Shared& shared, PipelineState<STAGES>& ring) {
#pragma unroll 1
        for (i32 kb = 0; kb < K_BLOCKS; kb += STAGE_K_BLOCKS, ring.advance()) {
            mbarrier_wait(shared.full[ring.stage], ring.parity);
            mbarrier_arrive(shared.empty[ring.stage]);
        }
    }

    // The products of a work tile: for each K block a wgmma group with each repeat. Fragments for a
    // group are made while the one before runs.
    struct Mainloop {
        static constexpr int WGMMA_GROUPS = STAGE_K_BLOCKS * REPEATS;  // of a stage
        static constexpr int PREFETCHED =
            WGMMA_GROUPS > 1 ? 2 : 1;  // of these, in registers, not dequantized yet
        Shared& shared;
        PipelineState<STAGES>& ring;
        const i32 tile_m;
        const SharedWeights mine;  // of the weights of a repeat
        u32 next_to_release;       // a stage

        __device__ __forceinline__ Mainloop(Shared& shared, PipelineState<STAGES>& ring, i32 tile_m)
            : shared(shared),
              ring(ring),
              tile_m(tile_m),
              mine(Tiles::shared(repeat_of(0) * sizeof(RepeatWeights),
                                 repeat_of(0) * sizeof(RepeatWeights),
                                 threadIdx.x / 32 % WARPGROUP_WARPS, threadIdx.x % 32)),
              next_to_release(ring.stage) {}

        // sum[h][4 n + i]: rows r and r + 8 of the warp's tile in a repeat, and rows 8 n + 2 c, 8 n
        // + 2 c + 1 of activations. Multiplies by as many of these as are needed: only the
        // instruction differs; which one, all of the block agree.
        __device__ __forceinline__ void run(float (&sum)[REPEATS][TILE_M / 2],
                                            const Scales& scales) {
            if constexpr (TILE_M <= 80)
                run_unrolled<8, TILE_M>(sum, scales);
            else
                run_pipelined(sum, scales);
            wgmma_wait<0>();
            while (next_to_release != epilogue_stage(EPILOGUE_STAGES - 1)) release();
        }

        // The last stage that is not released yet, or the one before it. The consumer may overwrite
        // the part that had its own weights.
        __device__ __forceinline__ u32 epilogue_stage(int before) const {
            return ring.stage > before ? ring.stage - 1 - before : ring.stage + STAGES - 1 - before;
        }

        __device__ __forceinline__ u8* epilogue_buffer(int i) const {
            return reinterpret_cast<u8*>(&shared.stage[epilogue_stage(i % EPILOGUE_STAGES)]
                                              .weights[repeat_of(i / EPILOGUE_STAGES)]);
        }

        __device__ __forceinline__ void release() {
            mbarrier_arrive(shared.empty[next_to_release]);
            if (++next_to_release == STAGES) next_to_release = 0;
        }

      private:
        using Fragments = u32[K_STEPS][4];

        // Low M tiles: dequantizing takes longer than products. A loop for each height has fewer
        // instructions than one that branches.
        template <int Least, int Most>
        __device__ __forceinline__ void run_unrolled(float (&sum)[REPEATS][TILE_M / 2],
                                                     const Scales& scales) {
            if constexpr (Least < Most) {
                constexpr int MIDDLE = (Least + Most) / 16 * 8;
                if (tile_m <= MIDDLE)
                    run_unrolled<Least, MIDDLE>(sum, scales);
                else
                    run_unrolled<MIDDLE + 8, Most>(sum, scales);
            } else {
                Fragments fragments[2];
                Packed packed[PREFETCHED];
                const Stage* stage = &wait_stage(packed);
                dequantize_now(fragments[0], packed[0]);
                constexpr int LAST = K_BLOCKS % STAGE_K_BLOCKS;
#pragma unroll 1
                for (int run = 0; run < RUNS; ++run) {
#pragma unroll 1
                    for (i32 kb = 0; kb <= RUN_K_BLOCKS - STAGE_K_BLOCKS; kb += STAGE_K_BLOCKS)
                        mma_stage<Most, WGMMA_GROUPS>(sum, fragments, packed, stage,
                                                      run * RUN_K_BLOCKS + kb);
                    if (run + 1 < RUNS) Tile::template rescale<Most>(sum, scales.factor(run));
                }
                if constexpr (LAST != 0)
                    mma_stage<Most, LAST * REPEATS>(sum, fragments, packed, stage, K_BLOCKS - LAST);
            }
        }

        // The fragments of the stage's first group are made, and after it those of the next
        // stage's. No products run on into the next stage: the compiler, which could not follow
        // which registers they read, would make each wait for the one before.
        template <int TileM, int WgmmaGroups>
        __device__ __forceinline__ void mma_stage(float (&sum)[REPEATS][TILE_M / 2],
                                                  Fragments (&fragments)[2],
                                                  Packed (&packed)[PREFETCHED], const Stage*& stage,
                                                  i32 kb) {
            const bool more = kb < K_BLOCKS - STAGE_K_BLOCKS;
            const u64 tiles = tile_descriptor(shared_address(stage->activations));
#pragma unroll
            for (int g = 0; g < WgmmaGroups; ++g) {
                mma<TileM>(sum[g % REPEATS], fragments[g % 2],
                           tiles + g / REPEATS * (TILE_M * TILE_ROW_BYTES / 16));
                if (g + PREFETCHED < WgmmaGroups)
                    packed[g % PREFETCHED] = load(*stage, g + PREFETCHED);
                if (WgmmaGroups % 2 != 0 && g + 1 == WgmmaGroups && more)
                    wgmma_wait<0>();  // the next first fragments take their place
                if (g + 1 == WgmmaGroups && more) stage = &wait_stage(packed);
                if (g > 0) wgmma_wait<1>();
                if (g == 0 && kb > 0 && (EPILOGUE_STAGES == 1 || more)) release();
                const int next = (g + 1) % WgmmaGroups;
                if (g + 1 < WgmmaGroups || more)
                    dequantize_now(fragments[next % 2], packed[next % PREFETCHED]);
            }
            wgmma_wait<0>();
        }

        // High M tiles: products take longer, and run on from stage to stage, while the next
        // fragments are made where there are registers for both. Loops for all heights would be
        // much code.
        __device__ __forceinline__ void run_pipelined(float (&sum)[REPEATS][TILE_M / 2],
                                                      const Scales& scales) {
            static_assert(REPEATS == 1 || TILE_M <= 80, "registers");
            constexpr int BUFFERS =
                STAGE_K_BLOCKS > 1 && TILE_M / 2 + 60 <= CONSUMER_REGISTERS ? 2 : 1;
            Fragments fragments[BUFFERS];
            Packed packed[PREFETCHED];
            const Stage* stage;
#pragma unroll 1
            for (int run = 0; run < RUNS; ++run) {
#pragma unroll 1
                for (i32 in_run = 0; in_run < RUN_K_BLOCKS; in_run += STAGE_K_BLOCKS) {
                    const i32 kb = run * RUN_K_BLOCKS + in_run;
#pragma unroll
                    for (int b = 0; b < STAGE_K_BLOCKS; ++b) {
                        if (K_BLOCKS % STAGE_K_BLOCKS != 0 && kb + b == K_BLOCKS) break;
                        if (STAGE_K_BLOCKS == 1) wgmma_wait<0>();  // see PlainShared
                        if (b == 0) stage = &wait_stage(packed);
                        wgmma_wait<BUFFERS - 1>();
                        if (b == BUFFERS - 1 && kb > 0 &&
                            (EPILOGUE_STAGES == 1 || kb < K_BLOCKS - STAGE_K_BLOCKS))
                            release();
                        dequantize(fragments[b % BUFFERS], packed[b]);
                        mma_any<8, TILE_M>(sum[0], fragments[b % BUFFERS],
                                           tile_descriptor(shared_address(stage->activations[b])));
                    }
                }
                if (run + 1 < RUNS) {
                    wgmma_wait<0>();
                    Tile::template rescale<TILE_M>(sum, scales.factor(run));
                }
            }
        }

        // Waits for the next stage, and loads the weights of its first wgmma groups.
        __device__ __forceinline__ const Stage& wait_stage(Packed (&packed)[PREFETCHED]) {
            const Stage& stage = shared.stage[ring.stage];
            mbarrier_wait(shared.full[ring.stage], ring.parity);
            ring.advance();
#pragma unroll
            for (int g = 0; g < PREFETCHED; ++g) packed[g] = load(stage, g);
            return stage;
        }

        __device__ __forceinline__ Packed load(const Stage& stage, int g) const {
            const RepeatWeights& from = stage.weights[g % REPEATS];
            return mine.load(from.elements[0][g / REPEATS], from.first_scales(g / REPEATS));
        }

        __device__ static __forceinline__ void dequantize(Fragments& fragments,
                                                          const Packed& packed) {
#pragma unroll
            for (int v = 0; v < K_STEPS; ++v) SharedWeights::dequantize(packed, v, fragments[v]);
        }

        // The empty asm keeps the compiler from moving this work between the products.
        __device__ static __forceinline__ void dequantize_now(Fragments& fragments,
                                                              const Packed& packed) {
            dequantize(fragments, packed);
#pragma unroll
            for (int v = 0; v < K_STEPS; ++v)
#pragma unroll
                for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(fragments[v][i]));
        }

        template <int Least, int Most>
        __device__ __forceinline__ void mma_any(float (&sum)[TILE_M / 2],
                                                const Fragments& fragments, u64 tile) {
            if constexpr (Least < Most) {
                constexpr int MIDDLE = (Least + Most) / 16 * 8;
                if (tile_m <= MIDDLE)
                    mma_any<Least, MIDDLE>(sum, fragments, tile);
                else
                    mma_any<MIDDLE + 8, Most>(sum, fragments, tile);
            } else {
                wgmma_fence();
#pragma unroll
                for (int v = 0; v < K_STEPS; ++v)
                    wgmma<typename Segment::Activation, Most>(
                        sum, fragments[v], tile | 2 * v);  // fewer instructions here than +
                wgmma_commit();
            }
        }

        template <int TileM>
        __device__ static __forceinline__ void mma(float (&sum)[TILE_M / 2],
                                                   const Fragments& fragments, u64 tile) {
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < K_STEPS; ++v)
                wgmma<typename Segment::Activation, TileM>(
                    sum, fragments[v], tile + 2 * v);  // fewer instructions here than |
            wgmma_commit();
        }
    };
};

}  // namespace
