// Plain C++: right everywhere, fast nowhere. Weights are read as `dequantize` of their reader makes
// them.
#pragma once

#include "dequantized.h"
#include "e2m1.h"
#include "words.h"

namespace {

struct GenericF32 : F32Words, WordTiles<GenericF32, float, 4, 1> {
    typedef float Sums __attribute__((vector_size(16)));

    static Sums load(const float* panel) {
        Sums w;
        std::memcpy(&w, panel, sizeof w);
        return w;
    }
    static Sums all(float x) { return Sums{} + x; }
    static Sums add(Sums w, Sums x, Sums sum) { return sum + x * w; }
};

}  // namespace
