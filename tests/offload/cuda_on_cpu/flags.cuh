// What offloaded experts use of flags.cuh, for a CPU.
#pragma once

#include "system.cuh"

namespace {

inline i32 load_flag(const i32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_flag(i32* p, i32 x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
inline void prefetch(const void*) {}
inline u32 add_ticket(u32* p) { return __atomic_fetch_add(p, 1, __ATOMIC_ACQ_REL); }

}  // namespace
