// Blocks of numbers and their scales: which of several scales rounds a block with the least squared
// error, and the codes of blocks. encodings/search.py says what is computed; this has the same
// bits: every operation is one of float32, LANES blocks lie side by side, and squares are summed in
// pairs.

#include "numbers.h"

namespace {

// Blocks side by side: those of a register. GCC compares longer vectors one element at a time.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int MOST = 128;  // elements of a block
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// The numbers of an element type that rise: x stands for the last one whose bound is below it.
struct Numbers {
    int count;  // 8: magnitudes, of numbers that have signs; 16: all
    float bounds[16], numbers[16];
    int32_t codes[16];
};

struct Blocks {
    const void* x;  // [n, block]
    int dtype;      // 0: float32, 1: bfloat16, 2: float16
    int block;
    i64 n;

    float at(i64 i) const {
        if (dtype == 0) return static_cast<const float*>(x)[i];
        const uint16_t bits = static_cast<const uint16_t*>(x)[i];
        return dtype == 1 ? widen(bf16{bits}) : widen(f16{bits});
    }

    // LANES blocks from `first` on, side by side; those past the end are the last one.
    void load(i64 first, Lanes* lanes) const {
        for (int l = 0; l < LANES; l++) {
            const i64 from = (first + l < n ? first + l : n - 1) * block;
            for (int k = 0; k < block; k++) lanes[k][l] = at(from + k);
        }
    }
};

// Of [n] floats those of LANES blocks; the last one again past the end.
Lanes some(const float* of_blocks, i64 first, i64 n) {
    Lanes y;
    for (int l = 0; l < LANES; l++) y[l] = of_blocks[first + l < n ? first + l : n - 1];
    return y;
}

inline Lanes magnitude(Lanes x) { return Lanes(Ints(x) & 0x7fffffff); }

// Of values that belong to the numbers, those of the ones that x stands for.
template <int COUNT, class Values, class T>
[[gnu::always_inline]] inline Values rounded(const Numbers& of, const T* values, Lanes x) {
    const Lanes size = COUNT == 8 ? magnitude(x) : x;
    Values y = Values{} + values[0];
#pragma GCC unroll 16
    for (int i = 1; i < COUNT; i++) y = size > of.bounds[i] ? Values{} + values[i] : y;
    return y;
}

template <int COUNT>
[[gnu::always_inline]] inline Lanes nearest(const Numbers& of, Lanes x) {
    const Lanes y = rounded<COUNT, Lanes>(of, of.numbers, x);
    return COUNT == 8 ? Lanes(Ints(y) | (Ints(x) & int32_t(0x80000000))) : y;
}

template <int COUNT>
[[gnu::always_inline]] inline Ints code(const Numbers& of, Lanes x) {
    const Ints y = rounded<COUNT, Ints>(of, of.codes, x);
    return COUNT == 8 ? y + (x < 0.0f ? Ints{} + 8 : Ints{}) : y;
}

// The squared error of BLOCK elements, a power of two.
template <int COUNT, int BLOCK>
[[gnu::always_inline]] inline Lanes error(const Numbers& of, const Lanes* x, Lanes step) {
    if constexpr (BLOCK == 1) {
        const Lanes difference = nearest<COUNT>(of, *x / step) * step - *x;
        return difference * difference;
    } else {
        return error<COUNT, BLOCK / 2>(of, x, step) +
               error<COUNT, BLOCK / 2>(of, x + BLOCK / 2, step);
    }
}

template <int COUNT>
Lanes error_of(const Numbers& of, const Lanes* x, int block, Lanes step) {
    if (block == 16) return error<COUNT, 16>(of, x, step);
    return error_of<COUNT>(of, x, block / 2, step) +
           error_of<COUNT>(of, x + block / 2, block / 2, step);
}

template <int COUNT>
void search(const Numbers& of, const Blocks& blocks, const float* steps, int tried, uint8_t* best,
            i64 first) {
    Lanes x[MOST];
    blocks.load(first, x);
    Ints winner{};
    Lanes least{};
    for (int i = 0; i < tried; i++) {
        const Lanes made =
            error_of<COUNT>(of, x, blocks.block, some(steps + i * blocks.n, first, blocks.n));
        const Ints better = i ? made < least : Ints{} - 1;
        winner = better ? Ints{} + i : winner;
        least = better ? made : least;
    }
    for (int l = 0; l < LANES && first + l < blocks.n; l++) best[first + l] = uint8_t(winner[l]);
}

template <int COUNT>
void encode(const Numbers& of, const Blocks& blocks, const float* units, uint8_t* codes,
            i64 first) {
    Lanes x[MOST];
    blocks.load(first, x);
    const Lanes unit = some(units, first, blocks.n);
    for (int k = 0; k < blocks.block; k += 2) {
        const Ints pair = code<COUNT>(of, x[k] / unit) | code<COUNT>(of, x[k + 1] / unit) << 4;
        for (int l = 0; l < LANES && first + l < blocks.n; l++)
            codes[((first + l) * blocks.block + k) / 2] = uint8_t(pair[l]);
    }
}

void amax(const Blocks& blocks, float* largest, i64 first) {
    Lanes x[MOST];
    blocks.load(first, x);
    Lanes y{};
    for (int k = 0; k < blocks.block; k++) {
        const Lanes size = magnitude(x[k]);
        y = (size > y) | (size != size) ? size : y;  // NaN stays
    }
    for (int l = 0; l < LANES && first + l < blocks.n; l++) largest[first + l] = y[l];
}

}  // namespace

// x [n, block] -> f32 [n]: the largest magnitudes, or NaN.
extern "C" void largest(const void* x, int dtype, i64 n, int block, float* of_blocks, int threads) {
    const Blocks blocks{x, dtype, block, n};
#pragma omp parallel for num_threads(threads)
    for (i64 i = 0; i < n; i += LANES) amax(blocks, of_blocks, i);
}

// x [n, block], steps f32 [tried, n] -> best u8 [n]: the first of the steps with the least error.
extern "C" void least_errors(const void* x, int dtype, i64 n, int block, const Numbers* of,
                             const float* steps, int tried, uint8_t* best, int threads) {
    const Blocks blocks{x, dtype, block, n};
#pragma omp parallel for num_threads(threads)
    for (i64 i = 0; i < n; i += LANES)
        (of->count == 8 ? search<8> : search<16>)(*of, blocks, steps, tried, best, i);
}

// x [n, block], units f32 [n] -> codes u8 [n, block / 2] of x / unit, the first in the low bits.
extern "C" void encode_blocks(const void* x, int dtype, i64 n, int block, const Numbers* of,
                              const float* units, uint8_t* codes, int threads) {
    const Blocks blocks{x, dtype, block, n};
#pragma omp parallel for num_threads(threads)
    for (i64 i = 0; i < n; i += LANES)
        (of->count == 8 ? encode<8> : encode<16>)(*of, blocks, units, codes, i);
}
