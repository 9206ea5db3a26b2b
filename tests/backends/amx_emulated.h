// The instructions of the amx tier in plain C++, for CPUs that have AVX-512 with bfloat16 but not
// these. Included before all else, by -include.
#pragma once

#include <immintrin.h>

#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AVX512FP16__ 1

namespace emulated {

struct Tile {
    unsigned char bytes[16][64];
};

inline Tile& tile(int i) {
    static thread_local Tile tiles[8];
    return tiles[i];
}

inline void load(int i, const void* base, long stride) {
    for (int r = 0; r < 16; ++r)
        std::memcpy(tile(i).bytes[r], static_cast<const char*>(base) + r * stride, 64);
}

inline void store(int i, void* base, long stride) {
    for (int r = 0; r < 16; ++r)
        std::memcpy(static_cast<char*>(base) + r * stride, tile(i).bytes[r], 64);
}

// Subnormals count as zero.
inline __m512 normal(__m512 x) {
    return _mm512_maskz_mov_ps(
        ~_mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f), _CMP_LT_OQ), x);
}

// The first, the second of each pair of bfloat16.
inline __m512 even(__m512i pairs) {
    return normal(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
}
inline __m512 odd(__m512i pairs) {
    return normal(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xFFFF0000)))));
}

// c += a b; 16 rows of 16 pairs each.
inline void dpbf16(int c, int a, int b) {
    for (int m = 0; m < 16; ++m) {
        __m512 first = _mm512_setzero_ps(), second = first;
        for (int k = 0; k < 16; ++k) {
            int pair;
            std::memcpy(&pair, tile(a).bytes[m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(pair), y = _mm512_loadu_si512(tile(b).bytes[k]);
            first = normal(_mm512_add_ps(first, _mm512_mul_ps(even(x), even(y))));
            second = normal(_mm512_add_ps(second, _mm512_mul_ps(odd(x), odd(y))));
        }
        const __m512 sum = _mm512_loadu_ps(tile(c).bytes[m]);
        _mm512_storeu_ps(tile(c).bytes[m],
                         normal(_mm512_add_ps(sum, normal(_mm512_add_ps(first, second)))));
    }
}

inline __m512i mul_ph(__m512i a, __m512i b) {
    __m256i out[2];
    for (int i = 0; i < 2; ++i) {
        const __m512 x =
            _mm512_cvtph_ps(i ? _mm512_extracti64x4_epi64(a, 1) : _mm512_castsi512_si256(a));
        const __m512 y =
            _mm512_cvtph_ps(i ? _mm512_extracti64x4_epi64(b, 1) : _mm512_castsi512_si256(b));
        out[i] = _mm512_cvtps_ph(_mm512_mul_ps(x, y), 0);
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(out[0]), out[1], 1);
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0
#define _tile_zero(i) std::memset(&emulated::tile(i), 0, sizeof(emulated::Tile))
#define _tile_loadd(i, base, stride) emulated::load(i, base, stride)
#define _tile_stream_loadd(i, base, stride) emulated::load(i, base, stride)
#define _tile_stored(i, base, stride) emulated::store(i, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated::dpbf16(c, a, b)
#define _mm512_castsi512_ph(v) (v)
#define _mm512_castph_si512(v) (v)
#define _mm512_mul_ph(a, b) emulated::mul_ph(a, b)
