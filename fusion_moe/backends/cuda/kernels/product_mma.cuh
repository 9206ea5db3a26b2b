// The products of product_wgmma.cuh by mma, for GPUs without wgmma: fprop, dgrad and wgrad.
//
// A block's eight warps both copy and multiply. While they multiply a stage of the ring, copies of
// the next ones are in flight (`cp.async`), also those of the work tile after this one: copying
// runs ahead over the ends of work tiles, so that nothing waits for memory in an epilogue. Tiles
// lie in shared memory as there, from where `ldmatrix` makes fragments; it transposes those
// of operands whose rows are contracted.
//
//     GroupedGemmMma  [M/g, k] x [G, n, k] or [G, k, n] -> [M/g, n]   fprop, dgrad
//     GroupedWgradMma [M/g, n] x [M/g, k] -> [G, n, k]                wgrad
#pragma once

#include "copy_ring.cuh"
#include "product.cuh"

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
// multiplies soon. A Product has, beside its Schedule,
//
//     k_blocks(tile)                                          at least one
//     Copies: begin(tile), copy(stage, kb), finish(stage)     finish: after the next product
//     Sum: add(sum, kb, a, b), store(sum)                     of a tile
template <class Product>
class MmaPipeline {
    using Segment = typename Product::Segment;
    struct alignas(1024) Stage {
        u8 a[Product::TILE_M * TILE_ROW_BYTES], b[Product::TILE_N * TILE_ROW_BYTES];
    };
    using Schedule = typename Product::Schedule;
    using Scheduler = typename Schedule::Scheduler;
    using Tile = typename Schedule::Tile;
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
        Schedule::build(s, shared.scheduler, reinterpret_cast<i32*>(shared.stage));
        Ahead ahead(s, shared);
        const auto copy = [&](i32 stage, i32) { ahead.copy(stage); };
        CopyRing<STAGES> ring;
        ring.begin([&](i32 stage, i32) { ahead.copy(stage), ahead.finish(); });
        for (u32 i = 0;; ++i) {
            const i32 number = shared.number[i % NUMBERS];
            if (!Schedule::more(shared.scheduler, number)) return;
            const Tile tile = Schedule::tile(shared.scheduler, number);
            typename Product::Sum to{s, tile};
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
            more_ = Schedule::more(shared_.scheduler, number);
            if (!more_) return;
            const Tile tile = Schedule::tile(shared_.scheduler, number);
            copies_.begin(tile);
            kb_ = 0, k_blocks_ = Product::k_blocks(tile);
        }
    };
};

// A kernel: by all threads. Nothing is copied in boxes.
template <class Product, class Segment>
__device__ __forceinline__ void run(const Segment& s, const TensorMap*, const TensorMap*) {
    MmaPipeline<Product>::run(typename Product::Segment(s));
}

// fprop and dgrad
// -------------------------------------------------------------------------------------------------

template <class Segment_, int TILE_M_, int TILE_N_>
struct GroupedGemmMma {
    using Segment = Segment_;  // which is made of the kernel's
    static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_;
    using Schedule = FpropSchedule<Segment, TILE_M, TILE_N>;
    using Tile = WorkTile;
    using Warp = WarpTile<TILE_M, TILE_N, Segment::COLUMNS_PER_RESULT>;
    using Sums = typename Warp::Sums;
    using Part = GemmPart<Segment, TILE_N, Warp::COLUMNS>;
    using Weight = WeightTiles<Segment, TILE_N, MMA_THREADS, false>;
    using Runs = typename Weight::Runs;

    __device__ static __forceinline__ i32 k_blocks(const Tile& tile) {
        return Schedule::grouped(tile) ? Runs::COUNT * Runs::BLOCKS : 1;
    }

    class Copies {
        const Segment& s_;
        PickedRows<Segment, TILE_M, MMA_THREADS> rows_;
        Weight weight_;
        Runs runs_;
        bool grouped_ = false;
        typename Weight::Block block_;

      public:
        __device__ __forceinline__ explicit Copies(const Segment& s)
            : s_(s), weight_(s, threadIdx.x), runs_(s, 0) {}

        __device__ __forceinline__ void begin(const Tile& tile) {
            grouped_ = Schedule::grouped(tile);
            if (!grouped_) return;
            rows_.begin(s_, tile.m_tile, threadIdx.x);
            runs_ = Runs(s_, tile.m_tile.group);
            weight_.begin(tile.m_tile.group, tile.n_tile);
        }

        __device__ __forceinline__ void copy(u32 a, u32 b, i32 kb) {
            if (!grouped_) return;
            rows_.template copy<Segment::K>(a, s_.a_matrix(), runs_.first_row(kb), threadIdx.x);
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
      protected:
        const Segment& s_;
        const Tile& tile_;
        const Runs runs_;
        const bool active_;

      public:
        __device__ __forceinline__ Sum(const Segment& s, const Tile& tile)
            : s_(s),
              tile_(tile),
              runs_(s, Schedule::grouped(tile) ? tile.m_tile.group : 0),
              active_(Schedule::grouped(tile) &&
                      tile.m_tile.first + Warp::row() < tile.m_tile.end) {}

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

template <class Segment_, int TILE_M_, int TILE_N_>
struct GroupedWgradMma {
    using Segment = Segment_;
    static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_;
    using Schedule = WgradSchedule<Segment, TILE_M, TILE_N>;
    using Tile = typename Schedule::Tile;
    using Warp = WarpTile<TILE_M, TILE_N>;
    using Sums = typename Warp::Sums;

    // Of a group without rows, one of zeros.
    __device__ static __forceinline__ i32 k_blocks(const Tile& tile) {
        return max(1, Schedule::k_blocks(tile));
    }

    class Copies {
        ARows<Segment, TILE_M, MMA_THREADS> a_rows_;
        BRows<Segment, TILE_N, MMA_THREADS> b_rows_;

      public:
        __device__ __forceinline__ explicit Copies(const Segment& s)
            : a_rows_(s, threadIdx.x), b_rows_(s, threadIdx.x) {}

        __device__ __forceinline__ void begin(const Tile& tile) {
            a_rows_.begin(tile.first, tile.end, tile.a),
                b_rows_.begin(tile.first, tile.end, tile.b);
        }

        __device__ __forceinline__ void copy(u32 a, u32 b, i32 kb) {
            a_rows_.next(kb), b_rows_.next(kb);
            a_rows_.copy(a, kb), b_rows_.copy(b, kb);
        }

        __device__ __forceinline__ void finish(u32) const {}
    };

    struct Sum {
        const Segment& s_;
        const Tile& tile_;

        __device__ __forceinline__ void add(Sums& sum, i32, u32 a, u32 b) const {
            Warp::template multiply<typename Segment::Activation, true, true>(sum, a, b);
        }

        __device__ __forceinline__ void store(const Sums& sum) const {
#pragma unroll
            for (int r = 0; r < Warp::FRAGMENTS; ++r)
                store_wgrad<TILE_M, Warp::COLUMNS>(s_, tile_.group, tile_.a + Warp::row() + 16 * r,
                                                   tile_.b + Warp::part() * Warp::COLUMNS, sum[r]);
        }
    };
};

}  // namespace
