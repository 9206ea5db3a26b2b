// The work of a persistent grid on groups whose sizes only the device knows.
//
// A group of `size` rows is cut into as few spans as HEIGHT allows, of equal height but for the last, a multiple of 8. An item is one
// span and one of `across` blocks of columns; block b of the grid has items b, b + blocks, ... Groups with the highest spans come first,
// so that what is left at the end are small items; the spans of a group follow each other, so that they read the same weights.
#pragma once

#include "ragged.cuh"

namespace {

struct Item {
    Span span;
    i32 height, column_block;  // of the group's spans: a multiple of 8
};

template <int G, int HEIGHT>
class Schedule {
public:
    // By all threads of a block; `scratch` holds 2 (G + 1) numbers.
    __device__ void make(const i32* ends, i32 rows, i32 across, i64* error, i32* scratch) {
        i32 *height = scratch, *items = scratch + G + 1;
        tiles_.make(ends, rows, error);
        for (i32 g = threadIdx.x; g <= G; g += blockDim.x) {
            height[g] = g < G ? height_of(g) : 0;  // rows of no group come last
            items[g] = spans_of(g) * across;
        }
        __syncthreads();
        for (i32 g = threadIdx.x; g <= G; g += blockDim.x) {
            i32 place = 0, upto = items[g];
#pragma unroll 8
            for (i32 other = 0; other <= G; ++other) {
                const bool before = height[other] > height[g] || (height[other] == height[g] && other < g);
                place += before;
                upto += before ? items[other] : 0;
            }
            order_[place] = g, upto_[place] = upto;
        }
        __syncthreads();
    }

    // Goes through the items of this block.
    class Cursor {
    public:
        __device__ explicit Cursor(const Schedule& schedule) : schedule_(schedule), number_(blockIdx.x) { find(); }

        __device__ bool more() const { return number_ < schedule_.upto_[G]; }
        __device__ i32 group() const { return schedule_.order_[place_]; }
        __device__ i32 height() const { return schedule_.height_of(group()); }

        __device__ Item item() const {
            const i32 g = group(), spans = schedule_.spans_of(g), high = height();
            const i32 within = number_ - (place_ == 0 ? 0 : schedule_.upto_[place_ - 1]);
            const i32 first = schedule_.tiles_.first[g] + within % spans * high;
            return {{g, first, min(first + high, schedule_.tiles_.first[g + 1])}, high, within / spans};
        }

        __device__ void advance() {
            number_ += gridDim.x;
            find();
        }

    private:
        __device__ void find() {
            while (place_ < G && schedule_.upto_[place_] <= number_) ++place_;
        }

        const Schedule& schedule_;
        i32 number_, place_ = 0;
    };

private:
    __device__ i32 spans_of(i32 g) const { return tiles_.before[g + 1] - tiles_.before[g]; }

    __device__ i32 height_of(i32 g) const {
        const i32 size = tiles_.first[g + 1] - tiles_.first[g], spans = spans_of(g);
        return spans == 0 ? 0 : (size + 8 * spans - 1) / (8 * spans) * 8;
    }

    Tiles<G, HEIGHT> tiles_;
    i32 order_[G + 1], upto_[G + 1];  // groups in the order of work; items of the first so many of them
};

}  // namespace
