#pragma once

#include "memory.cuh"

namespace {

u32 shared_address(const void*);  // of the GPU's instructions, which are not compiled here

}  // namespace
