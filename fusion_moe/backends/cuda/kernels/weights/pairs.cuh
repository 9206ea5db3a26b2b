// Numbers of derived readers, two at a time in the type of the activations: of integers of four
// bits with one scale of 16 bits, and with zero points (of up to 63) or without. They have the bits
// of float32 arithmetic that is rounded once: a code less its zero point is exact, and its product
// with the scale is rounded. If activations are bfloat16 and scales float16, a scale is a sum of
// two bfloat16s; the product with the lower one is exact, and one fma adds that with the higher
// one.
//
// Codes are nibbles at the same place of both halves of a word: at bit 0 or 4 (PLACE). Scales and
// zero points are stored in pairs, of which Which says what a pair of columns has.
#pragma once

#include "choose.cuh"
#include "weights/four_bits_shared.cuh"
#include "weights/reader.cuh"

namespace {

// The lower number, the upper one, or each column its own.
enum Which { LOWER, UPPER, EACH };

// Of two numbers of 16 bits, or of two bytes, one in each half of a word. upper: the upper byte of
// both halves.
template <Which WHICH>
__device__ __forceinline__ u32 in_halves(u32 numbers) {
    return WHICH == EACH ? numbers : __byte_perm(numbers, 0, WHICH == LOWER ? 0x1010 : 0x3232);
}
template <Which WHICH>
__device__ __forceinline__ u32 bytes_in_halves(u32 bytes, u32 upper) {
    return __byte_perm(bytes, upper, WHICH == LOWER ? 0x4040 : WHICH == UPPER ? 0x4141 : 0x4140);
}

// A pair's zero points and scales, ready to be used.
struct ReadyPair {
    u32 zero, step, lower;
};

// Whether E has such numbers: `Step` is then the type of its scales.
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

    template <int PLACE, Which WHICH>
    static __device__ __forceinline__ ReadyPair ready(u32 zeros, u32 steps) {
        const u32 zero = PLACE == 0 ? bytes_in_halves<WHICH>(zeros, 0xE4)  // -1024, -64
                                    : bytes_in_halves<WHICH>(zeros, 0) * 16 + 0xD400D400u;
        return {zero, in_halves<WHICH>(steps), 0};
    }

    template <int PLACE>
    static __device__ __forceinline__ u32 weights(u32 codes, const ReadyPair& by) {
        const u32 bits = and_or(codes, 0x000F000Fu << PLACE, EXPONENT);
        return multiply_pair<f16>(fma_pair<f16>(bits, PLACE == 0 ? ONE : SIXTEENTH, by.zero),
                                  by.step);
    }
};

// A code at bit 0 in the mantissa of 128 is 128 + code. The bits of one at bit 4, read as a
// bfloat16, are code * 2^-129 (subnormal or just above): those integers are times 2^-13, and their
// steps times 2^13.
template <class E, class Step>
struct PairsInBf16 {
    static constexpr bool FIT = true;
    static constexpr u32 ONE = 0x3F803F80, EXPONENT = 0x43004300, UP = 0x79807980,
                         DOWN = 0xFB80FB80, OF_STEP = 0x46004600;  // 1, 128, 2^116, -2^120, 2^13

    template <int PLACE, Which WHICH>
    static __device__ __forceinline__ u32 ready_zero(u32 zeros) {
        return PLACE == 0 ? bytes_in_halves<WHICH>(zeros, 0xC3)  // -128
                          : multiply_pair<bf16>(bytes_in_halves<WHICH>(zeros, 0), DOWN);
    }
    template <int PLACE>
    static __device__ __forceinline__ u32 integers(u32 codes, u32 zero) {
        return PLACE == 0 ? fma_pair<bf16>(and_or(codes, 0x000F000Fu, EXPONENT), ONE, zero)
                          : fma_pair<bf16>(codes & 0x00F000F0u, UP, zero);
    }
};

template <class E>
struct PairsOf<bf16, E, bf16> : PairsInBf16<E, bf16> {
    using Base = PairsInBf16<E, bf16>;

    template <int PLACE, Which WHICH>
    static __device__ __forceinline__ ReadyPair ready(u32 zeros, u32 steps) {
        const u32 step = in_halves<WHICH>(steps);
        return {Base::template ready_zero<PLACE, WHICH>(zeros),
                PLACE == 0 ? step : multiply_pair<bf16>(step, Base::OF_STEP), 0};
    }
    template <int PLACE>
    static __device__ __forceinline__ u32 weights(u32 codes, const ReadyPair& by) {
        return multiply_pair<bf16>(Base::template integers<PLACE>(codes, by.zero), by.step);
    }
};

template <class E>
struct PairsOf<bf16, E, f16> : PairsInBf16<E, f16> {
    using Base = PairsInBf16<E, f16>;

    template <int PLACE, Which WHICH>
    static __device__ __forceinline__ ReadyPair ready(u32 zeros, u32 steps) {
        const float up = PLACE == 0 ? 1.f : 0x1p13f,
                    first = widen(f16{u16(WHICH == UPPER ? steps >> 16 : steps)}) * up,
                    second = WHICH == EACH ? widen(f16{u16(steps >> 16)}) * up : first;
        const u32 higher = narrow_pair<bf16>(first, second);
        const float rest = second - __uint_as_float(higher & 0xFFFF0000u);
        return {
            Base::template ready_zero<PLACE, WHICH>(zeros), higher,
            narrow_pair<bf16>(WHICH == EACH ? first - __uint_as_float(higher << 16) : rest, rest)};
    }
    template <int PLACE>
    static __device__ __forceinline__ u32 weights(u32 codes, const ReadyPair& by) {
        const u32 integers = Base::template integers<PLACE>(codes, by.zero);
        return fma_pair<bf16>(integers, by.step, multiply_pair<bf16>(integers, by.lower));
    }
};

template <class>
using Exists = void;

template <class T, class E, class = void>
struct Pairs {
    static constexpr bool FIT = false;
};

template <class T, class E>
struct Pairs<T, E, Exists<typename E::Step>> : PairsOf<T, E, typename E::Step> {
    using Base = PairsOf<T, E, typename E::Step>;

    // Of stored scales, then zero points, two in a word.
    template <int PLACE, Which WHICH>
    static __device__ __forceinline__ ReadyPair ready(const u32* stored) {
        u32 zeros = u32(-E::FIRST) * 0x101u;
        if constexpr (E::Scales::COUNT > 1) zeros = stored[1];
        return Base::template ready<PLACE, WHICH>(zeros, stored[0]);
    }
};

}  // namespace
