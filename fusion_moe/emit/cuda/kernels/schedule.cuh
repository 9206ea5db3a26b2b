// The work of a persistent grid on groups whose sizes only the device knows.
//
// A group of `size` rows is cut into as few spans as HEIGHT allows, of equal height but for the last, a multiple of 8. An item is one
// span and one of `across` blocks of columns; block b of the grid has items b, b + blocks, ... Groups with the highest spans come first,
// so that what is left at the end are small items. A group's spans take turns, each of a few of them and all columns: what a GPU's blocks
// have of these at a time reads about as many bytes of weights as of activations, which is the least in all.
//
// Beside a kernel of few rows, which makes groups of up to ABOVE rows, the blocks that stay are so few that they are done in about half of
// its time: it needs nearly all multiprocessors to read weights as fast as memory gives them. While it reads those of 300 groups, a block
// makes two spans, with all columns (measured on an H200).
//
// Items of a group take equally long, though the last span may be lower, and the last block of columns narrower: so blocks stay in step
// along k, and what one reads from memory the others find in the cache. (Else a product of 14,336 k read 2.4 times as much.)
#pragma once

#include "ragged.cuh"

namespace {

struct alignas(16) Item {
    Span span;
    i32 height, column_block;  // of the group's spans: a multiple of 8
};

template <int G, int HEIGHT, i32 ABOVE, i32 MOST, bool BESIDE_FEW>
class Schedule {
public:
    // By all threads of a block; `scratch` holds 4 (G + 1) numbers.
    __device__ void make(const i32* ends, i32 rows, i32 across, i64* error, i32* scratch) {
        if (threadIdx.x == 0) across_ = across, blocks_ = gridDim.x;
        int2* group = reinterpret_cast<int2*>(scratch);  // what it is sorted by, and its items
        i32 *place = scratch + 2 * (G + 1), *upto = place + G + 1;
        tiles_.make(ends, rows, error);
        if (tiles_.before[G + 1] == 0) {  // other kernels have it all
            if (threadIdx.x == 0) upto_[G] = upto_[G - 1] = 0;
            __syncthreads();
            return;
        }
        if constexpr (BESIDE_FEW) leave_room();
        for (i32 g = threadIdx.x; g <= G; g += blockDim.x) {
            group[g] = {g < G ? height_of(g) * (G + 1) + G - g : 0, spans_of(g) * across};  // rows of no group come last
            place[g] = upto[g] = 0;
        }
        __syncthreads();
        for (i32 i = threadIdx.x; i < PARTS * SIDE; i += blockDim.x)
            if (i % SIDE <= G) count(group, i % SIDE, i / SIDE, place, upto);
        __syncthreads();
        for (i32 g = threadIdx.x; g <= G; g += blockDim.x)
            order_[place[g]] = g, upto_[place[g]] = upto[g] + group[g].y, height_[place[g]] = height_of(g);
        __syncthreads();
    }

    // Goes through the items of this block.
    class Cursor {
    public:
        __device__ explicit Cursor(const Schedule& schedule) : schedule_(schedule), number_(start()) {}

        __device__ bool first() const { return number_ == start(); }
        __device__ bool more() const { return number_ < schedule_.upto_[G]; }
        __device__ bool more_products() const { return number_ < schedule_.upto_[G - 1]; }  // rows of no group come last
        __device__ void advance() { number_ += BESIDE_FEW ? schedule_.blocks_ : i32(gridDim.x); }

        // By a whole warp.
        __device__ Item item() const {
            i32 place = 0;  // the first one whose items go further
#pragma unroll
            for (i32 i = 0; i <= G; i += 32) {
                const i32 other = i + i32(threadIdx.x % 32);
                place += __popc(__ballot_sync(WHOLE_WARP, other < G && schedule_.upto_[other] <= number_));
            }
            const i32 g = schedule_.order_[place], spans = schedule_.spans_of(g), high = schedule_.height_[place];
            const i32 within = number_ - (place == 0 ? 0 : schedule_.upto_[place - 1]);
            const i32 turns = (spans + SPANS - 1) / SPANS, each = (spans + turns - 1) / turns, of_turn = each * schedule_.across_;
            const i32 turn = within / of_turn, rest = within % of_turn, in_turn = min(each, spans - turn * each);
            const i32 first = schedule_.tiles_.first[g] + (turn * each + rest % in_turn) * high;
            return {{g, first, min(first + high, schedule_.tiles_.first[g + 1])}, high, rest / in_turn};
        }

    private:
        __device__ i32 start() const { return BESIDE_FEW && i32(blockIdx.x) >= schedule_.blocks_ ? NO_ITEM : i32(blockIdx.x); }

        const Schedule& schedule_;
        i32 number_;
    };

private:
    static constexpr i32 SPANS = 8;  // of a turn, at most
    static constexpr i32 SIDE = (G + 32) / 32 * 32, PARTS = SIDE > 256 ? 2 : SIDE > 128 ? 4 : 8, PART = (G + PARTS) / PARTS;

    static constexpr i32 NO_ITEM = 1 << 30;     // a number past the last
    static constexpr i32 READ_MEANWHILE = 300;  // groups, in the time of two spans; half of it is for one

    // Decides how many blocks stay.
    __device__ void leave_room() {
        i32 low = 0;
        for (i32 first = 0; first < G; first += blockDim.x) {
            const i32 g = first + threadIdx.x, size = g < G ? tiles_.first[g + 1] - tiles_.first[g] : 0;
            low += __syncthreads_count(size > 0 && size <= ABOVE);
        }
        if (threadIdx.x == 0 && low > 0) blocks_ = max(1, min(i32(gridDim.x), READ_MEANWHILE * tiles_.before[G] / low));
    }

    // Adds what a part of the groups says of where group g stands. A warp reads the same others at a time.
    __device__ static void count(const int2* group, i32 g, i32 part, i32* place, i32* upto) {
        const i32 mine = group[g].x;
        i32 groups = 0, items = 0;
#pragma unroll 4
        for (i32 other = part * PART; other < min(part * PART + PART, G + 1); ++other) {
            const int2 it = group[other];
            groups += it.x > mine ? 1 : 0;
            items += it.x > mine ? it.y : 0;
        }
        atomicAdd(place + g, groups), atomicAdd(upto + g, items);
    }

    __device__ i32 spans_of(i32 g) const { return tiles_.before[g + 1] - tiles_.before[g]; }

    __device__ i32 height_of(i32 g) const {
        const i32 size = tiles_.first[g + 1] - tiles_.first[g], spans = spans_of(g);
        return spans == 0 ? 0 : (size + 8 * spans - 1) / (8 * spans) * 8;
    }

    Tiles<G, HEIGHT, ABOVE, MOST> tiles_;
    i32 across_, blocks_;  // of columns; of the grid, that stay beside a kernel of few rows
    i32 order_[G + 1], upto_[G + 1], height_[G + 1];  // groups in the order of work; items of the first so many of them; heights of spans
};

}  // namespace
