// Tiles of a stored weight for dgrad: what is contracted are the weight's rows, and producer
// warpgroups dequantize them into a stage.
//
// A warp has 16 of a K block's 64 rows, and of the N tile's columns its warpgroup's, 64 at a time:
// a tile of the weight as readers have it. Of that a lane makes 16 columns of two rows, which are
// four pieces of the stage. Tiles that lie one after the other in memory are copied to shared
// memory a few blocks before they are needed: in registers they could not be, where the compiler
// waits for all that is being read.
#pragma once

#include "pieces.cuh"
#include "scale_runs.cuh"

namespace {

// Dequantizes the tiles of a warp's 16 rows of a K block.
template <class Segment>
struct DequantizingWarp {
    using Weights = typename Segment::Weights;
    using Runs = ScaleRuns<Segment>;
    const i32 row = threadIdx.x / 32 % 4 * 16, lane = threadIdx.x % 32;

    // Whether the warp's rows of a block are of its run.
    __device__ __forceinline__ bool has_rows(i32 kb) const {
        return Runs::LENGTH % 64 == 0 || kb % Runs::BLOCKS * 64 + row < Runs::LENGTH;
    }

    // A tile, to a piece of 64 columns.
    __device__ __forceinline__ void store(u32 to, const typename Weights::Packed& packed) const {
        const auto scales = Weights::scales(packed);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[4][2];
#pragma unroll
            for (int v = 0; v < 4; ++v) Weights::dequantize(packed, scales, v, half, a[v]);
            put(to, 0, half, {a[0][0], a[1][0], a[2][0], a[3][0]});
            put(to, 8, half, {a[0][1], a[1][1], a[2][1], a[3][1]});
        }
    }

    // Stores zeros for rows past the last: they are multiplied too.
    __device__ __forceinline__ void store_zeros(u32 to) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) put(to, i / 2 * 8, i % 2, {});
    }

  private:
    // Eight columns of the lane's row, or of that so many further on.
    __device__ __forceinline__ void put(u32 to, u32 further, u32 half, uint4 x) const {
        const u32 place = to + swizzled(row + lane / 4 + further, 2 * (lane % 4) + half);
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(place), "r"(x.x), "r"(x.y),
                     "r"(x.z), "r"(x.w)
                     : "memory");
    }
};

// Reads weights when they are needed: in the linear layout, and with derived readers.
// COLUMN_BLOCKS: blocks of 64 columns of a warpgroup; WARPS: producer warps.
template <class Segment, int COLUMN_BLOCKS, int WARPS, class = void>
struct DequantizedColumns {
    using Weights = typename Segment::Weights;
    using Runs = ScaleRuns<Segment>;
    struct Memory {
        __device__ __forceinline__ void init() {}
    };

    __device__ __forceinline__ DequantizedColumns(const Segment& s, Memory&) : weight_(s) {}

    // A work tile. column: the warpgroup's first.
    __device__ __forceinline__ void begin(const Runs& runs, i32 group, i32 column) {
        runs_ = &runs, group_ = group, column_ = column;
    }

    // Block kb, which are taken in order, to the warpgroup's part of a stage: pieces of 64 columns.
    __device__ __forceinline__ void store(u32 to, i32 kb) {
        typename Weights::Packed packed[COLUMN_BLOCKS] = {};
        if (warp_.has_rows(kb)) {
            Weights reader;
            reader.open(weight_, group_, runs_->first_row(kb) + warp_.row, column_ / 64,
                        warp_.lane);
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; ++c) packed[c] = reader.load(c);
        }
#pragma unroll
        for (int c = 0; c < COLUMN_BLOCKS; ++c) {
            if (warp_.has_rows(kb))
                warp_.store(to + c * PIECE_BYTES, packed[c]);
            else
                warp_.store_zeros(to + c * PIECE_BYTES);
        }
    }

  private:
    const StoredWeight<Segment> weight_;
    const DequantizingWarp<Segment> warp_;
    const Runs* runs_;
    i32 group_, column_;
};

// Copies whole tiles in bulk, ahead of their use; each warp copies its own.
template <class Segment, int COLUMN_BLOCKS, int WARPS>
class DequantizedColumns<Segment, COLUMN_BLOCKS, WARPS, typename Segment::Weights::InTiles> {
  public:
    using Weights = typename Segment::Weights;
    using Runs = ScaleRuns<Segment>;
    static constexpr int AHEAD = 6;
    static constexpr i32 K_BLOCKS = Runs::COUNT * Runs::BLOCKS;
    struct alignas(128) Memory {
        u8 elements[AHEAD][WARPS][COLUMN_BLOCKS * Weights::ELEMENTS],
            scales[AHEAD][WARPS][COLUMN_BLOCKS * Weights::SCALES];
        u64 full[AHEAD][WARPS];

        // By all threads of a block.
        __device__ __forceinline__ void init() {
            if (threadIdx.x < AHEAD * WARPS)
                mbarrier_init(full[threadIdx.x / WARPS][threadIdx.x % WARPS], 0, 1);
        }
    };

    __device__ __forceinline__ DequantizedColumns(const Segment& s, Memory& memory)
        : weight_(s), memory_(memory) {}

    __device__ __forceinline__ void begin(const Runs& runs, i32 group, i32 column) {
        runs_ = &runs, group_ = group, column_ = column;
        PipelineState<AHEAD> filling = reading_;
        for (i32 kb = 0; kb < min(AHEAD, K_BLOCKS); ++kb, filling.advance())
            copy(kb, filling.stage);
    }

    __device__ __forceinline__ void store(u32 to, i32 kb) {
        const u32 stage = reading_.stage;
        mbarrier_wait(memory_.full[stage][number_], reading_.parity);
        reading_.advance();
        if (warp_.has_rows(kb)) {
            typename Weights::Packed packed[COLUMN_BLOCKS];
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; ++c)
                packed[c] = shared_.load(memory_.elements[stage][number_] + c * Weights::ELEMENTS,
                                         memory_.scales[stage][number_] + c * Weights::SCALES);
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; ++c) warp_.store(to + c * PIECE_BYTES, packed[c]);
        } else {
#pragma unroll
            for (int c = 0; c < COLUMN_BLOCKS; ++c) warp_.store_zeros(to + c * PIECE_BYTES);
        }
        __syncwarp();
        if (kb + AHEAD < K_BLOCKS) copy(kb + AHEAD, stage);
    }

  private:
    // The tiles of a block. Columns past the last are in no result: whatever lies in their place is
    // multiplied.
    __device__ __forceinline__ void copy(i32 kb, u32 stage) {
        if (warp_.lane != 0) return;
        const i32 first = column_ / 64,
                  count =
                      warp_.has_rows(kb) ? max(0, min(COLUMN_BLOCKS, Segment::N / 64 - first)) : 0;
        u64& barrier = memory_.full[stage][number_];
        mbarrier_arrive_expect_bytes(barrier, count * (Weights::ELEMENTS + Weights::SCALES));
        if (count == 0) return;
        const i64 tile =
            tile_number<StoredWeight<Segment>>(group_, runs_->first_row(kb) + warp_.row, first);
        const u8 *elements = Weights::elements(weight_) + tile * Weights::ELEMENTS,
                 *scales = Weights::scales(weight_) + tile * Weights::SCALES;
        copy_bulk(shared_address(memory_.elements[stage][number_]), elements,
                  count * Weights::ELEMENTS, barrier);
        copy_bulk(shared_address(memory_.scales[stage][number_]), scales, count * Weights::SCALES,
                  barrier);
    }

    const StoredWeight<Segment> weight_;
    const DequantizingWarp<Segment> warp_;
    const i32 number_ = threadIdx.x / 32 % WARPS;
    const typename Weights::template Shared<true> shared_{0, 0, i32(threadIdx.x % 32)};
    Memory& memory_;
    PipelineState<AHEAD> reading_;
    const Runs* runs_;
    i32 group_, column_;
};

}  // namespace
