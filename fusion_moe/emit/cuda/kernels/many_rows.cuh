// Grouped products of many rows a group: weights go through shared memory to registers, become fragments there, and are multiplied by
// tiles of activations in shared memory; copies, decoding and products overlap.
//
// A block stays on its multiprocessor and takes item after item (schedule.cuh): up to TOKENS rows of a group and 64 * TEAMS rows of its
// matrix. The matrix is on the side of wgmma's 64 rows; the other side is as wide as the group's spans are high. TEAMS warpgroups
// multiply, each by 64 rows of the matrix, what a few warps copy into a ring of stages of 64 k. They share nothing but the ring: some
// decode while others keep the tensor cores busy, and one may finish an item and store it while others still multiply.
//
// Rows of activations are in the order of w16x64 (order.cuh).
#pragma once

#include "fp4.cuh"
#include "order.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"

namespace {

constexpr int MOST_SHARED = 227 * 1024;  // bytes of shared memory that a block may have

// Stages that fit a block's shared memory: `stage` bytes each, next to `rest` bytes.
__device__ constexpr int stages_that_fit(int stage, int rest) { return (MOST_SHARED - rest) / ((stage + 1023) / 1024 * 1024 + 16); }

template <class Segment, int TOKENS, int TEAMS,
          int STAGES = stages_that_fit(TOKENS * 128 + TEAMS * 4 * 576, TEAMS * 16 * 68 * 4 + int(sizeof(Schedule<Segment::G, TOKENS>)) + 1024)>
struct ManyRows {
    static constexpr int TEAM = 128, TEAM_WARPS = 4, COPY_WARPS = 4, COPIERS = 32 * COPY_WARPS, THREADS = TEAM * TEAMS + COPIERS;
    // Of the registers that a launch gives to one thread of each team and one that copies, the latter needs few.
    static constexpr int POOL = 65536 / THREADS / 8 * 8 * (TEAMS + 1), COPY_REGISTERS = 64;
    static constexpr int MULTIPLY_REGISTERS = (POOL - COPY_REGISTERS) / TEAMS / 8 * 8;
    static constexpr int TILES = TEAM_WARPS * TEAMS, COLUMNS = Segment::B * TILES / Segment::TILES;  // of the result
    static constexpr int ACROSS = (Segment::W + COLUMNS - 1) / COLUMNS, KB = Segment::K / 64, STEPS = 4;
    static constexpr int CODES = 512, SCALES = 64;  // bytes of a tile of 16 rows and 64 k
    static constexpr int CHUNK = 16;                // rows of a result that a team turns at a time
    static constexpr int STRIDE = 64 + 4;           // of sums being turned: no two of a warp's stores meet in a bank
    static constexpr int V = 8;                     // columns that a thread stores at a time: 16 bytes of bfloat16
    static_assert(TEAM_WARPS % Segment::TILES == 0, "a team's tiles make whole columns");
    static_assert(Segment::K % 64 == 0 && Segment::N % 16 == 0, "weights are tiled");
    static_assert(!Segment::At::ORDERED || Segment::W % 64 == 0, "whole blocks of 64 are ordered");
    static_assert(TOKENS % CHUNK == 0 && TOKENS <= 256, "spans are turned in whole chunks, and fit an instruction");

    struct alignas(1024) Stage {
        u8 activations[TOKENS * TILE_ROW];
        u8 codes[TILES * CODES], scales[TILES * SCALES];
    };

    struct Shared {
        Stage stage[STAGES];
        float turned[TEAMS][CHUNK * STRIDE];
        u64 full[STAGES], empty[STAGES];
        Schedule<Segment::G, TOKENS> schedule;
    };
    static_assert(sizeof(Shared) <= MOST_SHARED, "a block's shared memory");

    __device__ static void run(const Segment& s) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        if (threadIdx.x < STAGES) {
            barrier_init(shared.full[threadIdx.x], COPIERS);
            barrier_init(shared.empty[threadIdx.x], TILES);
        }
        wait_for_previous();
        shared.schedule.make(s.ends, i32(s.rows()), ACROSS, blockIdx.x == 0 ? s.error : nullptr, reinterpret_cast<i32*>(shared.stage));
        if (threadIdx.x < TEAM * TEAMS) {
            take_registers<MULTIPLY_REGISTERS>();
            multiply(s, shared);
        } else {
            give_registers<COPY_REGISTERS>();
            copy(s, shared);
        }
        let_next_start();
    }

private:
    using Cursor = typename Schedule<Segment::G, TOKENS>::Cursor;
    using At = typename Segment::At;

    // Tile t of a block of columns -> the row of the matrix where it begins. Past the last column: the last block's.
    __device__ static i32 first_row(i32 column_block, i32 t) {
        const i32 block = min(column_block * (TILES / Segment::TILES) + t / Segment::TILES, (Segment::W - 1) / Segment::B);
        return Segment::first_row(block, t % Segment::TILES);
    }

    // Copies -----------------------------------------------------------------------------------------------------------

    // The weights of an item: a warp copies the codes of each COPY_WARPS-th tile, and a thread 16 bytes of scales.
    struct Weights {
        static constexpr int EACH = TILES / COPY_WARPS;
        static_assert(TILES * SCALES / 16 <= COPIERS, "one copy of scales a thread");
        const u8 *codes[EACH], *scales;

        __device__ __forceinline__ void open(const Segment& s, const Item& item, i32 thread) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) codes[i] = s.codes + at(item, thread / 32 + COPY_WARPS * i) * CODES + thread % 32 * 16;
            scales = s.scales + at(item, thread / 4 % TILES) * SCALES + thread % 4 * 16;
        }

        __device__ static i64 at(const Item& item, i32 t) {
            return (i64(item.span.group) * (Segment::N / 16) + first_row(item.column_block, t) / 16) * KB;
        }

        __device__ __forceinline__ void copy(Stage& to, i32 thread, i32 kb) const {
            const u32 code = shared_address(to.codes) + thread * 16;
#pragma unroll
            for (int i = 0; i < EACH; ++i) copy_16(code + COPY_WARPS * CODES * i, codes[i] + kb * CODES);
            if (thread < TILES * SCALES / 16) copy_16(shared_address(to.scales) + thread * 16, scales + kb * SCALES);
        }
    };

    // The activations of an item: a thread copies 16 bytes of each EACH-th row.
    struct Activations {
        static constexpr int EACH = COPIERS / (TILE_ROW / 16), ROWS = TOKENS / EACH;
        const u8* base;
        i32 row[ROWS];  // offsets, in 16 bytes
        i32 count;      // of rows

        __device__ __forceinline__ void open(const Segment& s, const Item& item, i32 thread) {
            const i32 mine = thread / (TILE_ROW / 16);
            const u8* first = reinterpret_cast<const u8*>(s.row(item.span.first));
            base = first + thread % (TILE_ROW / 16) * 16;
            count = (item.height - mine + EACH - 1) / EACH;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const i32 m = min(item.span.first + mine + EACH * i, item.span.end - 1);  // sums past the end are not stored
                row[i] = i < count ? i32((reinterpret_cast<const u8*>(s.row(m)) - first) / 16) : 0;
            }
        }

        __device__ __forceinline__ void copy(Stage& to, i32 thread, i32 kb) const {
            const u32 place = shared_address(to.activations) + swizzled(thread / (TILE_ROW / 16), thread % (TILE_ROW / 16));
            const u8* from = base + kb * TILE_ROW;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (i < count) copy_16(place + i * EACH * TILE_ROW, from + i64(row[i]) * 16);
        }
    };

    __device__ static __forceinline__ void copy(const Segment& s, Shared& shared) {
        const i32 thread = threadIdx.x - TEAM * TEAMS;
        Ring<STAGES> ring;
        for (Cursor at(shared.schedule); at.more(); at.advance()) {
            const Item item = at.item();
            if (item.span.group == Segment::G) continue;
            Weights weights;
            weights.open(s, item, thread);
            Activations activations;
            activations.open(s, item, thread);
#pragma unroll 1
            for (i32 kb = 0; kb < KB; ++kb) {
                Stage& stage = shared.stage[ring.stage];
                barrier_wait(shared.empty[ring.stage], ring.parity ^ 1);
                weights.copy(stage, thread, kb);
                activations.copy(stage, thread, kb);
                barrier_arrive_after_copies(shared.full[ring.stage]);
                ring.advance();
            }
        }
    }

    // Products ---------------------------------------------------------------------------------------------------------

    __device__ static __forceinline__ void multiply(const Segment& s, Shared& shared) {
        Ring<STAGES> ring;
        for (Cursor at(shared.schedule); at.more(); at.advance()) {
            if (at.group() == Segment::G) {
                fill(s, at.item());
                continue;
            }
            float sum[TOKENS / 2] = {};
            products(sum, shared, ring, at.height());
            store(sum, s, shared, at.item());  // which is found again: registers are short while products run
        }
    }

    // sum[4 n + i]: rows r and r + 8 of the warp's tile, and rows 8 n + 2 c, 8 n + 2 c + 1 of activations.
    __device__ static __forceinline__ void products(float (&sum)[TOKENS / 2], Shared& shared, Ring<STAGES>& ring, i32 height) {
        const bool speaks = threadIdx.x % 32 == 0;
        u32 mine = threadIdx.x / 32 * CODES + threadIdx.x % 32 * 16;  // where the thread's codes lie, and at an eighth of it its scales
        asm volatile("" : "+r"(mine));                                 // kept, not computed again
        u32 running = 0;                                               // the stage that products under way read
#pragma unroll 1
        for (i32 kb = 0; kb < KB; ++kb) {
            const Stage& stage = shared.stage[ring.stage];
            barrier_wait(shared.full[ring.stage], ring.parity);
            fence_for_tensor_cores();
            const Tiled::Held held = {*reinterpret_cast<const uint4*>(stage.codes + mine),
                                      *reinterpret_cast<const u16*>(stage.scales + mine / 8)};
            const u32 low = Tiled::low_scale(held), high = Tiled::high_scale(held);
            wgmma_wait<0>();
            if (kb > 0 && speaks) barrier_arrive(shared.empty[running]);
            u32 fragment[STEPS][4];
#pragma unroll
            for (int v = 0; v < STEPS; ++v) Tiled::decode(held, v, low, high, fragment[v]);
            steps<8, TOKENS>(sum, fragment, tile_descriptor(shared_address(stage.activations)), height);
            running = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        if (speaks) barrier_arrive(shared.empty[running]);
    }

    // Multiplies by as many rows as are needed. Only the instruction differs; which one, all of the team agree.
    template <int Least, int Most>
    __device__ static __forceinline__ void steps(float (&sum)[TOKENS / 2], const u32 (&fragment)[STEPS][4], u64 tile, i32 height) {
        if constexpr (Least < Most) {
            constexpr int MIDDLE = (Least + Most) / 16 * 8;
            if (height <= MIDDLE) steps<Least, MIDDLE>(sum, fragment, tile, height);
            else steps<MIDDLE + 8, Most>(sum, fragment, tile, height);
        } else {
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < STEPS; ++v) wgmma<Most>(sum, fragment[v], tile + 2 * v);
            wgmma_commit();
        }
    }

    // Results ----------------------------------------------------------------------------------------------------------

    // Turns 16 rows of activations at a time: threads have sums of one column each, and store eight.
    __device__ static __forceinline__ void store(const float (&sum)[TOKENS / 2], const Segment& s, Shared& shared, const Item& item) {
        const i32 lane = threadIdx.x % 32, tile = threadIdx.x / 32, team = tile / TEAM_WARPS, r = lane / 4, c = lane % 4;
        const i32 first = first_row(item.column_block, tile) + r;
        float factor[2];  // of rows r and r + 8
#pragma unroll
        for (int i = 0; i < 2; ++i)
            factor[i] = Tiled::FACTOR * s.decode[item.span.group * Segment::RUNS + (first + 8 * i) / (Segment::N / Segment::RUNS)];
        float* turned = shared.turned[team];
#pragma unroll
        for (int chunk = 0; chunk < TOKENS; chunk += CHUNK) {
            if (chunk >= item.height) break;
            team_sync(team);
#pragma unroll
            for (int i = 0; i < CHUNK / 2; ++i)
                turned[(i / 4 * 8 + 2 * c + i % 2) * STRIDE + 16 * (tile % TEAM_WARPS) + r + i % 4 / 2 * 8] =
                    sum[chunk / 2 + i] * factor[i % 4 / 2];
            team_sync(team);
            put(s, turned, item, team, chunk);
        }
    }

    __device__ static __forceinline__ void team_sync(i32 team) { barrier_sync(1 + team, TEAM); }

    // A thread has eight columns that follow each other; or, ordered for the next product, a pair of each 16 of the team's columns.
    __device__ static __forceinline__ void put(const Segment& s, const float* turned, const Item& item, i32 team, i32 chunk) {
        constexpr int OF_TEAM = COLUMNS / TEAMS, EACH = Segment::At::ORDERED ? OF_TEAM / 8 : V, PIECES = OF_TEAM / EACH;  // of a row
        const i32 thread = threadIdx.x % TEAM, row = thread / PIECES, m = item.span.first + chunk + row;
        if (row >= CHUNK || m >= item.span.end) return;
        const i32 first = thread % PIECES * (Segment::At::ORDERED ? 2 : EACH);
        float p[Segment::F][EACH];
        read(p, turned + row * STRIDE, first);
        put(s, m, item.span.group, At{item.column_block * COLUMNS + team * OF_TEAM + first}, p);
    }

    template <int Count>
    __device__ static __forceinline__ void read(float (&p)[Segment::F][Count], const float* row, i32 first) {
        const float* block = row + first / Segment::B * (16 * Segment::TILES);
        if constexpr (Segment::At::ORDERED) {
            const At at{first};
#pragma unroll
            for (int v = 0; v < Count; ++v)
#pragma unroll
                for (int f = 0; f < Segment::F; ++f)
                    p[f][v] = row[at.column(v) / Segment::B * (16 * Segment::TILES) + Segment::local(f, at.column(v) % Segment::B)];
        } else if constexpr (Segment::B == V) {
            float tile[16 * Segment::TILES];
            read(tile, block);
#pragma unroll
            for (int f = 0; f < Segment::F; ++f)
#pragma unroll
                for (int v = 0; v < V; ++v) p[f][v] = tile[Segment::local(f, v)];
        } else {
#pragma unroll
            for (int f = 0; f < Segment::F; ++f) read(p[f], block + Segment::local(f, first % Segment::B));
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

    template <int Count, class Columns>
    __device__ static __forceinline__ void put(const Segment& s, i32 m, i32 g, Columns at, const float (&p)[Segment::F][Count]) {
        if constexpr (Segment::W % 8 == 0) {
            if (at.j < Segment::W) s.template store<Count>(m, g, at, p);
        } else {
#pragma unroll
            for (int v = 0; v < Count; ++v) {
                float one[Segment::F][1];
#pragma unroll
                for (int f = 0; f < Segment::F; ++f) one[f][0] = p[f][v];
                if (at.column(v) < Segment::W) s.template store<1>(m, g, InTurn{at.column(v)}, one);
            }
        }
    }

    // Rows that belong to no group.
    __device__ static __forceinline__ void fill(const Segment& s, const Item& item) {
        const i32 pieces = (item.span.end - item.span.first) * (COLUMNS / V);
        for (i32 i = threadIdx.x; i < pieces; i += TEAM * TEAMS) {
            const float zero[Segment::F][V] = {};
            put(s, item.span.first + i / (COLUMNS / V), Segment::G, InTurn{item.column_block * COLUMNS + i % (COLUMNS / V) * V}, zero);
        }
    }
};

}  // namespace
