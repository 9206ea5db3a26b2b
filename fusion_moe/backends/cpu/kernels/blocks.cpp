// Blocks of numbers and their scales: which of several scales rounds a block with the least squared
// error, and the codes of blocks. encodings/search.py says what is computed; this has the same
// bits: every operation is one of float32, ABREAST blocks lie side by side, and squares are summed
// in pairs.

#include "numbers.h"

namespace {

// Blocks side by side: those of a register. GCC compares longer vectors one element at a time.
#if defined(__AVX512F__)
constexpr int ABREAST = 16;
#elif defined(__AVX2__)
constexpr int ABREAST = 8;
#else
constexpr int ABREAST = 4;
#endif
constexpr int MOST = 128;  // elements of a block
typedef float Lanes __attribute__((vector_size(4 * ABREAST)));
typedef int32_t Ints __attribute__((vector_size(4 * ABREAST)));
typedef uint32_t UInts __attribute__((vector_size(4 * ABREAST)));

// The numbers of an element type that rise: x stands for the last one whose bound is below it.
struct Numbers {
    int count;  // 8: magnitudes, of numbers that have signs; 16: all
    float bounds[16], numbers[16];
    int32_t codes[16];
};

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3 };

inline float number(const void* x, int dtype, i64 i) {
    if (dtype == FLOAT32) return static_cast<const float*>(x)[i];
    const uint16_t bits = static_cast<const uint16_t*>(x)[i];
    return dtype == BFLOAT16 ? widen(bf16{bits}) : widen(f16{bits});
}

// ABREAST numbers from i on; those of e4m3 are neither negative nor NaN.
inline Lanes some(const void* x, int dtype, i64 i) {
    if (dtype == FLOAT8_E4M3) {
        u8 __attribute__((vector_size(ABREAST))) bytes;
        std::memcpy(&bytes, static_cast<const u8*>(x) + i, ABREAST);
        const Ints all = __builtin_convertvector(bytes, Ints), bits = all << 20;
        return all < 8 ? Lanes(bits + (121 << 23)) - 0x1p-6f : Lanes(bits + (120 << 23));
    }
    Lanes y;
    for (int l = 0; l < ABREAST; l++) y[l] = number(x, dtype, i + l);
    return y;
}

struct Blocks {
    const void* x;  // [n, block]
    int dtype;      // up to FLOAT16
    int block;
    i64 n;  // at least ABREAST

    // ABREAST blocks side by side; returns the first one. The last are those before the end.
    i64 load(i64 i, Lanes* lanes) const {
        const i64 first = i + ABREAST <= n ? i : n - ABREAST;
        for (int l = 0; l < ABREAST; l++)
            for (int k = 0; k < block; k++) lanes[k][l] = number(x, dtype, (first + l) * block + k);
        return first;
    }
};

inline Lanes magnitude(Lanes x) { return Lanes(Ints(x) & 0x7fffffff); }

// x, of which e2m1 has the magnitude, rounded to e2m1 or to integers. Adding so much leaves no bits
// of fractions; of NaN, which is 0 / 0, any number may come.
template <int COUNT>
[[gnu::always_inline]] inline Lanes nearest(const Numbers& of, Lanes x) {
    const Lanes most = Lanes{} + of.numbers[COUNT - 1], least = Lanes{} + of.numbers[0];
    if (COUNT == 8) {  // integers, of which there is a least and a largest one in an instruction
        const UInts all = UInts(x), six = UInts(most), one = UInts(Lanes{} + 1.0f);
        const UInts size = all < six ? all : six, power = size > one ? size : one;
        const Lanes large = Lanes((power & 0x7f800000) + (22 << 23));
        return (Lanes(size) + large) - large;
    }
    const Lanes low = x < most ? x : most;
    return ((low > least ? low : least) + 0x1.8p23f) - 0x1.8p23f;
}

// The codes of the numbers that x stands for.
template <int COUNT>
[[gnu::always_inline]] inline Ints code(const Numbers& of, Lanes x) {
    const Lanes size = COUNT == 8 ? magnitude(x) : x;
    Ints y = Ints{} + of.codes[0];
#pragma GCC unroll 16
    for (int i = 1; i < COUNT; i++) y = size > of.bounds[i] ? Ints{} + of.codes[i] : y;
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
void search(const Numbers& of, const Blocks& blocks, const void* scales, int dtype,
            const float* outers, int tried, uint8_t* best, i64 i) {
    Lanes x[MOST];
    const i64 first = blocks.load(i, x);
    const int32_t kept = COUNT == 8 ? 0x7fffffff : -1;  // errors are those of magnitudes
    for (int k = 0; k < blocks.block; k++) x[k] = Lanes(Ints(x[k]) & kept);
    const Lanes outer = Lanes(Ints(some(outers, FLOAT32, first)) & kept);
    Ints winner{};
    Lanes least = Lanes{} + __builtin_inff();
    for (int t = 0; t < tried; t++) {
        const Lanes step = some(scales, dtype, t * blocks.n + first) * outer;
        const Lanes made = error_of<COUNT>(of, x, blocks.block, step);
        const Ints better = made < least;
        winner = better ? Ints{} + t : winner;
        least = better ? made : least;
    }
    for (i64 l = i - first; l < ABREAST; l++) best[first + l] = uint8_t(winner[l]);
}

template <int COUNT>
void encode(const Numbers& of, const Blocks& blocks, const float* units, uint8_t* codes, i64 i) {
    Lanes x[MOST];
    const i64 first = blocks.load(i, x);
    const Lanes unit = some(units, FLOAT32, first);
    for (int k = 0; k < blocks.block; k += 2) {
        const Ints pair = code<COUNT>(of, x[k] / unit) | code<COUNT>(of, x[k + 1] / unit) << 4;
        for (i64 l = i - first; l < ABREAST; l++)
            codes[((first + l) * blocks.block + k) / 2] = uint8_t(pair[l]);
    }
}

void amax(const Blocks& blocks, float* largest, i64 i) {
    Lanes x[MOST];
    const i64 first = blocks.load(i, x);
    Lanes y{};
    for (int k = 0; k < blocks.block; k++) {
        const Lanes size = magnitude(x[k]);
        y = (size > y) | (size != size) ? size : y;  // NaN stays
    }
    for (i64 l = i - first; l < ABREAST; l++) largest[first + l] = y[l];
}

}  // namespace

// x [n, block] -> f32 [n]: the largest magnitudes, or NaN.
extern "C" void largest(const void* x, int dtype, i64 n, int block, float* of_blocks, int threads) {
    const Blocks blocks{x, dtype, block, n};
#pragma omp parallel for num_threads(threads)
    for (i64 i = 0; i < n; i += ABREAST) amax(blocks, of_blocks, i);
}

// x [n, block], scales [tried, n], outers f32 [n] -> best u8 [n]: the first of the steps
// scales * outers with the least error.
extern "C" void least_errors(const void* x, int dtype, i64 n, int block, const Numbers* of,
                             const void* scales, int of_scales, const float* outers, int tried,
                             uint8_t* best, int threads) {
    const Blocks blocks{x, dtype, block, n};
#pragma omp parallel for num_threads(threads)
    for (i64 i = 0; i < n; i += ABREAST)
        (of->count == 8 ? search<8> : search<16>)(*of, blocks, scales, of_scales, outers, tried,
                                                  best, i);
}

// x [n, block], units f32 [n] -> codes u8 [n, block / 2] of x / unit, the first in the low bits.
extern "C" void encode_blocks(const void* x, int dtype, i64 n, int block, const Numbers* of,
                              const float* units, uint8_t* codes, int threads) {
    const Blocks blocks{x, dtype, block, n};
#pragma omp parallel for num_threads(threads)
    for (i64 i = 0; i < n; i += ABREAST)
        (of->count == 8 ? encode<8> : encode<16>)(*of, blocks, units, codes, i);
}
