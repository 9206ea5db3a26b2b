// Grouped products of many rows a group: weights go through shared memory to registers, become fragments there, and are multiplied by
// tiles of activations in shared memory; copies, decoding and products overlap.
//
// A block stays on its multiprocessor and takes item after item (schedule.cuh): up to TOKENS rows of a group and 64 * BANDS * TEAMS rows
// of its matrix. The matrix is on the side of wgmma's 64 rows; the other side is as wide as the group's spans are high. TEAMS warpgroups
// multiply, each by BANDS bands of 64 rows of the matrix, what a few warps copy into a ring of stages of 128 k. They share nothing but
// the ring: some decode while others keep the tensor cores busy, and one may finish an item and store it while others still multiply.
//
// Groups that are much heavier or lighter than others can be left to launches of other variants, beside this one: each counts only groups
// of its own sizes, ABOVE to MOST, which the host does not know. None of them needs what another makes, so none waits for the one before;
// but the last block of each does when it is done, and so what waits for the last launch waits for all.
//
// Activations are given in the order of w16x64 (order.cuh), or in their own, with more instructions for each weight (weights/).
#pragma once

#include "order.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"
#include "turn.cuh"
#include "weights/reader.cuh"
#include "wgmma.cuh"

namespace {

constexpr int MOST_SHARED = 227 * 1024;  // bytes of shared memory that a block may have

// Tiles of weights in shared memory, DEPTH for each warp of a team.
template <int WARPS, int DEPTH, int ELEMENTS, int SCALES>
struct SharedTiles {
    u8 elements[WARPS][DEPTH][ELEMENTS], scales[WARPS][DEPTH][SCALES];

    __device__ __forceinline__ const u8* first_scales(int b) const { return scales[0][b]; }
};

template <int WARPS, int DEPTH, int ELEMENTS>
struct SharedTiles<WARPS, DEPTH, ELEMENTS, 0> {
    u8 elements[WARPS][DEPTH][ELEMENTS];

    __device__ __forceinline__ const u8* first_scales(int) const { return nullptr; }
};

template <class Segment, int TOKENS, int TEAMS, int BANDS>
struct ManyRows {
    static constexpr int TEAM = 128, TEAM_WARPS = 4, COPY_WARPS = 4, COPIERS = 32 * COPY_WARPS, THREADS = TEAM * TEAMS + COPIERS;
    // Of the registers that a launch gives to one thread of each team and one that copies, the latter needs few; two bands of many sums
    // leave it the fewest, which are enough where tiles are even (see Weights).
    static constexpr int LEAST_TO_COPY = BANDS > 1 && TOKENS > 32 ? 32 : 64;
    static constexpr int POOL = 65536 / THREADS / 8 * 8 * (TEAMS + 1), MULTIPLY_REGISTERS = (POOL - LEAST_TO_COPY) / TEAMS / 8 * 8;
    static constexpr int COPY_REGISTERS = POOL - TEAMS * MULTIPLY_REGISTERS;
    static constexpr int TILES = TEAM_WARPS * TEAMS * BANDS, COLUMNS = Segment::B * TILES / Segment::TILES;  // of the result
    static constexpr int ACROSS = (Segment::W + COLUMNS - 1) / COLUMNS, KB = Segment::K / 64, STEPS = 4;
    using Reader = typename Segment::Weights;
    static constexpr int ELEMENTS = Reader::ELEMENTS, SCALES = Reader::SCALES;  // bytes of a tile of 16 rows and 64 k
    static constexpr int DEPTH = ELEMENTS + SCALES <= 1024 ? 2 : 1;             // blocks of 64 k in a stage
    static constexpr int ROUND = BANDS == 1 ? 2 * DEPTH : DEPTH;  // blocks that a round of the loop of copies takes, as registers last
    static constexpr int KEPT = BANDS == 1 && KB > DEPTH ? 2 : 1;  // stages that a team gives back when it has stored an item
    static constexpr int PLACES = BANDS > 1 ? 2 : KEPT;            // in which it turns results: of its weights there
    using Turned = typename Turn<Segment, BANDS>::Way;
    using SharedWeights = typename Reader::template Shared<Segment::ORDERED>;
    using Held = typename SharedWeights::Held;
    static constexpr int TOGETHER = Turned::BANDS;  // bands of which a result's columns are made
    static constexpr int CHUNK = Turned::CHUNK;     // rows of a result that a team turns at a time, in one of them
    static_assert(TEAM_WARPS % Segment::TILES == 0, "a team's tiles make whole columns");
    static_assert(TEAMS <= Part<Segment, TOGETHER>::MOST_TEAMS);
    static_assert(TEAM_WARPS % COPY_WARPS == 0, "a warp copies the same tiles of every team");
    static_assert(Segment::K % 64 == 0 && Segment::N % 16 == 0, "weights are tiled");
    static_assert(!Segment::At::ORDERED || Segment::W % 64 == 0, "whole blocks of 64 are ordered");
    static_assert(TOKENS % 16 == 0 && TOKENS <= 256, "spans are turned 16 rows at a time, and fit an instruction");

    using BandWeights = SharedTiles<TEAM_WARPS, DEPTH, ELEMENTS, SCALES>;

    struct alignas(1024) Stage {
        u8 activations[DEPTH][TOKENS * TILE_ROW];
        BandWeights weights[TEAMS * BANDS];
    };

    using Work = Schedule<Segment::G, TOKENS, Segment::ABOVE, Segment::MOST, Segment::BESIDE_FEW>;

    // As many as fit. Items are told by those who copy: each has a stage at least, but for one that they begin.
    static constexpr int LEFT = MOST_SHARED - int(sizeof(Work) + sizeof(Item));
    static constexpr int STAGES = LEFT / (sizeof(Stage) + 2 * sizeof(u64) + sizeof(Item)), ITEMS = STAGES + 1;

    struct Shared {
        Stage stage[STAGES];
        Item items[ITEMS];
        u64 full[STAGES], empty[STAGES];
        Work schedule;
    };
    static_assert(sizeof(Shared) <= MOST_SHARED && sizeof(BandWeights) >= Turned::PLACE);

    __device__ static void run(const Segment& s) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        if (threadIdx.x < STAGES) {
            barrier_init(shared.full[threadIdx.x], COPY_WARPS);
            barrier_init(shared.empty[threadIdx.x], TEAM_WARPS * TEAMS);
        }
        if (!Segment::EARLY) wait_for_previous();
        shared.schedule.make(s.ends, i32(s.rows()), ACROSS, blockIdx.x == 0 ? s.error : nullptr, reinterpret_cast<i32*>(shared.stage));
        if (Segment::EARLY && !Segment::BESIDE_PREVIOUS) wait_for_previous();
        if (Segment::BESIDE_NEXT) let_next_start();
        if (threadIdx.x < TEAM * TEAMS) {
            take_registers<MULTIPLY_REGISTERS>();
            multiply(s, shared);
        } else {
            give_registers<COPY_REGISTERS>();
            copy(s, shared);
        }
        let_next_start();
        if (Segment::BESIDE_PREVIOUS && blockIdx.x == gridDim.x - 1) wait_for_previous();
    }

private:
    using Cursor = typename Work::Cursor;
    using At = typename Segment::At;

    // Tile t of a block of columns -> the row of the matrix where it begins. Past the last column: the last block's. What makes a column
    // of the result is in tiles, or in bands, that follow each other.
    __device__ static constexpr i32 first_row(i32 column_block, i32 t) {
        constexpr i32 ALIKE = TOGETHER > 1 ? TEAM_WARPS : 1, LAST = (Segment::W - 1) / Segment::B;
        const i32 block = column_block * (TILES / Segment::TILES) + t / ALIKE / Segment::TILES * ALIKE + t % ALIKE;
        return Segment::first_row(block < LAST ? block : LAST, t / ALIKE % Segment::TILES);
    }

    // Whether each step-th tile lies as far after the first of them in every block of columns.
    __device__ static constexpr bool even(i32 step) {
        for (i32 block = 0; block < ACROSS; ++block)
            for (i32 t = 0; t < TILES; ++t)
                if (first_row(block, t) - first_row(block, t % step) != first_row(0, t / step * step) - first_row(0, 0)) return false;
        return true;
    }

    // Copies -----------------------------------------------------------------------------------------------------------

    // The weights of an item: a warp copies the elements of each COPY_WARPS-th tile, and a thread 16 bytes of scales of each AT_ONCE-th.
    struct Weights {
        static_assert(i64(Segment::N) * Segment::K / 1024 * ELEMENTS < 1ll << 31, "offsets in a matrix");
        static constexpr int EACH = TILES / COPY_WARPS, RUNS = ELEMENTS / RUN;
        static constexpr int PIECES = DEPTH * SCALES / 16;  // of the scales of a tile
        static constexpr int AT_ONCE = PIECES > 0 ? COPIERS / PIECES : TEAM_WARPS, TURNS = PIECES > 0 ? (TILES + AT_ONCE - 1) / AT_ONCE : 0;
        static_assert(AT_ONCE % TEAM_WARPS == 0, "whole teams at once");
        static constexpr bool EVEN = even(COPY_WARPS) && even(AT_ONCE);
        const u8 *elements, *scales;                   // of the item's matrix; if tiles are even, the thread's first
        i32 element[EACH], scale[TURNS > 0 ? TURNS : 1];  // offsets, if they are not

        __device__ __forceinline__ void open(const Segment& s, const Item& item, i32 thread) {
            const i64 tiles = i64(item.span.group) * (Segment::N / 16) * KB;
            elements = Reader::elements(s) + tiles * ELEMENTS, scales = Reader::scales(s) + tiles * SCALES;
#pragma unroll
            for (int i = 0; i < EACH; ++i) element[i] = at(item, thread / 32 + COPY_WARPS * i) * ELEMENTS + thread % 32 * 16;
            if constexpr (SCALES > 0) {
#pragma unroll
                for (int i = 0; i < TURNS; ++i)
                    scale[i] = at(item, min(thread / PIECES + AT_ONCE * i, TILES - 1)) * SCALES + thread % PIECES * 16;
            }
            if (EVEN) elements += element[0], scales += TURNS > 0 ? scale[0] : 0;
        }

        __device__ static i32 at(const Item& item, i32 t) { return first_row(item.column_block, t) / 16 * KB; }
        __device__ static constexpr i32 after_first(int t) { return (first_row(0, t) - first_row(0, 0)) / 16 * KB; }
        __device__ __forceinline__ i32 element_at(int i) const { return EVEN ? after_first(COPY_WARPS * i) * ELEMENTS : element[i]; }
        __device__ __forceinline__ i32 scale_at(int i) const { return EVEN ? after_first(AT_ONCE * i) * SCALES : scale[i]; }

        // Blocks of 64 k, from the kb-th of the round on.
        template <int Blocks>
        __device__ __forceinline__ void copy(Stage& to, i32 thread, int kb) const {
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
                const u32 element_place = shared_address(to.weights[0].elements[thread / 32]) + SharedWeights::place(thread % 32, run);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const int tile = COPY_WARPS * i;
                    const int place = tile / TEAM_WARPS * sizeof(BandWeights) + tile % TEAM_WARPS * DEPTH * ELEMENTS + run * RUN;
#pragma unroll
                    for (int b = 0; b < Blocks; ++b)
                        copy_16(element_place + place + b * ELEMENTS, elements + element_at(i) + (kb + b) * ELEMENTS + run * RUN);
                }
            }
            if constexpr (SCALES > 0) copy_scales<Blocks>(to, thread, kb);
        }

        __device__ __forceinline__ void advance() { elements += ROUND * ELEMENTS, scales += ROUND * SCALES; }

    private:
        template <int Blocks>
        __device__ __forceinline__ void copy_scales(Stage& to, i32 thread, int kb) const {
            const i32 tile = thread / PIECES, piece = thread % PIECES;
            const u32 scale_place = shared_address(to.weights[tile / TEAM_WARPS].scales[tile % TEAM_WARPS]) + piece * 16;
#pragma unroll
            for (int i = 0; i < TURNS; ++i)
                copy_16_if(scale_place + AT_ONCE / TEAM_WARPS * i * sizeof(BandWeights), scales + scale_at(i) + kb * SCALES,
                           tile + AT_ONCE * i < TILES && piece < Blocks * SCALES / 16);
        }
    };

    // The activations of an item: a thread copies 16 bytes of each EACH-th row, in as many steps as all need.
    struct Activations {
        static constexpr int EACH = COPIERS / (TILE_ROW / 16), STEPS = (TOKENS + EACH - 1) / EACH;
        const u8* row[STEPS];
        i32 steps;
        bool last;  // whether the thread has a row in the last step

        __device__ __forceinline__ void open(const Segment& s, const Item& item, i32 thread) {
            const i32 mine = thread / (TILE_ROW / 16);
            steps = (item.height + EACH - 1) / EACH, last = mine + EACH * (steps - 1) < item.height;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const i32 m = min(item.span.first + mine + EACH * i, item.span.end - 1);  // sums past the end are not stored
                if (i < steps) row[i] = reinterpret_cast<const u8*>(s.row(m)) + thread % (TILE_ROW / 16) * 16;
            }
        }

        template <int Steps, int Blocks>
        __device__ __forceinline__ void copy(Stage& to, i32 thread, int kb) const {
            const u32 place = shared_address(to.activations) + swizzled(thread / (TILE_ROW / 16), thread % (TILE_ROW / 16));
#pragma unroll
            for (int i = 0; i < Steps; ++i)
#pragma unroll
                for (int b = 0; b < Blocks; ++b) {
                    const u32 to_row = place + (i * EACH + b * TOKENS) * TILE_ROW;
                    if (i + 1 < Steps) copy_16(to_row, row[i] + (kb + b) * TILE_ROW);
                    else copy_16_if(to_row, row[i] + (kb + b) * TILE_ROW, last);
                }
        }

        template <int Steps>
        __device__ __forceinline__ void advance() {
#pragma unroll
            for (int i = 0; i < Steps; ++i) row[i] += ROUND * TILE_ROW;
        }
    };

    // The stages that copies fill. The tensor cores are told of one when its copies are there: once those of the next have begun, and of an
    // item's last one once the next item is found, which takes as long. (Told by who multiplies, by a fence of theirs, they first finished
    // what was under way: seen as 10 % on an H200.)
    struct Filled {
        static_assert(STAGES >= 3, "one that they are not told of yet, and one that they have not given back, leave one to fill");
        Shared& shared;
        Ring<STAGES> next, last;

        __device__ __forceinline__ Stage& open() {
            barrier_wait(shared.empty[next.stage], next.parity ^ 1);
            return shared.stage[next.stage];
        }

        // first: of an item.
        __device__ __forceinline__ void close(bool first) {
            copies_commit();
            if (!first) tell<1>();
            next.advance();
        }

        // The last one of an item.
        __device__ __forceinline__ void finish() { tell<0>(); }

    private:
        template <int Later>
        __device__ __forceinline__ void tell() {
            copies_wait<Later>();
            fence_for_tensor_cores();
            barrier_arrive(shared.full[last.stage]);
            last.advance();
        }
    };

    __device__ static __forceinline__ void copy(const Segment& s, Shared& shared) {
        const i32 thread = threadIdx.x % COPIERS;
        Filled filled{shared};
        Ring<ITEMS> told;
        Cursor at(shared.schedule);
        for (; at.more_products(); at.advance(), told.advance()) {
            const Item item = at.item();
            if (thread == 0) shared.items[told.stage] = item;
            if (!at.first()) filled.finish();
            Weights weights;
            weights.open(s, item, thread);
            Activations rows;
            rows.open(s, item, thread);
            copy_item<1>(weights, rows, filled, thread);
        }
        if (!at.first()) filled.finish();
    }

    // A loop for each number of steps has fewer instructions than one that branches.
    template <int Steps>
    __device__ static __forceinline__ void copy_item(Weights& weights, Activations& rows, Filled& filled, i32 thread) {
        if constexpr (Steps < Activations::STEPS) {
            if (rows.steps > Steps) return copy_item<Steps + 1>(weights, rows, filled, thread);
        }
#pragma unroll 1
        for (i32 kb = 0; kb <= KB - ROUND; kb += ROUND) {
#pragma unroll
            for (int b = 0; b < ROUND; b += DEPTH) copy_stage<Steps, DEPTH>(weights, rows, filled, thread, b, kb + b == 0);
            weights.advance(), rows.template advance<Steps>();
        }
        if constexpr (KB % ROUND >= DEPTH) copy_stage<Steps, DEPTH>(weights, rows, filled, thread, 0, KB < ROUND);
        if constexpr (KB % DEPTH != 0) copy_stage<Steps, KB % DEPTH>(weights, rows, filled, thread, KB % ROUND / DEPTH * DEPTH, KB < DEPTH);
    }

    template <int Steps, int Blocks>
    __device__ static __forceinline__ void copy_stage(
        const Weights& weights, const Activations& rows, Filled& filled, i32 thread, int kb, bool first) {
        Stage& stage = filled.open();
        weights.template copy<Blocks>(stage, thread, kb);
        rows.template copy<Steps, Blocks>(stage, thread, kb);
        filled.close(first);
    }

    // Products ---------------------------------------------------------------------------------------------------------

    __device__ static __forceinline__ void multiply(const Segment& s, Shared& shared) {
        Ring<STAGES> ring;
        Ring<ITEMS> told;
        Cursor at(shared.schedule);
        for (; at.more_products(); at.advance(), told.advance()) {
            barrier_wait(shared.full[ring.stage], ring.parity);
            const Item item = shared.items[told.stage];
            float outer[BANDS][2];  // they come while products run, not when all wait for the store
#pragma unroll
            for (int h = 0; h < BANDS; ++h)
                Reader::outer_of_lane(outer[h], s, item.span.group, first_row(item.column_block, tile_of(h)), threadIdx.x % 32);
            float sum[BANDS][TOKENS / 2] = {};
            Products products(shared, ring, item.height);
            products.run(sum);
            const Item again = shared.items[told.stage];  // registers are short while products run
#pragma unroll
            for (int h = 0; h < BANDS; h += TOGETHER) store(sum + h, outer + h, s, products, again, h);
#pragma unroll
            for (int i = 0; i < KEPT; ++i) products.release();
        }
        for (; at.more(); at.advance()) fill(s, at.item());
    }

    // Which of the block's bands a team's band h is, and which of its tiles a warp has there.
    __device__ static __forceinline__ i32 band_of(int h) { return threadIdx.x / TEAM * BANDS + h; }
    __device__ static __forceinline__ i32 tile_of(int h) { return band_of(h) * TEAM_WARPS + threadIdx.x / 32 % TEAM_WARPS; }

    // The products of an item: for each 64 k a group of them with each band. Fragments for a group are made while the one before runs.
    struct Products {
        static constexpr int GROUPS = DEPTH * BANDS, HELD = GROUPS > 1 ? 2 : 1;  // in a stage; whose weights are held, but not decoded yet
        Shared& shared;
        Ring<STAGES>& ring;
        const i32 height;
        const SharedWeights mine;  // of the weights of a band
        u32 to_release;            // the first stage that is not given back yet

        __device__ __forceinline__ Products(Shared& shared, Ring<STAGES>& ring, i32 height)
            : shared(shared), ring(ring), height(height), mine(first_of(ELEMENTS), first_of(SCALES), threadIdx.x % 32),
              to_release(ring.stage) {}

        // Where the warp's begin in its first band, of so many bytes for each tile.
        __device__ static __forceinline__ u32 first_of(i32 bytes) {
            return band_of(0) * sizeof(BandWeights) + threadIdx.x / 32 % TEAM_WARPS * DEPTH * bytes;
        }

        // sum[h][4 n + i]: rows r and r + 8 of the warp's tile in a band, and rows 8 n + 2 c, 8 n + 2 c + 1 of activations. Multiplies by
        // as many of these as are needed: only the instruction differs; which one, all of the block agree.
        __device__ __forceinline__ void run(float (&sum)[BANDS][TOKENS / 2]) {
            if constexpr (TOKENS <= 80) run_as_high<8, TOKENS>(sum);
            else run_any(sum);
            wgmma_wait<0>();
            while (to_release != kept(KEPT - 1)) release();
        }

        // Of the stages that are not given back, the last one, or the one before: the team has its weights' places in it for itself.
        __device__ __forceinline__ u32 kept(int before) const {
            return ring.stage > before ? ring.stage - 1 - before : ring.stage + STAGES - 1 - before;
        }

        __device__ __forceinline__ u8* place(int i) const {
            return reinterpret_cast<u8*>(&shared.stage[kept(i % KEPT)].weights[band_of(i / KEPT)]);
        }

        __device__ __forceinline__ void release() {
            barrier_arrive(shared.empty[to_release]);
            if (++to_release == STAGES) to_release = 0;
        }

    private:
        using Fragments = u32[STEPS][4];

        // Few rows: decoding takes longer than products. A loop for each height has fewer instructions than one that branches by height.
        template <int Least, int Most>
        __device__ __forceinline__ void run_as_high(float (&sum)[BANDS][TOKENS / 2]) {
            if constexpr (Least < Most) {
                constexpr int MIDDLE = (Least + Most) / 16 * 8;
                if (height <= MIDDLE) run_as_high<Least, MIDDLE>(sum);
                else run_as_high<MIDDLE + 8, Most>(sum);
            } else {
                Fragments fragments[2];
                Held held[HELD];
                const Stage* stage = &open(held);
                decode_now(fragments[0], held[0]);
                constexpr int LAST = KB % DEPTH;
#pragma unroll 1
                for (i32 kb = 0; kb <= KB - DEPTH; kb += DEPTH) multiply_stage<Most, GROUPS>(sum, fragments, held, stage, kb);
                if constexpr (LAST != 0) multiply_stage<Most, LAST * BANDS>(sum, fragments, held, stage, KB - LAST);
            }
        }

        // The fragments of the stage's first group are made, and after it those of the next stage's. No products run on into the next
        // stage: the compiler, which could not follow which registers they read, would make each wait for the one before.
        template <int Height, int Groups>
        __device__ __forceinline__ void multiply_stage(
            float (&sum)[BANDS][TOKENS / 2], Fragments (&fragments)[2], Held (&held)[HELD], const Stage*& stage, i32 kb) {
            const bool more = kb < KB - DEPTH;
            const u64 tiles = tile_descriptor(shared_address(stage->activations));
#pragma unroll
            for (int g = 0; g < Groups; ++g) {
                multiply<Height>(sum[g % BANDS], fragments[g % 2], tiles + g / BANDS * (TOKENS * TILE_ROW / 16));
                if (g + HELD < Groups) held[g % HELD] = load(*stage, g + HELD);
                if (Groups % 2 != 0 && g + 1 == Groups && more) wgmma_wait<0>();  // the next stage's first fragments are these
                if (g + 1 == Groups && more) stage = &open(held);
                if (g > 0) wgmma_wait<1>();
                if (g == 0 && kb > 0 && (KEPT == 1 || more)) release();
                if (g + 1 < Groups || more) decode_now(fragments[(g + 1) % Groups % 2], held[(g + 1) % Groups % HELD]);
            }
            wgmma_wait<0>();
        }

        // Many rows: products take longer, and run on from stage to stage, while the next fragments are made where there are registers for
        // both. Loops for all heights would be much code.
        __device__ __forceinline__ void run_any(float (&sum)[BANDS][TOKENS / 2]) {
            static_assert(BANDS == 1 || TOKENS <= 80, "registers");
            constexpr int BUFFERS = DEPTH > 1 && TOKENS / 2 + 60 <= MULTIPLY_REGISTERS ? 2 : 1;
            Fragments fragments[BUFFERS];
            Held held[HELD];
            const Stage* stage;
#pragma unroll 1
            for (i32 kb = 0; kb < KB; kb += DEPTH) {
#pragma unroll
                for (int b = 0; b < DEPTH; ++b) {
                    if (KB % DEPTH != 0 && kb + b == KB) break;
                    if (DEPTH == 1) wgmma_wait<0>();  // as in multiply_stage: what is loaded is all but the fragments
                    if (b == 0) stage = &open(held);
                    wgmma_wait<BUFFERS - 1>();
                    if (b == BUFFERS - 1 && kb > 0 && (KEPT == 1 || kb < KB - DEPTH)) release();
                    decode(fragments[b % BUFFERS], held[b]);
                    multiply_any<8, TOKENS>(sum[0], fragments[b % BUFFERS], tile_descriptor(shared_address(stage->activations[b])));
                }
            }
        }

        // The next stage, and what its first groups multiply by; past the last block: not used.
        __device__ __forceinline__ const Stage& open(Held (&held)[HELD]) {
            const Stage& stage = shared.stage[ring.stage];
            barrier_wait(shared.full[ring.stage], ring.parity);
            ring.advance();
#pragma unroll
            for (int g = 0; g < HELD; ++g) held[g] = load(stage, g);
            return stage;
        }

        __device__ __forceinline__ Held load(const Stage& stage, int g) const {
            const BandWeights& from = stage.weights[g % BANDS];
            return mine.load(from.elements[0][g / BANDS], from.first_scales(g / BANDS));
        }

        __device__ static __forceinline__ void decode(Fragments& made, const Held& held) {
#pragma unroll
            for (int v = 0; v < STEPS; ++v) SharedWeights::decode(held, v, made[v]);
        }

        // Here, and not between the products.
        __device__ static __forceinline__ void decode_now(Fragments& made, const Held& held) {
            decode(made, held);
#pragma unroll
            for (int v = 0; v < STEPS; ++v)
#pragma unroll
                for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(made[v][i]));
        }

        template <int Least, int Most>
        __device__ __forceinline__ void multiply_any(float (&sum)[TOKENS / 2], const Fragments& fragments, u64 tile) {
            if constexpr (Least < Most) {
                constexpr int MIDDLE = (Least + Most) / 16 * 8;
                if (height <= MIDDLE) multiply_any<Least, MIDDLE>(sum, fragments, tile);
                else multiply_any<MIDDLE + 8, Most>(sum, fragments, tile);
            } else {
                wgmma_fence();
#pragma unroll
                for (int v = 0; v < STEPS; ++v) wgmma<typename Segment::Activation, Most>(sum, fragments[v], tile | 2 * v);  // fewer instructions here than +
                wgmma_commit();
            }
        }

        template <int Height>
        __device__ static __forceinline__ void multiply(float (&sum)[TOKENS / 2], const Fragments& fragments, u64 tile) {
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < STEPS; ++v) wgmma<typename Segment::Activation, Height>(sum, fragments[v], tile + 2 * v);  // fewer instructions here than |
            wgmma_commit();
        }
    };

    // Results ----------------------------------------------------------------------------------------------------------

    // Of the bands from h on that make a result.
    __device__ static __forceinline__ void store(
        const float (*sum)[TOKENS / 2], const float (*outer)[2], const Segment& s, const Products& products, const Item& item, int h) {
        const i32 band = band_of(h);
        Part<Segment, TOGETHER>::sync();  // all have read their weights
        Part<Segment, TOGETHER> part{s, item, item.column_block * COLUMNS + band / TOGETHER * Turned::COLUMNS};
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) part.factor[i][upper] = Reader::FACTOR * outer[i][upper];
        const Turned turned(part);
        turned.put(products.place(0), sum, 0);
#pragma unroll
        for (int chunk = 0; chunk < TOKENS; chunk += CHUNK) {
            if (chunk >= part.item.height) break;
            const int next = chunk + CHUNK;
            part.sync();
            const auto taken = turned.take(products.place(chunk / CHUNK % PLACES));
            if (PLACES == 1) part.sync();
            if (next < TOKENS) turned.put(products.place(next / CHUNK % PLACES), sum, next);
            turned.store(taken, chunk);
        }
    }

    // Rows that belong to no group.
    __device__ static __forceinline__ void fill(const Segment& s, const Item& item) {
        constexpr int V = 8;
        const i32 pieces = (item.span.end - item.span.first) * (COLUMNS / V);
        for (i32 i = threadIdx.x; i < pieces; i += TEAM * TEAMS) {
            const float zero[Segment::F][V] = {};
            const InTurn at{item.column_block * COLUMNS + i % (COLUMNS / V) * V};
            store_columns<V>(s, item.span.first + i / (COLUMNS / V), Segment::G, at, zero);
        }
    }
};

}  // namespace
