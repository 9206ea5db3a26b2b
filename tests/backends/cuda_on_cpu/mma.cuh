#pragma once

#include "memory.cuh"

namespace {

void load_matrices(u32 (&)[4], u32);  // of the GPU's instructions, which are not compiled here
u32 transposed(u32);

}  // namespace
