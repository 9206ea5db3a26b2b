// What the exchange uses of words.cuh, for a CPU.
#pragma once

#include "system.cuh"

namespace {

inline void store_relaxed_system(u64* p, u64 x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
inline i64 load_constant(const i64* p) { return *p; }
inline void (*before_store)() = nullptr;  // what a test does then
// Words that come one by one.
template <class T>
T load_relaxed_system(const T* p) {
    T x;
    for (std::size_t i = 0; i < sizeof(T) / 4; ++i)
        (&x.x)[i] = __atomic_load_n(&p->x + i, __ATOMIC_RELAXED);
    return x;
}
template <class T>
void store_relaxed_system(T* p, T x) {
    for (std::size_t i = 0; i < sizeof(T) / 4; ++i) {
        if (before_store) before_store();
        __atomic_store_n(&p->x + i, (&x.x)[i], __ATOMIC_RELAXED);
    }
}
inline void add_relaxed(u64* p) { __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }

}  // namespace
