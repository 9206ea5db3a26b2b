// AMX with bfloat16: for more rows of activations than one.
//
// The A tile is the weight, 16 of its rows by 32 codes, decoded with its block scales; the B tile 16 rows of activations. Their product
// is transposed when it is done. 64 bytes of a row of the weight are 128 codes; a look-up by 16-bit halves of v, v >> 4, v >> 8, v >> 12
// makes the rows of four A tiles, of codes k, k + 4, k + 8, ... for k = 0, 1, 2, 3. Activations are packed once in that order.
//
// Numbers: 2^8 times a code and 2^-8 times a block scale are float16, so is their product, which has at most six significant bits; moved
// down by three bits it is 2^-112 times the weight as bfloat16. Activations are packed times 2^96, sums are multiplied by 2^16.
#pragma once

#include <atomic>

#include "avx512_bf16.h"

#ifndef STAGE
#define STAGE 2
#endif

namespace {

constexpr i64 TILE = 512;                // numbers of a tile of bfloat16
constexpr i64 PAIR = 2 * TILE;           // the A tiles of 32 rows and 32 codes
constexpr i64 OF_STAGE = STAGE * 4 * PAIR;  // chunks of 128 codes that are decoded while the STAGE before is multiplied

// The largest e4m3 byte of some rows; from 0x7F on it is NaN or negative.
inline u8 largest_scale(const u8* const* row, i64 rows, i64 bytes) {
    __m512i largest = _mm512_setzero_si512();
    for (i64 i = 0; i < rows; ++i) {
        i64 b = 0;
        for (; b + 64 <= bytes; b += 64) largest = _mm512_max_epu8(largest, _mm512_loadu_si512(row[i] + b));
        if (b < bytes) largest = _mm512_max_epu8(largest, load_some(row[i], b, bytes));
    }
    alignas(64) u8 found[64];
    _mm512_store_si512(found, largest);
    return *std::max_element(found, found + 64);
}

// What vectors are loaded from.
struct alignas(64) AmxTables {
    u8 f16_of_code[64];  // the upper byte, whose lower is zero, times 2^8; look-ups take six bits, of which four belong to the code
    u8 of_scales[64];    // byte b of eight -> the upper byte of 16-bit numbers 4 b .. 4 b + 3

    constexpr AmxTables() : f16_of_code(), of_scales() {
        constexpr u8 sizes[8] = {0x00, 0x58, 0x5C, 0x5E, 0x60, 0x62, 0x64, 0x66};
        for (int i = 0; i < 64; ++i) f16_of_code[i] = u8(sizes[i & 7] | (i & 8) << 4);
        for (int i = 0; i < 32; ++i) of_scales[2 * i] = 0x80, of_scales[2 * i + 1] = u8(i / 4);
    }
};

constexpr AmxTables AMX_TABLES{};

// Decodes the weight of an item, 32 rows (two `Columns`) after the other, in stages of a few chunks of 128 codes.
class AmxDecoder {
  public:
    AmxDecoder(const Item& item, i64 chunks, i64 per_stage, u16* stages)
        : item_(item), K_(item.p->K), chunks_(chunks), per_stage_(per_stage), stages_(stages), chunk_(chunks) {
        fill(0);
    }

    // Begins with the next stage; the one before is `decoded`.
    void start() {
        if (chunk_ == chunks_) start_panel();
        end_ = 2 * panel_ < item_.subs() ? std::min(chunk_ + per_stage_, chunks_) : chunk_;
        easy_end_ = ordinary_ ? std::min(end_, K_ / 128) : chunk_;
        stage_ ^= 1, at_ = stages_ + stage_ * OF_STAGE;
    }

    const u16* decoded() const { return stages_ + (stage_ ^ 1) * OF_STAGE; }

    // The two `Columns` of a panel, from the one before that which is decoded to the one after it.
    const Columns* columns(i64 panel) const { return columns_[panel & 3]; }

    // Whether there is something left of the stage for `decode`.
    bool easy() const { return chunk_ < easy_end_; }

    // Rows FIRST .. END - 1 of the next ones, 128 codes of each; block scales are positive.
    template <int FIRST, int END>
    void decode() {
        for (int i = FIRST; i < END; ++i) {
            const i64 r = row_ + i;
            i64 scales;
            std::memcpy(&scales, scales_[r] + 8 * chunk_, 8);
            const __m512i high = _mm512_shuffle_epi8(_mm512_set1_epi64(scales), _mm512_load_si512(AMX_TABLES.of_scales));
            store(r, _mm512_loadu_si512(codes_[r] + 64 * chunk_), _mm512_srli_epi16(high, 1));
            prefetch();
        }
    }

    // That `count` rows are decoded; it divides 32.
    void advance(int count) {
        row_ += count;
        if (row_ == 2 * LANES) row_ = 0, ++chunk_, at_ += 4 * PAIR;
    }

    // All that is left of the stage, whatever block scales are.
    void rest() {
        for (; chunk_ < end_; advance(1)) {
            const __m512i scales = _mm512_broadcastq_epi64(_mm512_castsi512_si128(load_some(scales_[row_], 8 * chunk_, K_ / 16)));
            const __m512i high = _mm512_shuffle_epi8(scales, _mm512_load_si512(AMX_TABLES.of_scales));
            // s eeee mmm 00000000 -> s 0eeee mmm0000000: the sign's copy is in the way
            const __m512i scale = _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16(short(0xBFFF)));
            store(row_, load_some(codes_[row_], 64 * chunk_, K_ / 2), scale);
            prefetch();
        }
    }

  private:
    void start_panel() {
        chunk_ = 0, ++panel_;
        fill(panel_ + 1);
        for (i64 half = 0; half < 2; ++half) {
            const Columns &now = columns(panel_)[half], &next = columns(panel_ + 1)[half];
            std::copy_n(now.codes, LANES, codes_ + half * LANES), std::copy_n(now.scales, LANES, scales_ + half * LANES);
            std::copy_n(next.codes, LANES, ahead_codes_ + half * LANES), std::copy_n(next.scales, LANES, ahead_scales_ + half * LANES);
        }
        ordinary_ = largest_scale(scales_, 2 * LANES, K_ / 16) < 0x7F;
        ahead_row_ = 0;
        start_ahead();
    }

    void fill(i64 panel) {
        for (i64 half = 0; half < 2; ++half) columns_[panel & 3][half] = item_.columns(2 * panel + half);
    }

    // 128 codes of a row; a look-up takes the lower half of each upper byte.
    void store(i64 row, __m512i v, __m512i scale) const {
        u16* at = at_ + row * 32;
        _mm512_store_si512(at, weights(_mm512_slli_epi16(v, 8), scale));
        _mm512_store_si512(at + PAIR, weights(_mm512_slli_epi16(v, 4), scale));
        _mm512_store_si512(at + 2 * PAIR, weights(v, scale));
        _mm512_store_si512(at + 3 * PAIR, weights(_mm512_srli_epi16(v, 4), scale));
    }

    static __m512i weights(__m512i codes, __m512i scale) {
        const __m512i w = _mm512_maskz_permutexvar_epi8(0xAAAAAAAAAAAAAAAAull, codes, _mm512_load_si512(AMX_TABLES.f16_of_code));
        const __m512i product = _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(w), _mm512_castsi512_ph(scale)));
        return _mm512_and_si512(_mm512_srai_epi16(product, 3), _mm512_set1_epi16(short(0x8FFF)));
    }

    // A line of the next 32 rows to the second-level cache, in the order of memory, which the CPU's own prefetching follows.
    void prefetch() {
        _mm_prefetch(reinterpret_cast<const char*>(ahead_), _MM_HINT_T1);
        ahead_ += 64;
        if (ahead_ >= ahead_end_) ahead_row_ = (ahead_row_ + 1) % (2 * LANES), start_ahead();
    }

    void start_ahead() {
        ahead_ = ahead_codes_[ahead_row_], ahead_end_ = ahead_ + K_ / 2;
        for (i64 b = 0; b < K_ / 16; b += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead_scales_[ahead_row_] + b), _MM_HINT_T1);
    }

    const Item& item_;
    const i64 K_, chunks_, per_stage_;
    u16* const stages_;
    Columns columns_[4][2];
    const u8 *codes_[2 * LANES], *scales_[2 * LANES], *ahead_codes_[2 * LANES], *ahead_scales_[2 * LANES];
    const u8 *ahead_ = nullptr, *ahead_end_ = nullptr;
    i64 panel_ = -1, chunk_, end_ = 0, easy_end_ = 0, row_ = 0, stage_ = 0, ahead_row_ = 0;
    bool ordinary_ = true;
    u16* at_ = nullptr;
};

// Transposes and stores sums of 32 rows of the weight.
class AmxFinisher {
  public:
    AmxFinisher(const Item& item, float* tile) : item_(item), F_(item.p->F), tile_(tile), tiles_((item.rows + LANES - 1) / LANES) {}

    // sums: see AmxProduct.
    void start(i64 sub, const Columns* columns, const float* sums) {
        sub_ = sub, sums_ = sums, unit_ = 0, end_ = 2 * tiles_;
        for (i64 half = 0; half < 2; ++half) decode_[half] = decode_scales(columns[half]);
    }

    // 16 rows of the weight by 16 of activations.
    __attribute__((noinline)) void step() {
        if (unit_ < end_) finish(unit_ / 2, unit_ % 2), ++unit_;
    }

    void rest() {
        while (unit_ < end_) step();
    }

  private:
    void finish(i64 t, i64 half) const {
        const i64 sub = sub_ + half, rows = std::min<i64>(LANES, item_.rows - LANES * t), of_row = F_ * LANES;
        if (sub >= item_.subs()) return;
        const float* sums = sums_ + t / 2 * 1024 + half * 512 + t % 2 * 256;
        float *out = tile_ + t * LANES * of_row, *at = out + sub % F_ * LANES;
        __m512i a[16], b[16];
        for (int i = 0; i < LANES; ++i) a[i] = _mm512_load_si512(sums + 16 * i);
        transpose(a, b);
        for (int i = 0; i < LANES; ++i) _mm512_store_ps(at + i * of_row, _mm512_mul_ps(_mm512_castsi512_ps(b[i]), decode_[half]));
        if (sub % F_ == F_ - 1) item_.store(LANES * t, rows, sub, out, of_row);
    }

    // What sums are multiplied by; NaN for a row of which a block scale is.
    __m512 decode_scales(const Columns& c) const {
        const i64 blocks = item_.p->K / 16;
        __mmask16 nan = 0;
        if (largest_scale(c.scales, LANES, blocks) >= 0x7F) {
            for (int i = 0; i < LANES; ++i) nan |= __mmask16(std::any_of(c.scales[i], c.scales[i] + blocks, [](u8 s) { return (s & 0x7F) == 0x7F; }) << i);
        }
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(c.decode), _mm512_set1_ps(0x1p16f));
        return _mm512_mask_mov_ps(scaled, nan, _mm512_set1_ps(as_float(0x7FC00000)));
    }

    const Item& item_;
    const i64 F_;
    float* const tile_;
    const i64 tiles_;
    i64 sub_ = 0, unit_ = 0, end_ = 0;
    const float* sums_ = nullptr;
    __m512 decode_[2];
};

// 32 rows of the weight after the other, stage by stage; while one is multiplied the next is decoded and the 32 rows before are stored, a bit
// between any two tile operations: they run on units of their own, but only as far ahead as the CPU looks.
class AmxProduct {
  public:
    AmxProduct(const Item& item, const u16* x, i64 stride, Scratch& scratch)
        : item_(item), x_(x), of_tile_(LANES * stride), chunks_((item.p->K + 127) / 128), tiles_((item.rows + LANES - 1) / LANES),
          stages_((chunks_ + STAGE - 1) / STAGE), per_stage_((chunks_ + stages_ - 1) / stages_),
          sums_(scratch.sums.get<float>(2 * of_panel())), decoder_(item, chunks_, per_stage_, scratch.panel.get<u16>(2 * OF_STAGE)),
          finisher_(item, scratch.tile.get<float>(tiles_ * LANES * item.p->F * LANES)) {}

    void run() {
        decoder_.start();
        decoder_.rest();
        for (i64 sub = 0; sub < item_.subs(); sub += 2) {
            float* sums = sums_ + sub / 2 % 2 * of_panel();
            for (i64 chunk = 0; chunk < chunks_; chunk += per_stage_) {
                decoder_.start();
                stage(decoder_.decoded(), chunk, sums);
                decoder_.rest();
            }
            finisher_.rest();
            finisher_.start(sub, decoder_.columns(sub / 2), sums);
        }
        finisher_.rest();
    }

  private:
    i64 pairs() const { return (tiles_ + 1) / 2; }

    // Of 32 rows of the weight: for each two tiles of activations four tiles of sums.
    i64 of_panel() const { return pairs() * 1024; }

    void stage(const u16* weights, i64 chunk, float* sums) {
        std::atomic_signal_fence(std::memory_order_seq_cst);  // compilers don't see that tiles are read from memory
        const i64 steps = 4 * std::min(per_stage_, chunks_ - chunk);
        const bool first = chunk == 0, last = chunk + per_stage_ >= chunks_;
        for (i64 t = 0; t < tiles_; t += 2, sums += 1024) {
            const u16* x = x_ + t * of_tile_ + chunk * 4 * TILE;
            if (t + 1 < tiles_) {
                share<true>(weights, x, steps, sums, first, last);
            } else {
                share<false>(weights, x, steps, sums, first, last);
            }
        }
    }

    // So many rows are decoded at each step that the next stage is ready in time.
    template <bool TWO>
    void share(const u16* weights, const u16* x, i64 steps, float* sums, bool first, bool last) {
        switch (pairs()) {
            case 1: return pair<TWO, 8>(weights, x, steps, sums, first, last);
            case 2: case 3: return pair<TWO, 4>(weights, x, steps, sums, first, last);
            case 4: case 5: case 6: case 7: return pair<TWO, 2>(weights, x, steps, sums, first, last);
            default: return pair<TWO, 1>(weights, x, steps, sums, first, last);
        }
    }

    // A stage of 32 rows of the weight by two tiles of activations, or one.
    template <bool TWO, int SHARE>
    void pair(const u16* weights, const u16* x, i64 steps, float* sums, bool first, bool last) {
        const bool kept = tiles_ <= 2;  // from stage to stage, since nothing else needs the tiles
        if (first) {
            _tile_zero(0);
            _tile_zero(2);
            if (TWO) {
                _tile_zero(1);
                _tile_zero(3);
            }
        } else if (!kept) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(2, sums + 512, 64);
            if (TWO) {
                _tile_loadd(1, sums + 256, 64);
                _tile_loadd(3, sums + 768, 64);
            }
        }
        for (i64 i = 0; i < steps; ++i, weights += PAIR, x += TILE) {
            if (decoder_.easy()) {
                step<TWO, SHARE>(weights, x);
                decoder_.advance(SHARE);
            } else {
                step<TWO, 0>(weights, x);
            }
            if (++since_ >= chunks_) {
                since_ = 0;
                finisher_.step();
            }
        }
        if (last || !kept) {
            _tile_stored(0, sums, 64);
            _tile_stored(2, sums + 512, 64);
            if (TWO) {
                _tile_stored(1, sums + 256, 64);
                _tile_stored(3, sums + 768, 64);
            }
        }
    }

    template <bool TWO, int SHARE>
    void step(const u16* weights, const u16* x) {
        _tile_loadd(4, weights, 64);
        _tile_loadd(6, x, 64);
        decoder_.template decode<0, SHARE / 4>();
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + TILE, 64);
        decoder_.template decode<SHARE / 4, SHARE / 2>();
        _tile_dpbf16ps(2, 5, 6);
        if (TWO) _tile_loadd(7, x + of_tile_, 64);
        decoder_.template decode<SHARE / 2, SHARE * 3 / 4>();
        if (TWO) _tile_dpbf16ps(1, 4, 7);
        decoder_.template decode<SHARE * 3 / 4, SHARE>();
        if (TWO) _tile_dpbf16ps(3, 5, 7);
    }

    const Item& item_;
    const u16* const x_;
    const i64 of_tile_, chunks_, tiles_, stages_, per_stage_;
    float* const sums_;
    AmxDecoder decoder_;
    AmxFinisher finisher_;
    i64 since_ = 0;
};

struct Amx {
    using Activation = bf16;
    using Packed = u16;  // tiles, one after the other, of 16 rows; zeros up to a multiple of 16 rows and 128 activations
    static constexpr i64 MOST = CHUNK;
    static constexpr int SMALLEST = -64, LARGEST = 31;

    static void pack(const bf16* const* x, i64 rows, Packed* packed, i64, i64 K) {
        const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        for (i64 k = 0; k < (K + 127) / 128 * 128; k += 32) {
            __m512i a[16], b[16];
            for (i64 i = 0; i < LANES; ++i) {
                const __m512i v = i < rows ? load_some(reinterpret_cast<const u8*>(x[i]), 2 * k, 2 * K) : _mm512_setzero_si512();
                const __mmask32 normal = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7F80));
                a[i] = _mm512_shuffle_epi8(_mm512_maskz_add_epi16(normal, v, _mm512_set1_epi16(96 << 7)), order);
            }
            transpose(a, b);
            // word 4 i + j: activations k + 8 i + j and k + 8 i + j + 4
            Packed* at = packed + k / 128 * 4 * TILE + k % 128 / 8 * 32;
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j) _mm512_store_si512(at + j * TILE + i * 32, b[4 * i + j]);
            }
        }
    }

    static void multiply(const Item& item, const Packed* packed, i64 stride, Scratch& scratch) { AmxProduct(item, packed, stride, scratch).run(); }
};

// Tiles of 16 rows of 64 bytes, all eight, for a thread.
class AmxThread {
  public:
    AmxThread() {
        struct alignas(64) {
            u8 palette = 1, start_row = 0, reserved[14] = {};
            u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    AmxThread(const AmxThread&) = delete;
    AmxThread& operator=(const AmxThread&) = delete;
    ~AmxThread() { _tile_release(); }
};

struct AmxTier {
    using Wide = Panels<Avx512>;
    template <class A>
    using Fast = std::conditional_t<std::is_same<A, bf16>::value, Kernels<Amx>, Kernels<FewRows<Avx512>, Panels<Avx512>>>;
    using Thread = AmxThread;
    static constexpr double ROWS_OF_DECODING = 64;
};

}  // namespace
