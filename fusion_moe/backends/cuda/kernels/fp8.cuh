// Grouped products of e4m3 codes with e4m3 codes: rows with a scale for 128 columns, matrices with
// a scale for 128 columns of each row, or one for many rows, both through shared memory to wgmma,
// by product_wgmma.cuh. Rows come in boxes too: what threads copy piece by piece takes shared
// memory longer, whose 128 bytes a cycle bound the kernel. So rows that a product gathers are
// sorted before.
//
// After each K block of 128 columns a consumer multiplies sums by both scales. It multiplies half
// of a tile's columns at a time, since registers hold only one such set of sums beside the others;
// meanwhile the other consumer keeps the tensor cores busy.
//
// Columns of a tile that follow each other in runs of 32 share a scale. A half has the columns of
// the product that make HALF_COLUMNS columns of a result. Of a tile with at most 64 rows, or
// columns of one half, only these are copied and multiplied.
#pragma once

#include "codes.cuh"
#include "product_wgmma.cuh"

namespace {

// Two 16-bit numbers in a word. The assembler then rounds both by one instruction.
template <class T>
__device__ __forceinline__ u32 pair_of(T low, T high) {
    u32 both;
    asm("mov.b32 %0, {%1, %2};" : "=r"(both) : "h"(low.bits), "h"(high.bits));
    return both;
}

// The largest number of the four lanes that share a row.
__device__ __forceinline__ u32 most_of_quad(u32 most) {
    most = max(most, __shfl_xor_sync(WHOLE_WARP, most, 1));
    return max(most, __shfl_xor_sync(WHOLE_WARP, most, 2));
}

// Of four lanes that have pairs of bf16 numbers in each of four blocks of eight columns, lane q
// gets the codes of block q.
__device__ __forceinline__ Vector<u32, 2> codes_of_quad(const u32 (&pair)[4], float over) {
    u32 codes[4];
#pragma unroll
    for (int b = 0; b < 4; ++b)
        codes[b] = e4m3_pair(__uint_as_float(pair[b] << 16) * over,
                             __uint_as_float(pair[b] & 0xFFFF0000) * over);
    const bool odd = threadIdx.x & 1;
    u32 low = codes[0] | codes[1] << 16, high = codes[2] | codes[3] << 16;
    // two blocks: of a lower lane, and of a higher one
    change_places(low, high, threadIdx.x & 2, 2);
    u32 even_block = __byte_perm(low, high, 0x5410), odd_block = __byte_perm(low, high, 0x7632);
    change_places(even_block, odd_block, odd, 1);
    return {
        {__byte_perm(even_block, odd_block, 0x5410), __byte_perm(even_block, odd_block, 0x7632)}};
}

// Four 8 x 8 matrices of 16-bit numbers; a lane's address is that of a row of one.
__device__ __forceinline__ void store_matrices(u32 to, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

__device__ __forceinline__ Vector<u32, 4> load_shared(u32 from) {
    Vector<u32, 4> x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.at[0]), "=r"(x.at[1]), "=r"(x.at[2]), "=r"(x.at[3])
                 : "r"(from)
                 : "memory");
    return x;
}

template <class Segment>
struct Fp8Gemm {
    static constexpr int TILE_M = 128, TILE_N = 256, HALF = 128, K_BLOCK = 128, RUN_COLUMNS = 32;
    using Schedule = FpropSchedule<Segment, TILE_M, TILE_N, 64>;
    using Scheduler = typename Schedule::Scheduler;
    static constexpr int TILE_COLUMNS = Schedule::TILE_COLUMNS, HALF_COLUMNS = TILE_COLUMNS / 2;
    static constexpr i32 N_TILES = Schedule::N_TILES,
                         K_BLOCKS = (Segment::K + K_BLOCK - 1) / K_BLOCK;
    static constexpr i32 LAST_COLUMNS = Segment::WIDTH - (N_TILES - 1) * TILE_COLUMNS;
    static constexpr bool LAST_IS_HALF = LAST_COLUMNS <= HALF_COLUMNS;
    static constexpr int PRODUCERS = GEMM_PRODUCERS, MOST_STAGES = 6;
    static_assert(PRODUCERS == TILE_M, "each producer thread copies the scale of a row");
    static_assert(HALF_COLUMNS % RUN_COLUMNS == 0, "one or two columns make one of a result");
    static_assert(Segment::K % 16 == 0, "rows are aligned");
    static_assert(Segment::RESULTS == 1, "accumulators leave no registers for more");
    // Whether results go through shared memory: that of a tile's last stage.
    static constexpr bool STAGES_RESULTS =
        !Segment::QUANTIZES && sizeof(typename Segment::Element) == 2;
    static constexpr int CONSUMER_REGISTERS = 216, PRODUCER_REGISTERS = 72;

    struct alignas(16) Scales {
        float a[TILE_M], b[TILE_N / RUN_COLUMNS];
    };
    using Ring = GemmRing<Segment, TILE_M, TILE_N, PRODUCERS,
                          int(sizeof(Scheduler) + MOST_STAGES * sizeof(Scales) + 512), false, true,
                          true, TileQueue<8, WorkTile>>;
    using Stage = typename Ring::Stage;
    static_assert(Ring::STAGES <= MOST_STAGES);

    struct Shared {
        Ring ring;
        Scales scales[Ring::STAGES];
        u32 most[GEMM_CONSUMERS][64];
        Scheduler scheduler;
    };

  private:
    __device__ static __forceinline__ bool is_low(const WorkTile& tile) {
        return tile.m_tile.end - tile.m_tile.first <= TILE_M / 2;
    }
    __device__ static __forceinline__ bool is_half(const WorkTile& tile) {
        return LAST_IS_HALF && tile.n_tile == N_TILES - 1;
    }

    // The row of the matrix that is column c of a tile.
    __device__ static __forceinline__ i32 column(i32 n_tile, i32 c) {
        return Segment::column(c % HALF / HALF_COLUMNS,
                               n_tile * TILE_COLUMNS + c / HALF * HALF_COLUMNS + c % HALF_COLUMNS);
    }

    // Where the scales of column c of a tile are, or of the last one.
    __device__ static __forceinline__ auto scales_of_column(const Segment& s, const WorkTile& tile,
                                                            i32 c) {
        const i32 group = max(0, min(tile.m_tile.group, Segment::GROUPS - 1)),
                  row = min(column(tile.n_tile, c), Segment::N - 1);
        return s.b_scales(group) + Segment::b_scale_of(row);
    }

  public:
    // Copies
    // ---------------------------------------------------------------------------------------------

    template <class Base>
    struct Copies : Base {
        using Base::s, Base::shared, Base::thread, Base::producer, Base::a_map, Base::b_map;
        static constexpr int EACH = TILE_N / PRODUCERS;  // columns of a thread
        WorkTile last{{-1}};
        float own[EACH] = {};  // scales of its columns in the first K block

        __device__ __forceinline__ void copy(const WorkTile& tile) {
            finish();
            copy_stages(tile);
            last = tile;
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                own[i] = s.b_scale(*scales_of_column(s, tile, thread + PRODUCERS * i));
        }

        // Reports columns of a run that do not share a scale, of the last tile: nobody waits for
        // scales that are only checked. Those of other K blocks are not looked at: a weight whose
        // rows have scales of their own differs here too.
        __device__ __forceinline__ void finish() const {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const i32 c = thread + PRODUCERS * i, j = last.n_tile * TILE_COLUMNS +
                                                          c / HALF * HALF_COLUMNS +
                                                          c % HALF_COLUMNS;
                const u32 scale = __float_as_uint(own[i]),
                          first = __shfl_sync(WHOLE_WARP, scale, 0);
                if (u32(last.m_tile.group) < Segment::GROUPS && j < Segment::WIDTH &&
                    scale != first)
                    report(s.error, BAD_SCALE, last.m_tile.group, column(last.n_tile, c));
            }
        }

        __device__ __forceinline__ void copy_stages(const WorkTile& tile) {
            if (!Schedule::grouped(tile)) {
                producer.open();
                if (thread == 0) producer.expect(0);
                producer.close(false);
                return;
            }
            const int rows = is_low(tile) ? TILE_M / 2 : TILE_M,
                      columns = is_half(tile) ? HALF : TILE_N;
            const float* a_scales =
                s.scales_of_rows() +
                i64(min(tile.m_tile.first + thread, tile.m_tile.end - 1)) * K_BLOCKS;
            const i32 run = min(thread, TILE_N / RUN_COLUMNS - 1) * RUN_COLUMNS;
            const auto* b_scales = scales_of_column(s, tile, run);
            float a_scale = a_scales[0], b_scale = s.b_scale(b_scales[0]);
#pragma unroll 1
            for (i32 kb = 0; kb < K_BLOCKS; ++kb) {
                Stage& stage = producer.open();
                Scales& scales = shared.scales[producer.filling.stage];
                if (thread == 0) {
                    u64& barrier = producer.expect(TILE_ROW_BYTES * (rows + columns));
#pragma unroll
                    for (int r = 0; r < TILE_M; r += TILE_M / 2)
                        if (r < rows)
                            copy_box(shared_address(stage.a) + r * TILE_ROW_BYTES, *a_map,
                                     kb * K_BLOCK, tile.m_tile.first + r, barrier);
#pragma unroll
                    for (int c = 0; c < TILE_N; c += Segment::BOX_ROWS)
                        if (c < columns)
                            copy_box(shared_address(stage.b) + c * TILE_ROW_BYTES, *b_map,
                                     kb * K_BLOCK, column(tile.n_tile, c), tile.m_tile.group,
                                     barrier);
                }
                scales.a[thread] = a_scale;
                if (thread < TILE_N / RUN_COLUMNS) scales.b[thread] = b_scale;
                const i32 next = min(kb + 1, K_BLOCKS - 1);
                a_scale = a_scales[next],
                b_scale = s.b_scale(b_scales[next * Segment::NEXT_B_SCALE]);
                producer.close(false);
            }
        }
    };

    // Sums
    // ---------------------------------------------------------------------------------------------

  private:
    // What a consumer has of a tile: 64 rows, or, of a tile with no more, one half of its columns.
    // GROUPED: whether its rows are of a group, so that the compiler need not ask before each load.
    template <bool SHARES_ROWS, int HALVES, bool GROUPED = true>
    struct Part {
        static constexpr bool SHARED = SHARES_ROWS;
        static constexpr int COLUMNS = HALVES * HALF_COLUMNS;
        // whether the last ones have columns past the result's
        static constexpr bool RAGGED =
            SHARES_ROWS ? LAST_COLUMNS < TILE_COLUMNS
                        : LAST_IS_HALF == (HALVES == 1) && LAST_COLUMNS < COLUMNS;
        const Segment& s;
        Shared& shared;
        const WorkTile& tile;
        // row: the first of the thread's two rows of a tile, 8 apart. The compiler sees that all of
        // a warp have one consumer.
        const i32 consumer = __shfl_sync(WHOLE_WARP, threadIdx.x / 128, 0);
        const i32 row =
            (SHARES_ROWS ? 0 : 64 * consumer) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        float sum[HALVES][HALF / 2] = {};

        struct Promote {
            const Part& part;
            float a[2];
            Vector<float, 4> b;

            __device__ __forceinline__ int a_row(int) const {
                return SHARES_ROWS ? 0 : 64 * part.consumer;
            }
            __device__ __forceinline__ int b_row(int i) const {
                return HALF * (SHARES_ROWS ? part.consumer : i);
            }
            __device__ __forceinline__ void before(int i, u32 stage) {
                const Scales& scales = part.shared.scales[stage];
                if (i == 0) a[0] = scales.a[part.row], a[1] = scales.a[part.row + 8];
            }
            __device__ __forceinline__ void meanwhile(int i, u32 stage) {
                b = load_vector<4>(part.shared.scales[stage].b + b_row(i) / RUN_COLUMNS);
            }
            __device__ __forceinline__ float factor(int c) const {
                return a[c / 2 % 2] * b.at[2 * c / RUN_COLUMNS];
            }
        };

        // The last stage is not released if results are to go through it.
        __device__ __forceinline__ void multiply(typename Ring::Consumer& mainloop) {
            mainloop.multiply_codes(sum, K_BLOCKS, Promote{*this}, STAGES_RESULTS);
        }

        __device__ __forceinline__ i64 group() const {
            const i64 g = tile.m_tile.group;
            if constexpr (GROUPED) __builtin_assume(g < Segment::GROUPS);
            return g;
        }

        // The first of the columns of a result.
        __device__ __forceinline__ i32 column() const {
            return tile.n_tile * TILE_COLUMNS + (SHARES_ROWS ? consumer * HALF_COLUMNS : 0);
        }

        // Element of the e-th of two columns in block b of eight of the i-th 32. h: which row.
        __device__ __forceinline__ auto element(i64 m, int i, int b, int e, int h) const {
            constexpr int IN_HALF = HALF_COLUMNS / 32;
            float p[Segment::COLUMNS_PER_RESULT];
#pragma unroll
            for (int f = 0; f < Segment::COLUMNS_PER_RESULT; ++f)
                p[f] = sum[i / IN_HALF][4 * (4 * (f * IN_HALF + i % IN_HALF) + b) + 2 * h + e];
            const i32 j = column() + 32 * i + 8 * b + threadIdx.x % 4 * 2 + e;
            return s.template result<0>(m, group(), RAGGED ? min(j, Segment::WIDTH - 1) : j, p);
        }

        __device__ static __forceinline__ bool in_width(i32 j) {
            return !RAGGED || j < Segment::WIDTH;
        }

        // Pairs of 16-bit elements of 32 columns: those of each block of eight.
        __device__ __forceinline__ void pairs(u32 (&found)[4], i64 m, int i, int h) const {
#pragma unroll
            for (int b = 0; b < 4; ++b)
                found[b] = pair_of(element(m, i, b, 0, h), element(m, i, b, 1, h));
        }

        // Of the thread's rows: the number of one, and of one that is there.
        __device__ __forceinline__ i32 own(int h) const { return tile.m_tile.first + row + 8 * h; }
        __device__ __forceinline__ i32 first_of_warp() const {
            return tile.m_tile.first + row - threadIdx.x % 32 / 4;
        }
        __device__ __forceinline__ bool has(int h) const { return own(h) < tile.m_tile.end; }
        __device__ __forceinline__ i64 safe(int h) const {
            return min(own(h), tile.m_tile.end - 1);
        }

        // memory: what nobody reads any more, 2 KB for each warp.
        __device__ __forceinline__ void store(u32 memory) const {
            auto* array = s.template array<0>();
            if constexpr (STAGES_RESULTS) {
#pragma unroll
                for (int c = 0; c < COLUMNS; c += 64) store_64(array, memory, c);
            } else {
#pragma unroll
                for (int i = 0; i < COLUMNS / 32; ++i) store_32(array, i);
            }
        }

        // Elements of 64 columns, from the c-th on, as rows of 128 bytes, swizzled. Both rows'
        // elements are made before any is stored: what columns read is then read once.
        template <class T>
        __device__ __forceinline__ void store_64(T* array, u32 memory, int c) const {
            const i32 lane = threadIdx.x % 32;
            u32 x[4][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 own_row[2][4];
#pragma unroll
                for (int h = 0; h < 2; ++h) pairs(own_row[h], safe(h), c / 32 + i, h);
#pragma unroll
                for (int v = 0; v < 8; ++v) x[2 * i + v / 4][v % 4] = own_row[v % 2][v / 2];
            }
            __syncwarp();
#pragma unroll
            for (int v = 0; v < 4; ++v)
                store_matrices(memory + swizzled(lane % 16, 2 * v + lane / 16), x[v]);
            __syncwarp();
            const i32 j = column() + c + lane % 8 * 8;
#pragma unroll
            for (int r = 0; r < 16; r += 4) {
                const i32 m = first_of_warp() + r + lane / 8;
                const Vector<u32, 4> eight = load_shared(memory + swizzled(r + lane / 8, lane % 8));
                if (m < tile.m_tile.end && in_width(j))
                    store_vector<4>(reinterpret_cast<u32*>(array + i64(m) * Segment::WIDTH + j),
                                    eight);
            }
        }

        // Elements of four bytes, as the threads have them, two at a time.
        template <class T>
        __device__ __forceinline__ void store_32(T* array, int i) const {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const i32 j = column() + 32 * i + 8 * b + threadIdx.x % 4 * 2;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const Vector<T, 2> two{
                        {element(safe(h), i, b, 0, h), element(safe(h), i, b, 1, h)}};
                    if (has(h) && in_width(j))
                        store_vector<2>(array + i64(own(h)) * Segment::WIDTH + j, two);
                }
            }
        }

        // Stores rows as codes, each block of 128 columns with its scale. If a consumer has half of
        // a block, it asks the other one for the largest number of its half.
        __device__ __forceinline__ void store_codes() const {
            constexpr bool SHARES_BLOCK = SHARES_ROWS && COLUMNS < K_BLOCK;
            constexpr int PARTS = (COLUMNS < K_BLOCK ? COLUMNS : K_BLOCK) / 32;
            constexpr i32 BLOCKS = (Segment::WIDTH + K_BLOCK - 1) / K_BLOCK;
            if constexpr (SHARES_BLOCK) named_barrier_sync(1, 128 * GEMM_CONSUMERS);
#pragma unroll
            for (int block = 0; block < COLUMNS / (32 * PARTS); ++block) {
                const i32 first = column() + block * K_BLOCK;
                u32 x[2][PARTS][4], most[2] = {};
#pragma unroll
                for (int i = 0; i < PARTS; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        pairs(x[h][i], safe(h), block * PARTS + i, h);
#pragma unroll
                        for (int b = 0; b < 4; ++b)
                            if (in_width(first + 32 * i + 8 * b))
                                most[h] = __vmaxu2(most[h], x[h][i][b] & 0x7FFF7FFF);
                    }
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    most[h] = most_of_quad(max(most[h] << 16, most[h] & 0x7FFF0000));
                if constexpr (SHARES_BLOCK) {
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        if (threadIdx.x % 4 == 0) shared.most[consumer][row + 8 * h] = most[h];
                    named_barrier_sync(1, 128 * GEMM_CONSUMERS);
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        most[h] = max(most[h], shared.most[1 - consumer][row + 8 * h]);
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const typename Segment::Scale by(most[h]);
                    u8* to = s.codes() + i64(own(h)) * Segment::WIDTH;
#pragma unroll
                    for (int i = 0; i < PARTS; ++i) {
                        const i32 j = first + 32 * i + threadIdx.x % 4 * 8;
                        const Vector<u32, 2> codes = codes_of_quad(x[h][i], by.over);
                        if (has(h) && in_width(j))
                            store_vector<2>(reinterpret_cast<u32*>(to + j), codes);
                    }
                    if (has(h) && in_width(first) && threadIdx.x % 4 == 0 && first % K_BLOCK == 0)
                        s.scales()[i64(own(h)) * BLOCKS + first / K_BLOCK] = by.stored;
                }
            }
        }
    };

  public:
    template <class Base>
    struct Sums : Base {
        using Base::s, Base::shared, Base::mainloop;

        __device__ __forceinline__ void compute(const WorkTile& tile) {
            if (!Schedule::grouped(tile))
                store_ungrouped(tile);
            else if (is_low(tile))
                compute_part<true, 1>(tile);
            else if (is_half(tile))
                compute_part<false, 1>(tile);
            else
                compute_part<false, 2>(tile);
        }

        template <bool SHARES_ROWS, int HALVES>
        __device__ __forceinline__ void compute_part(const WorkTile& tile) {
            Part<SHARES_ROWS, HALVES> part{s, shared, tile};
            part.multiply(mainloop);
            if constexpr (STAGES_RESULTS) named_barrier_sync(3 + part.consumer, 128);
            store(part);
            if constexpr (STAGES_RESULTS) release();
        }

        // Rows of no group: results of sums that are zero. They have a stage too.
        __device__ __forceinline__ void store_ungrouped(WorkTile tile) {
            const i32 end = tile.m_tile.end;
            mbarrier_wait(shared.ring.full[mainloop.reading.stage], mainloop.reading.parity);
#pragma unroll 1
            for (; tile.m_tile.first < end; tile.m_tile.first = tile.m_tile.end) {
                tile.m_tile.end = min(tile.m_tile.first + TILE_M / 2, end);
                store(Part<true, 1, false>{s, shared, tile});
            }
            release();
        }

        // Through what nobody else reads any more of the current stage: the consumer's rows, or
        // columns.
        template <class Part>
        __device__ __forceinline__ void store(const Part& part) const {
            if constexpr (Segment::QUANTIZES) {
                part.store_codes();
            } else {
                const Stage& stage = shared.ring.stage[mainloop.reading.stage];
                const u32 own =
                    Part::SHARED ? shared_address(stage.b) + part.consumer * HALF * TILE_ROW_BYTES
                                 : shared_address(stage.a) + part.consumer * 64 * TILE_ROW_BYTES;
                part.store(own + threadIdx.x / 32 % 4 * 16 * TILE_ROW_BYTES);
            }
        }

        // Lets producers write to the current stage, which this thread may have written to.
        __device__ __forceinline__ void release() {
            fence_proxy_async();
            shared.ring.release(mainloop.reading.stage);
            mainloop.reading.advance();
        }
    };
};

}  // namespace
