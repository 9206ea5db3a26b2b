// Reading memory as fast as it goes, and taking it out of the caches.
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using i64 = long long;
using u64 = std::uint64_t;
typedef u64 Words __attribute__((vector_size(64), aligned(8)));

constexpr i64 LINE = 64, STEP = 2 * LINE;

// The exclusive or of the words of [p, p + bytes), a multiple of STEP; ahead: how far it
// prefetches, 0 for not at all.
Words walk(const unsigned char* p, i64 bytes, i64 ahead) {
    Words a = {}, b = {};
    for (const unsigned char *at = p, *end = p + bytes; at < end; at += STEP) {
        for (i64 line = 0; line < STEP && ahead; line += LINE)
            __builtin_prefetch(at + ahead + line);
        const Words* words = reinterpret_cast<const Words*>(at);
        a ^= words[0], b ^= words[1];
    }
    return a ^ b;
}

// Writes the line of a cache that starts here back, and drops it from all of them. False where a
// program cannot ask for that.
inline bool drop_line(const unsigned char* at) {
#if defined(__x86_64__)
    _mm_clflush(at);
    return true;
#elif defined(__aarch64__)
    asm volatile("dc civac, %0" ::"r"(at) : "memory");
    return true;
#else
    (void)at;
    return false;
#endif
}

}  // namespace

// The exclusive or of all 64-bit words of `count` pieces of memory, each thread reading one share
// of them, end to end.
extern "C" u64 read_words(const unsigned char* const* pieces, const i64* bytes, int count,
                          int threads, i64 ahead) {
    i64 steps = 0;
    for (int i = 0; i < count; ++i) steps += bytes[i] / STEP;
    u64 total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(^ : total)
    for (int thread = 0; thread < threads; ++thread) {
        const i64 first = steps * thread / threads, last = steps * (thread + 1) / threads;
        for (i64 i = 0, start = 0; i < count; start += bytes[i++] / STEP) {
            const i64 from = first > start ? first - start : 0, left = last - start,
                      own = bytes[i] / STEP, to = left < own ? left : own;
            if (from >= to) continue;
            const Words words = walk(pieces[i] + from * STEP, (to - from) * STEP, ahead);
            for (int j = 0; j < 8; ++j) total ^= words[j];
        }
    }
    for (int i = 0; i < count; ++i) {
        for (i64 at = bytes[i] / STEP * STEP; at + 8 <= bytes[i]; at += 8) {
            u64 word;
            std::memcpy(&word, pieces[i] + at, 8);
            total ^= word;
        }
    }
    return total;
}

// Takes [p, p + bytes) out of the caches; 0 if that cannot be asked for here.
extern "C" int evict(const unsigned char* p, i64 bytes, int threads) {
    const unsigned char* first = p - reinterpret_cast<std::uintptr_t>(p) % LINE;
    const i64 end = p + bytes - first;
    int done = 1;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(& : done)
    for (i64 i = 0; i < end; i += LINE) done &= drop_line(first + i);
    __sync_synchronize();
    return done;
}
