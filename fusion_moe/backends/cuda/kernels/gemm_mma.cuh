// The products of gemm.cuh by mma, for GPUs without wgmma: fprop, dgrad and wgrad.
//
// A block's eight warps both copy and multiply. While they multiply a stage of the ring, copies of
// the next ones are in flight (`cp.async`), also those of the work tile after this one: copying
// runs ahead over the ends of work tiles, so that nothing waits for memory in an epilogue. Tiles
// lie in shared memory as in gemm.cuh, from where `ldmatrix` makes fragments; it transposes those
// of operands whose rows are contracted.
//
//     GroupedGemmMma  [M/g, k] x [G, n, k] or [G, k, n] -> [M/g, n]   fprop, dgrad
//     GroupedWgradMma [M/g, n] x [M/g, k] -> [G, n, k]                wgrad
#pragma once

#include "copy_ring.cuh"
#include "gemm_tiles.cuh"

namespace {

constexpr int MMA_WARPS = 8, MMA_THREADS = 32 * MMA_WARPS;

// A warp's part of a tile. RESULTS: columns that a result reads, all of which a warp has.
template <int TILE_M, int TILE_N, int RESULTS = 1>
struct WarpTile {
    static constexpr int COLUMNS = RESULTS > 2 ? 32 * RESULTS : 64, EACH = COLUMNS / RESULTS;
    static constexpr int ACROSS = TILE_N / COLUMNS, ROWS = TILE_M / (MMA_WARPS / ACROSS);
    static constexpr int FRAGMENTS = ROWS / 16;
    static_assert(TILE_N % COLUMNS == 0 && MMA_WARPS % ACROSS == 0 && ROWS % 16 == 0,
                  "warps share a tile evenly");
    using Sums = float[FRAGMENTS][COLUMNS / 2];

    // Where a warp's rows begin, and which part of the columns it has.
    __device__ static __forceinline__ i32 row() { return threadIdx.x / 32 / ACROSS * ROWS; }
    __device__ static __forceinline__ i32 part() { return threadIdx.x / 32 % ACROSS; }

    // Adds the product of a K block, to the sums of COUNT fragments from `first` on. A_MN, B_MN:
    // whether the rows of an operand's tile are those that are contracted.
    template <class T, bool A_MN, bool B_MN, int COUNT>
    __device__ static __forceinline__ void multiply(float (&sum)[COUNT][COLUMNS / 2], u32 a, u32 b,
                                                    int first = 0) {
        const i32 upper = threadIdx.x % 16 / 8, second = threadIdx.x % 32 / 16;
#pragma unroll
        for (int k = 0; k < GEMM_K_BLOCK; k += 16) {
            u32 rows[COUNT][4];
#pragma unroll
            for (int r = 0; r < COUNT; ++r)
                load_matrices<A_MN>(
                    rows[r], piece<A_MN>(a, row() + 16 * (first + r) + 8 * upper, k + 8 * second));
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 16) {
                const i32 column = c / EACH * (TILE_N / RESULTS) + part() * EACH + c % EACH;
                u32 columns[4];
                load_matrices<B_MN>(columns, piece<B_MN>(b, column + 8 * second, k + 8 * upper));
#pragma unroll
                for (int r = 0; r < COUNT; ++r)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        mma_16x8x16<T>(reinterpret_cast<float (&)[4]>(sum[r][c / 2 + 4 * i]),
                                       rows[r], columns[2 * i], columns[2 * i + 1]);
            }
        }
    }

  private:
    // Where the lane's row of 16 bytes of a matrix lies that begins at row `n`, or column if MN, of
    // a tile, and at `k`, multiples of 8.
    template <bool MN>
    __device__ static __forceinline__ u32 piece(u32 tile, i32 n, i32 k) {
        const i32 lane = threadIdx.x % 8;
        return MN ? tile + n / 64 * PIECE_BYTES + swizzled(k + lane, n % 64 / 8)
                  : tile + swizzled(n + lane, k / 8);
    }
};

// What a block goes through: the K blocks of its work tiles, of which it copies those that it
// multiplies soon. A Product says what a work tile is, how a thread copies its part of a K block,
// and what becomes of sums:
//
//     Scheduler, build(s, scheduler, scratch)     work tiles, by all threads
//     Tile, more(scheduler, number), tile(...)    the number-th
//     k_blocks(tile)                              at least one
//     Copies: begin(tile), copy(stage, kb), finish(stage)     finish: after the next product
//     add(sum, tile, kb, a, b), store(s, tile, sum)
template <class Product, class Segment, int TILE_M, int TILE_N>
class MmaPipeline {
    struct alignas(1024) Stage {
        u8 a[TILE_M * TILE_ROW_BYTES], b[TILE_N * TILE_ROW_BYTES];
    };
    using Scheduler = typename Product::Scheduler;
    using Tile = typename Product::Tile;
    static constexpr int NUMBERS = 8;  // that a block knows: more than it is ahead
    static constexpr int BESIDE = int(sizeof(Scheduler)) + NUMBERS * int(sizeof(i32));
    static constexpr int FIT = (Segment::MAX_SHARED_BYTES - BESIDE) / int(sizeof(Stage));
    static constexpr int STAGES = FIT < 4 ? FIT : 4;
    static_assert(STAGES >= 2 && STAGES < NUMBERS, "two stages at least");

    struct Shared {
        Stage stage[STAGES];
        Scheduler scheduler;
        i32 number[NUMBERS];
    };

  public:
    __device__ static void run(const Segment& s) {
        extern __shared__ __align__(1024) u8 memory[];
        Shared& shared = *reinterpret_cast<Shared*>(memory);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        Product::build(s, shared.scheduler, reinterpret_cast<i32*>(shared.stage));
        Ahead ahead(s, shared);
        const auto copy = [&](i32 stage, i32) { ahead.copy(stage); };
        CopyRing<STAGES> ring;
        ring.begin([&](i32 stage, i32) { ahead.copy(stage), ahead.finish(); });
        for (u32 i = 0;; ++i) {
            const i32 number = shared.number[i % NUMBERS];
            if (!Product::more(shared.scheduler, number)) return;
            const Tile tile = Product::tile(shared.scheduler, number);
            typename Product::Sum to(s, tile);
            typename Product::Sums sum = {};
#pragma unroll 1
            for (i32 kb = 0; kb < Product::k_blocks(tile); ++kb) {
                ring.next(copy);
                const Stage& stage = shared.stage[ring.stage()];
                to.add(sum, kb, shared_address(stage.a), shared_address(stage.b));
                ahead.finish();
            }
            to.store(sum);
        }
    }

  private:
    // The copies of the K block STAGES - 1 ahead, in the block's work tiles: its own, then those
    // that a thread claims from a counter, one ahead.
    class Ahead {
        Shared& shared_;
        typename Product::Copies copies_;
        i32* const counter_;
        u32 asked_ = 0;
        i32 stage_ = 0, claimed_ = 0, kb_ = 0, k_blocks_ = 0;
        bool more_ = true;

      public:
        __device__ __forceinline__ Ahead(const Segment& s, Shared& shared)
            : shared_(shared), copies_(s), counter_(s.tile_counter) {
            if (threadIdx.x == 0) shared.number[0] = blockIdx.x, claim();
        }

        __device__ __forceinline__ void copy(i32 stage) {
            stage_ = stage;
            if (more_ && kb_ == k_blocks_) begin();
            if (more_) copies_.copy(shared_address(shared_.stage[stage].a), to_b(), kb_);
        }

        __device__ __forceinline__ void finish() {
            if (more_) copies_.finish(to_b()), ++kb_;
        }

      private:
        __device__ __forceinline__ u32 to_b() const {
            return shared_address(shared_.stage[stage_].b);
        }
        __device__ __forceinline__ void claim() { claimed_ = gridDim.x + atomicAdd(counter_, 1); }

        // Begins the next work tile.
        __device__ __forceinline__ void begin() {
            __syncthreads();  // the number is there
            const i32 number = shared_.number[asked_ % NUMBERS];
            ++asked_;
            if (threadIdx.x == 0) shared_.number[asked_ % NUMBERS] = claimed_, claim();
            more_ = Product::more(shared_.scheduler, number);
            if (!more_) return;
            const Tile tile = Product::tile(shared_.scheduler, number);
            copies_.begin(tile);
            kb_ = 0, k_blocks_ = Product::k_blocks(tile);
        }
    };
};

// fprop and dgrad
// -------------------------------------------------------------------------------------------------

template <class Segment, int TILE_M, int TILE_N>
struct GroupedGemmMma {
    static constexpr int RESULTS = Segment::COLUMNS_PER_RESULT, TILE_COLUMNS = TILE_N / RESULTS;
    static constexpr int N_TILES = (Segment::WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS;
    using Warp = WarpTile<TILE_M, TILE_N, RESULTS>;
    using Sums = typename Warp::Sums;
    using Part = GemmPart<Segment, TILE_N, Warp::COLUMNS>;
    using Weight = typename WeightTilesOf<Segment, TILE_N, MMA_THREADS, false>::type;
    using Runs = typename Weight::Runs;
    using Scheduler = TileScheduler<Segment::GROUPS, TILE_M, 1>;
    using WorkTiles = typename Scheduler::WorkTiles;
    using Tile = WorkTile;

    __device__ static void run(const Segment& s, const TensorMap*, const TensorMap*) {
        MmaPipeline<GroupedGemmMma, Segment, TILE_M, TILE_N>::run(s);
    }

    __device__ static void build(const Segment& s, Scheduler& scheduler, i32* scratch) {
        scheduler.build(s.ends, i32(s.rows()), N_TILES, Segment::SIZE_CLASS,
                        blockIdx.x == 0 ? s.error : nullptr, scratch);
    }

    __device__ static __forceinline__ WorkTiles at(const Scheduler& scheduler, i32 number) {
        WorkTiles tiles(scheduler);
        tiles.go_to(number);
        return tiles;
    }
    __device__ static __forceinline__ bool more(const Scheduler& scheduler, i32 number) {
        return at(scheduler, number).more();
    }
    __device__ static __forceinline__ Tile tile(const Scheduler& scheduler, i32 number) {
        return at(scheduler, number).current();
    }

    // Rows of no group are zeros, for which nothing is copied or multiplied.
    __device__ static __forceinline__ bool grouped(const Tile& tile) {
        return tile.m_tile.group < Segment::GROUPS;
    }
    __device__ static __forceinline__ i32 k_blocks(const Tile& tile) {
        return grouped(tile) ? Runs::COUNT * Runs::BLOCKS : 1;
    }

    class Copies {
        static constexpr int STEP = MMA_THREADS / 8, ROWS = TILE_M / STEP;  // every STEP-th
        const Segment& s_;
        Weight weight_;
        Runs runs_;
        i32 row_[ROWS];
        bool grouped_ = false;
        typename Weight::Block block_;

      public:
        __device__ __forceinline__ explicit Copies(const Segment& s)
            : s_(s), weight_(s, threadIdx.x), runs_(s, 0) {}

        __device__ __forceinline__ void begin(const Tile& tile) {
            grouped_ = grouped(tile);
            if (!grouped_) return;
            const i32 first = tile.m_tile.first + threadIdx.x / 8, end = tile.m_tile.end;
            i64 index[ROWS] = {};  // all are read before any is needed
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (first + STEP * i < end) index[i] = s_.a_index(first + STEP * i);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                row_[i] = first + STEP * i < end ? i32(s_.a_row_of(index[i])) : -1;
            runs_ = Runs(s_, tile.m_tile.group);
            weight_.begin(tile.m_tile.group, tile.n_tile);
        }

        __device__ __forceinline__ void copy(u32 a, u32 b, i32 kb) {
            if (!grouped_) return;
            const i32 piece = threadIdx.x % 8, k = runs_.first_row(kb) + 8 * piece;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                copy_piece<Segment::K>(a + swizzled(threadIdx.x / 8 + STEP * i, piece),
                                       s_.a_matrix(), row_[i], k, row_[i] >= 0);
            if constexpr (Segment::B_PACKED)
                block_ = weight_.load(runs_, kb);
            else
                weight_.copy(runs_, b, kb);
        }

        __device__ __forceinline__ void finish(u32 b) const {
            if constexpr (Segment::B_PACKED)
                if (grouped_) weight_.store(b, block_);
        }
    };

    class Sum {
        const Segment& s_;
        const Tile& tile_;
        const Runs runs_;
        const bool active_;

      public:
        __device__ __forceinline__ Sum(const Segment& s, const Tile& tile)
            : s_(s),
              tile_(tile),
              runs_(s, grouped(tile) ? tile.m_tile.group : 0),
              active_(grouped(tile) && tile.m_tile.first + Warp::row() < tile.m_tile.end) {}

        __device__ __forceinline__ void add(Sums& sum, i32 kb, u32 a, u32 b) const {
            if (!active_) return;
            Warp::template multiply<typename Segment::Activation, false, Segment::B_MN>(sum, a, b);
            if constexpr (Segment::B_PACKED) {
                if ((kb + 1) % Runs::BLOCKS != 0) return;
                const float factor = runs_.factor(kb / Runs::BLOCKS);
#pragma unroll
                for (auto& rows : sum)
#pragma unroll
                    for (float& each : rows) each *= factor;
            }
        }

        __device__ __forceinline__ void store(Sums& sum) const {
#pragma unroll
            for (int r = 0; r < Warp::FRAGMENTS; ++r) {
                const i32 row = tile_.m_tile.first + Warp::row() + 16 * r,
                          first = row - 16 * i32(threadIdx.x / 32 % 4);
                if constexpr (Segment::ADDED > 0) {
                    if (active_) Part::add(s_, tile_, first, sum[r], Warp::part());
                }
                Part::store(s_, tile_, first, sum[r], Warp::part());
            }
        }
    };
};

// wgrad
// -------------------------------------------------------------------------------------------------

template <class Segment, int TILE_M, int TILE_N>
struct GroupedWgradMma {
    using Warp = WarpTile<TILE_M, TILE_N>;
    using Sums = typename Warp::Sums;
    using Scheduler = WgradScheduler<Segment::GROUPS>;
    using Tile = WgradTile<Segment, TILE_M, TILE_N>;

    __device__ static void run(const Segment& s, const TensorMap*, const TensorMap*) {
        MmaPipeline<GroupedWgradMma, Segment, TILE_M, TILE_N>::run(s);
    }

    __device__ static void build(const Segment& s, Scheduler& scheduler, i32*) {
        scheduler.build(s.ends, i32(s.rows()), blockIdx.x == 0 ? s.error : nullptr);
    }
    __device__ static __forceinline__ bool more(const Scheduler&, i32 number) {
        return number < Segment::GROUPS * Tile::EACH_GROUP;
    }
    __device__ static __forceinline__ Tile tile(const Scheduler& scheduler, i32 number) {
        return Tile(scheduler, number);
    }

    // Of a group without rows, one of zeros.
    __device__ static __forceinline__ i32 k_blocks(const Tile& tile) {
        return max(1, tile.k_blocks());
    }

    // Rows that an index picks are looked up a K block before they are copied.
    class Copies {
        template <int COLUMNS>
        using Rows = RowCopies<COLUMNS, MMA_THREADS>;
        const Segment& s_;
        i32 first_ = 0, end_ = 0, a_column_ = 0, b_column_ = 0;
        typename Segment::AIndex a_next_ = 0;
        typename Segment::BIndex b_next_ = 0;

        // Of K block kb, the row of a group that this thread knows; -1 past the last.
        template <int COLUMNS>
        __device__ __forceinline__ i32 known(i32 kb) const {
            const i32 m = Rows<COLUMNS>::known_row(first_, kb, threadIdx.x);
            return m < end_ ? m : -1;
        }

        __device__ __forceinline__ void look_up(i32 kb) {
            const i32 a = known<TILE_M>(kb), b = known<TILE_N>(kb);
            if (a >= 0) a_next_ = typename Segment::AIndex(s_.a_index(a));
            if (b >= 0) b_next_ = typename Segment::BIndex(s_.b_index(b));
        }

      public:
        __device__ __forceinline__ explicit Copies(const Segment& s) : s_(s) {}

        __device__ __forceinline__ void begin(const Tile& tile) {
            first_ = tile.first, end_ = tile.end, a_column_ = tile.a, b_column_ = tile.b;
            look_up(0);
        }

        __device__ __forceinline__ void copy(u32 a, u32 b, i32 kb) {
            const i32 a_row = known<TILE_M>(kb) < 0 ? -1 : i32(s_.a_row_of(a_next_)),
                      b_row = known<TILE_N>(kb) < 0 ? -1 : i32(s_.b_row_of(b_next_));
            look_up(kb + 1);
            Rows<TILE_M>::template copy<Segment::N>(a, s_.a_matrix(), a_row, a_column_,
                                                    threadIdx.x);
            Rows<TILE_N>::template copy<Segment::K>(b, s_.b_matrix(), b_row, b_column_,
                                                    threadIdx.x);
        }

        __device__ __forceinline__ void finish(u32) const {}
    };

    class Sum {
        const Segment& s_;
        const Tile& tile_;

      public:
        __device__ __forceinline__ Sum(const Segment& s, const Tile& tile) : s_(s), tile_(tile) {}

        __device__ __forceinline__ void add(Sums& sum, i32, u32 a, u32 b) const {
            Warp::template multiply<typename Segment::Activation, true, true>(sum, a, b);
        }

        __device__ __forceinline__ void store(const Sums& sum) const {
#pragma unroll
            for (int r = 0; r < Warp::FRAGMENTS; ++r)
                store_wgrad<Warp::COLUMNS>(s_, tile_.group, tile_.a + Warp::row() + 16 * r,
                                           tile_.b + Warp::part() * Warp::COLUMNS, sum[r]);
        }
    };
};

}  // namespace
