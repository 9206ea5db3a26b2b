// Numbers of derived readers, two at a time in the type of the activations: of integers of four
// bits with one scale of 16 bits, and with zero points or without. They have the bits of float32
// arithmetic that is rounded once: a code less its zero point is exact, and its product with the
// scale is rounded. If activations are bfloat16 and scales float16, a scale is a sum of two
// bfloat16s; the product with the lower one is exact, and one fma adds that with the higher one.
//
// Codes are nibbles at the same place of both halves of a word: at bit 0 or 4 (PLACE).
#pragma once

#include "weights/four_bits_shared.cuh"
#include "weights/reader.cuh"

namespace {

// A pair's zero points and scales, ready to be used.
struct ReadyPair {
    u32 zero, step, lower;
};

// Whether E has such numbers: `Step` is then the type of its scales. ZERO: its zero point, if it
// has no part with them.
template <class T, class E, class Step>
struct PairsOf {
    static constexpr bool FIT = false;
};

template <class E>
struct PairsOf<f16, E, f16> {
    static constexpr bool FIT = true;
    static constexpr u32 ONE = 0x3C003C00, SIXTEENTH = 0x2C002C00;
    // A nibble in the mantissa of 1024 is 1024 + code, or 1024 + 16 codes.
    static constexpr u32 EXPONENT = 0x64006400;

    template <int PLACE>
    static __device__ __forceinline__ ReadyPair ready(u32 zeros, u32 steps) {
        return {PLACE == 0 ? zeros | 0xE400E400u : zeros << 4 | 0xD400D400u, steps,
                0};  // -1024, -64
    }

    template <int PLACE>
    static __device__ __forceinline__ u32 weights(u32 codes, const ReadyPair& by) {
        const u32 bits = and_or(codes, 0x000F000Fu << PLACE, EXPONENT);
        return multiply_pair<f16>(fma_pair<f16>(bits, PLACE == 0 ? ONE : SIXTEENTH, by.zero),
                                  by.step);
    }
};

// The bits of a code q (or of 16 q), read as a bfloat16, are q * 2^-133 (subnormal or just above).
// Integers are times 2^-13, steps times 2^13.
template <class E, class Step>
struct PairsInBf16 {
    static constexpr bool FIT = true;
    static constexpr u32 UP = 0x7B807B80, UP_OF_16 = 0x79807980, DOWN = 0xFB80FB80,
                         OF_STEP = 0x46004600;  // 2^120, 2^116, -2^120, 2^13

    template <int PLACE>
    static __device__ __forceinline__ u32 integers(u32 codes, u32 zero) {
        return fma_pair<bf16>(codes & 0x000F000Fu << PLACE, PLACE == 0 ? UP : UP_OF_16, zero);
    }
    static __device__ __forceinline__ u32 ready_zero(u32 zeros) {
        return multiply_pair<bf16>(zeros, DOWN);
    }
};

template <class E>
struct PairsOf<bf16, E, bf16> : PairsInBf16<E, bf16> {
    using Base = PairsInBf16<E, bf16>;

    template <int PLACE>
    static __device__ __forceinline__ ReadyPair ready(u32 zeros, u32 steps) {
        return {Base::ready_zero(zeros), multiply_pair<bf16>(steps, Base::OF_STEP), 0};
    }
    template <int PLACE>
    static __device__ __forceinline__ u32 weights(u32 codes, const ReadyPair& by) {
        return multiply_pair<bf16>(Base::template integers<PLACE>(codes, by.zero), by.step);
    }
};

template <class E>
struct PairsOf<bf16, E, f16> : PairsInBf16<E, f16> {
    using Base = PairsInBf16<E, f16>;

    template <int PLACE>
    static __device__ __forceinline__ ReadyPair ready(u32 zeros, u32 steps) {
        const float first = widen(f16{u16(steps)}) * 0x1p13f,
                    second = widen(f16{u16(steps >> 16)}) * 0x1p13f;
        const u32 higher = narrow_pair<bf16>(first, second);
        return {Base::ready_zero(zeros), higher,
                narrow_pair<bf16>(first - __uint_as_float(higher << 16),
                                  second - __uint_as_float(higher & 0xFFFF0000u))};
    }
    template <int PLACE>
    static __device__ __forceinline__ u32 weights(u32 codes, const ReadyPair& by) {
        const u32 integers = Base::template integers<PLACE>(codes, by.zero);
        return fma_pair<bf16>(integers, by.step, multiply_pair<bf16>(integers, by.lower));
    }
};

template <class>
using Exists = void;

template <bool FIRST, class A, class B>
struct Choose {
    using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
    using Type = B;
};

template <class T, class E, class = void>
struct Pairs {
    static constexpr bool FIT = false;
};

template <class T, class E>
struct Pairs<T, E, Exists<typename E::Step>> : PairsOf<T, E, typename E::Step> {
    using Base = PairsOf<T, E, typename E::Step>;
    static constexpr u32 TWICE = 0x10001u;

    // EACH: 1 for words with the scale, or zero point, of the first number in the lower half and of
    // the second one above; TWICE for one that both have.
    template <int PLACE, u32 EACH>
    static __device__ __forceinline__ ReadyPair ready(const u32* stored) {
        u32 zeros = u32(-E::FIRST) * TWICE;
        if constexpr (E::Scales::COUNT > 1) zeros = stored[1] * EACH;
        return Base::template ready<PLACE>(zeros, stored[0] * EACH);
    }
};

// A tile in shared memory, of which lane 4 r + c has the codes of columns from 16 c on of rows r
// and r + 8, or, BY_STEP, of each of four blocks of 16 columns those of word c: as in
// four_bits_shared.cuh.
template <bool BY_STEP>
struct SharedNibbles {
    static __device__ __forceinline__ i32 swizzled_lane(i32 lane) {
        return 16 * (BY_STEP ? lane ^ lane / 8 % 2 * 2 : lane);
    }

    static __device__ __forceinline__ void read(u32 (&words)[4], const u8* tile, i32 lane) {
        if constexpr (!BY_STEP) {
            const uint4 all = *reinterpret_cast<const uint4*>(tile + 16 * lane);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else {
            load_matrices(words, tile + swizzled_lane(lane % 8 * 4 + lane / 8));
        }
    }
};

}  // namespace
