// INT4, as readers.py derives it from the descriptor: here, since wheels with kernels are built
// where descriptors cannot be read.
#pragma once

#include "derived.h"

namespace {

struct Format {
    static constexpr double BYTES = 0.5625;
    static constexpr int BITS = 4;
    static constexpr int FLIP = 0, FIRST = -8;
    using Scales = Levels<Level<bf16, 32, Role::MULTIPLIER>>;
};

}  // namespace

using Weight = DerivedWeight<Format>;
