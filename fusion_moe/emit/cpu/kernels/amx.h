// AMX with bfloat16, for more rows of activations than one.
//
// The A tile is the weight, 16 of its rows by 32 codes, decoded with its block scales; the B tile 16 rows of activations. Their product
// is transposed when it is done. 64 bytes of a row of the weight are 128 codes; look-ups by the upper byte of each 16-bit half of v << 8,
// v << 4, v, v >> 4 make the rows of four A tiles, of codes k, k + 4, k + 8, ... for k = 0, 1, 2, 3. Activations are packed in that order.
//
// Numbers: 2^8 times a code and 2^-8 times a block scale are float16, so is their product, which has at most six significant bits; moved
// down by three bits it is 2^-112 times the weight as bfloat16. Activations are packed times 2^96, sums are multiplied by 2^16.
#pragma once

#include <algorithm>
#include <atomic>

#include "avx512.h"

namespace {

constexpr i64 TILE = 512;           // numbers of a tile of bfloat16
constexpr i64 CODES = 128;          // of a row of the weight that are decoded at once
constexpr i64 PANEL = 32;           // rows of the weight that are multiplied at once
constexpr i64 OF_CHUNK = 8 * TILE;  // the A tiles of a panel and CODES: two for each 32 codes

// What vectors are looked up in.
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

// Decoding, with its constants in registers. Compilers are not told what they are: they would make them anew for each row, on the very
// port that look-ups take.
struct AmxDecoding {
    __m512i f16_of_code = _mm512_load_si512(AMX_TABLES.f16_of_code), of_scales = _mm512_load_si512(AMX_TABLES.of_scales);
    __m512i bf16_bits = _mm512_set1_epi16(short(0x8FFF));
    __mmask64 upper = 0xAAAAAAAAAAAAAAAAull;

    [[gnu::always_inline]] AmxDecoding() { asm("" : "+v"(f16_of_code), "+v"(of_scales), "+v"(bf16_bits), "+Yk"(upper)); }

    // Eight e4m3 bytes -> of each in the upper byte of four 16-bit numbers.
    [[gnu::always_inline]] __m512i spread(i64 scales) const { return _mm512_shuffle_epi8(_mm512_set1_epi64(scales), of_scales); }

    // CODES codes of a row, `scale` that of each 16-bit number -> a row of four A tiles. A look-up takes the lower half of each upper byte.
    [[gnu::always_inline]] void store(u16* at, __m512i codes, __m512i scale) const {
        _mm512_store_si512(at, weights(_mm512_slli_epi16(codes, 8), scale));
        _mm512_store_si512(at + 2 * TILE, weights(_mm512_slli_epi16(codes, 4), scale));
        _mm512_store_si512(at + 4 * TILE, weights(codes, scale));
        _mm512_store_si512(at + 6 * TILE, weights(_mm512_srli_epi16(codes, 4), scale));
    }

    [[gnu::always_inline]] __m512i weights(__m512i codes, __m512i scale) const {
        const __m512i w = _mm512_maskz_permutexvar_epi8(upper, codes, f16_of_code);
        const __m512i product = _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(w), _mm512_castsi512_ph(scale)));
        return _mm512_and_si512(_mm512_srai_epi16(product, 3), bf16_bits);
    }
};

// Whether an e4m3 byte is NaN or negative.
inline bool any_unusual(const u8* const* row, i64 rows, i64 bytes) {
    __m512i largest = _mm512_setzero_si512();
    for (i64 i = 0; i < rows; ++i) {
        i64 b = 0;
        for (; b + 64 <= bytes; b += 64) largest = _mm512_max_epu8(largest, _mm512_loadu_si512(row[i] + b));
        if (b < bytes) largest = _mm512_max_epu8(largest, load_some(row[i], b, bytes));
    }
    return _mm512_cmpge_epu8_mask(largest, _mm512_set1_epi8(0x7F)) != 0;
}

// Where the weight of an item is read: panels of 32 rows (two `Columns`), and of each chunks of CODES.
class AmxReader {
  public:
    explicit AmxReader(const Item& item) : item_(item), K_(item.p->K), chunks_((K_ + CODES - 1) / CODES) {
        fill(0);
        next_panel();
    }

    i64 chunks() const { return chunks_; }

    // Of the panel that is read: its two `Columns`, and whether a block scale is NaN or negative.
    const Columns* columns() const { return columns_[panel_ & 1]; }
    bool unusual() const { return unusual_; }
    bool done() const { return 2 * panel_ >= item_.subs(); }

    void next_panel() {
        ++panel_;
        fill(panel_ + 1);
        for (i64 i = 0; i < PANEL; ++i) {
            const Columns &now = columns()[i / LANES], &next = columns_[(panel_ + 1) & 1][i / LANES];
            now_[i] = {now.codes[i % LANES], now.scales[i % LANES]}, next_[i] = {next.codes[i % LANES], next.scales[i % LANES]};
        }
        unusual_ = any_unusual(columns()[0].scales, LANES, K_ / 16) || any_unusual(columns()[1].scales, LANES, K_ / 16);
        row_ahead_ = 0;
        start_ahead();
    }

    // Whether `decode_rows` may be called for a chunk: a whole one, block scales neither NaN nor negative.
    bool easy(i64 chunk) const { return !unusual_ && (chunk + 1) * CODES <= K_; }

    // Rows of a chunk; if `fetch`, as many lines of the next panel come nearer.
    template <int ROWS>
    [[gnu::always_inline]] void decode_rows(const AmxDecoding& decoding, i64 chunk, i64 row, u16* at, bool fetch) {
        for (i64 r = row; r < row + ROWS; ++r) {
            i64 scales;
            std::memcpy(&scales, now_[r].scales + CODES / 16 * chunk, 8);
            const __m512i codes = _mm512_loadu_si512(now_[r].codes + CODES / 2 * chunk);
            decoding.store(at + r * 32, codes, _mm512_srli_epi16(decoding.spread(scales), 1));
        }
        if (ROWS > 0 && fetch) prefetch<ROWS>();
    }

    // A chunk, whatever is in it.
    void decode(i64 chunk, u16* at) {
        const AmxDecoding decoding;
        for (i64 i = 0; i < PANEL; ++i) {
            const __m128i eight = _mm512_castsi512_si128(load_some(now_[i].scales, CODES / 16 * chunk, K_ / 16));
            // s eeee mmm 00000000 -> s 0eeee mmm0000000: the sign's copy is in the way
            const __m512i high = _mm512_srai_epi16(decoding.spread(_mm_cvtsi128_si64(eight)), 1);
            const __m512i scale = _mm512_and_si512(high, _mm512_set1_epi16(short(0xBFFF)));
            decoding.store(at + i * 32, load_some(now_[i].codes, CODES / 2 * chunk, K_ / 2), scale);
        }
        prefetch<PANEL>();
        prefetch_scales(chunk);
    }

    // Block scales of the next panel, those of eight chunks at a time.
    void prefetch_scales(i64 chunk) const {
        if (chunk % 8 != 0) return;
        for (const Row& row : next_) fetch_line(row.scales + CODES / 16 * chunk);
    }

  private:
    struct Row {
        const u8 *codes, *scales;
    };

    void fill(i64 panel) {
        for (i64 half = 0; half < 2; ++half) columns_[panel & 1][half] = item_.columns(2 * panel + half);
    }

    // The next LINES lines of the next panel to the second-level cache, in the order of memory, which the CPU's own prefetching follows.
    template <int LINES>
    [[gnu::always_inline]] void prefetch() {
        for (int i = 0; i < LINES; ++i) fetch_line(ahead_ + 64 * i);
        ahead_ += 64 * LINES;
        if (ahead_ >= end_ahead_) start_ahead();
    }

    // Goes on with the next row, and those that lie behind it.
    void start_ahead() {
        row_ahead_ %= PANEL;
        ahead_ = next_[row_ahead_].codes, end_ahead_ = ahead_ + K_ / 2;
        for (++row_ahead_; row_ahead_ < PANEL && next_[row_ahead_].codes == end_ahead_; ++row_ahead_) end_ahead_ += K_ / 2;
    }

    // Inlined, or g++ takes it for a function without effect.
    [[gnu::always_inline]] static void fetch_line(const u8* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1); }

    const Item& item_;
    const i64 K_, chunks_;
    Columns columns_[2][2];  // of this panel, the next
    bool unusual_ = false;
    Row now_[PANEL], next_[PANEL];
    i64 panel_ = -1, row_ahead_ = 0;
    const u8 *ahead_ = nullptr, *end_ahead_ = nullptr;
};

// For each panel, for each pair of tiles of activations, chunk by chunk: while one is multiplied another is decoded, some rows between any
// two tile operations. These run on a unit of their own, but only as far ahead as the CPU looks.
//
// Up to three pairs decode again what the one before had: that costs less than to bring it back from the second-level cache. More pairs
// share a decoded panel; of the next one each decodes some rows.
class AmxProduct {
  public:
    AmxProduct(const Item& item, const u16* x, i64 stride, Scratch& scratch)
        : item_(item), x_(x), of_tile_(LANES * stride), F_(item.p->F), tiles_((item.rows + LANES - 1) / LANES), reader_(item),
          chunks_(reader_.chunks()), shared_rows_(tiles_ > 14 ? 4 : tiles_ > 6 ? 8 : 0), of_half_((shared_rows_ ? chunks_ : 1) * OF_CHUNK),
          weights_(scratch.panel.get<u16>(2 * of_half_)), run_(std::max<i64>(1, 4 / F_) * 2), of_row_(run_ * F_ * LANES),
          out_(scratch.tile.get<float>(tiles_ * LANES * of_row_)) {}

    void run() {
        for (i64 c = 0; c * OF_CHUNK < of_half_; ++c) reader_.decode(c, weights_ + c * OF_CHUNK);
        for (i64 sub = 0; sub < item_.subs(); sub += 2) {
            const __m512 decode[2] = {decode_scales(reader_.columns()[0]), decode_scales(reader_.columns()[1])};
            if (shared_rows_) reader_.next_panel();
            for (i64 t = 0; t < tiles_; t += 2) {
                if (t + 1 < tiles_) {
                    panel<true>(t);
                } else {
                    panel<false>(t);
                }
                finish(sub, t, decode);
            }
            if (shared_rows_) decode_rest();
        }
    }

  private:
    // What sums are multiplied by; NaN for a row of which a block scale is.
    __m512 decode_scales(const Columns& c) const {
        __mmask16 nan = 0;
        for (int i = 0; i < LANES && reader_.unusual(); ++i) {
            nan |= __mmask16(std::any_of(c.scales[i], c.scales[i] + item_.p->K / 16, [](u8 s) { return (s & 0x7F) == 0x7F; }) << i);
        }
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(c.decode), _mm512_set1_ps(0x1p16f));
        return _mm512_mask_mov_ps(scaled, nan, _mm512_set1_ps(as_float(0x7FC00000)));
    }

    // What is multiplied, what is decoded.
    u16* now() const { return weights_ + half_ * of_half_; }
    u16* next() const { return weights_ + (half_ ^ 1) * of_half_; }

    // A panel of the weight by tiles t and t + 1 of activations, or t alone -> sums_.
    template <bool TWO>
    void panel(i64 t) {
        _tile_zero(0);
        _tile_zero(2);
        if (TWO) {
            _tile_zero(1);
            _tile_zero(3);
        }
        for (i64 c = 0; c < chunks_; ++c) {
            const u16* x = x_ + t * of_tile_ + c * 4 * TILE;
            std::atomic_signal_fence(std::memory_order_seq_cst);  // compilers don't see that tiles are read from memory
            if (shared_rows_) {
                shared_chunk<TWO>(x, c, t / 2 * shared_rows_);
            } else {
                own_chunk<TWO>(x, c + 1 < chunks_ ? c + 1 : 0, t);
            }
        }
        _tile_stored(0, sums_[0][0], 64);
        _tile_stored(2, sums_[0][1], 64);
        if (TWO) {
            _tile_stored(1, sums_[1][0], 64);
            _tile_stored(3, sums_[1][1], 64);
        }
    }

    // A chunk that these tiles alone meet, while chunk `read`, the next, is decoded.
    template <bool TWO>
    [[gnu::always_inline]] void own_chunk(const u16* x, i64 read, i64 t) {
        if (read == 0 && t + 2 >= tiles_) reader_.next_panel();
        if (reader_.easy(read)) {
            steps<TWO, 8>(now(), x, read, 0, next(), t == 0);
        } else {
            steps<TWO, 0>(now(), x, read, 0, next(), false);
            if (!reader_.done()) reader_.decode(read, next());
        }
        half_ ^= 1;
    }

    // Chunk c of a panel, while rows row .. row + shared_rows_ - 1 of the same one of the next panel are decoded.
    template <bool TWO>
    [[gnu::always_inline]] void shared_chunk(const u16* x, i64 c, i64 row) {
        const u16* weights = now() + c * OF_CHUNK;
        u16* to = next() + c * OF_CHUNK;
        if (row >= PANEL || reader_.done() || !reader_.easy(c)) {
            steps<TWO, 0>(weights, x, c, 0, to, false);
        } else if (shared_rows_ == 4) {
            steps<TWO, 1>(weights, x, c, row, to, true);
        } else {
            steps<TWO, 2>(weights, x, c, row, to, true);
        }
    }

    // Decodes what of the next panel could not be by the way; it is multiplied then.
    void decode_rest() {
        for (i64 c = 0; c < chunks_ && !reader_.done(); ++c) {
            if (!reader_.easy(c)) reader_.decode(c, next() + c * OF_CHUNK);
        }
        half_ ^= 1;
    }

    // A chunk, while 4 ROWS rows of chunk `read` are decoded and, if `fetch`, the next panel comes nearer.
    template <bool TWO, int ROWS>
    [[gnu::always_inline]] void steps(const u16* weights, const u16* x, i64 read, i64 row, u16* next, bool fetch) {
        const AmxDecoding decoding;
        step<TWO, ROWS>(decoding, weights, x, read, row, next, fetch);
        step<TWO, ROWS>(decoding, weights + 2 * TILE, x + TILE, read, row + ROWS, next, fetch);
        step<TWO, ROWS>(decoding, weights + 4 * TILE, x + 2 * TILE, read, row + 2 * ROWS, next, fetch);
        step<TWO, ROWS>(decoding, weights + 6 * TILE, x + 3 * TILE, read, row + 3 * ROWS, next, fetch);
        if (fetch && row == 0) reader_.prefetch_scales(read);
    }

    // 32 codes of each row of the panel. Activations pass by the first-level cache, or what is decoded would not stay there.
    template <bool TWO, int ROWS>
    [[gnu::always_inline]] void step(const AmxDecoding& decoding, const u16* weights, const u16* x, i64 read, i64 row, u16* next,
                                     bool fetch) {
        constexpr int A = (ROWS + 3) / 4, B = (ROWS + 2) / 4, C = (ROWS + 1) / 4, D = ROWS / 4;  // rows before each of four products
        _tile_loadd(4, weights, 64);
        _tile_stream_loadd(6, x, 64);
        reader_.template decode_rows<A>(decoding, read, row, next, fetch);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + TILE, 64);
        reader_.template decode_rows<B>(decoding, read, row + A, next, fetch);
        _tile_dpbf16ps(2, 5, 6);
        if (TWO) _tile_stream_loadd(7, x + of_tile_, 64);
        reader_.template decode_rows<C>(decoding, read, row + A + B, next, fetch);
        if (TWO) _tile_dpbf16ps(1, 4, 7);
        reader_.template decode_rows<D>(decoding, read, row + A + B + C, next, fetch);
        if (TWO) _tile_dpbf16ps(3, 5, 7);
    }

    // Results from sums_, kept until run_ blocks of a row can be stored together: strips of sixteen columns, of rows that lie pages apart,
    // wait for memory one by one.
    void finish(i64 sub, i64 t, const __m512 (&decode)[2]) {
        const i64 first = sub / (run_ * F_) * (run_ * F_), last = std::min(sub + 2, item_.subs());
        for (i64 i = t; i < std::min(t + 2, tiles_); ++i) {
            const i64 rows = std::min<i64>(LANES, item_.rows - LANES * i);
            float* out = out_ + i * LANES * of_row_;
            for (i64 s = sub; s < last; ++s) {
                const float* sums = sums_[i - t][s - sub];
                for (i64 r = 0; r < rows; r += 4) transpose(sums + r, decode[s - sub], out + r * of_row_ + (s - first) * LANES, of_row_);
            }
            if (last == first + run_ * F_ || last == item_.subs()) item_.store(LANES * i, rows, first, out, of_row_, (last - first) / F_);
        }
    }

    // Four columns of sums [16][16] -> four rows of `out`, each times `decode`.
    static void transpose(const float* sums, __m512 decode, float* out, i64 of_row) {
        __m512 a[4];
        for (int i = 0; i < 4; ++i) {  // 128 bits j: of row 4 j + i
            const auto four = [&](int j) { return _mm_load_ps(sums + (4 * j + i) * LANES); };
            a[i] = _mm512_insertf32x4(_mm512_castps128_ps512(four(0)), four(1), 1);
            a[i] = _mm512_insertf32x4(_mm512_insertf32x4(a[i], four(2), 2), four(3), 3);
        }
        const __m512 low[2] = {_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpacklo_ps(a[2], a[3])};
        const __m512 high[2] = {_mm512_unpackhi_ps(a[0], a[1]), _mm512_unpackhi_ps(a[2], a[3])};
        const __m512 b[4] = {_mm512_shuffle_ps(low[0], low[1], 0x44), _mm512_shuffle_ps(low[0], low[1], 0xEE),
                             _mm512_shuffle_ps(high[0], high[1], 0x44), _mm512_shuffle_ps(high[0], high[1], 0xEE)};
        for (int i = 0; i < 4; ++i) _mm512_store_ps(out + i * of_row, _mm512_mul_ps(b[i], decode));
    }

    const Item& item_;
    const u16* const x_;
    const i64 of_tile_, F_, tiles_;
    AmxReader reader_;
    const i64 chunks_, shared_rows_;  // how many rows of a chunk each pair decodes for all; 0: each pair decodes for itself
    const i64 of_half_;
    u16* const weights_;  // [2][of_half_] chunks, or panels: one that is multiplied, one that is decoded
    const i64 run_, of_row_;
    float* const out_;  // [rows of the item][run_][F][16]
    i64 half_ = 0;
    alignas(64) float sums_[2][2][LANES * LANES];  // of each tile of activations, of each 16 rows of the panel
};

struct Amx {
    using Activation = bf16;
    using Packed = u16;  // tiles, one after the other, of 16 rows; zeros up to a multiple of 16 rows and 128 activations
    static constexpr auto NAME = "by tiles of AMX";
    static constexpr i64 MOST = CHUNK;
    static constexpr int SMALLEST = -64, LARGEST = 31;

    static void pack(const bf16* const* x, i64 rows, Packed* packed, i64, i64 K) {
        const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        for (i64 k = 0; k < (K + CODES - 1) / CODES * CODES; k += 32) {
            __m512i a[16], b[16];
            for (i64 i = 0; i < LANES; ++i) {
                const __m512i v = i < rows ? load_some(reinterpret_cast<const u8*>(x[i]), 2 * k, 2 * K) : _mm512_setzero_si512();
                const __mmask32 normal = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7F80));
                a[i] = _mm512_shuffle_epi8(_mm512_maskz_add_epi16(normal, v, _mm512_set1_epi16(96 << 7)), order);
            }
            transpose(a, b);
            // word 4 i + j: activations k + 8 i + j and k + 8 i + j + 4
            Packed* at = packed + k / CODES * 4 * TILE + k % CODES / 8 * 32;
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j) _mm512_store_si512(at + j * TILE + i * 32, b[4 * i + j]);
            }
        }
    }

    static void multiply(const Item& item, const Packed* packed, i64 stride, Scratch& scratch) {
        AmxProduct(item, packed, stride, scratch).run();
    }
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
    using Fast = std::conditional_t<std::is_same<A, bf16>::value, Kernels<FewRows<Avx512Dots<Avx512Run, 1>>, Amx>, Avx512Tier::Fast<A>>;
    using Thread = AmxThread;
    static constexpr double ROWS_OF_DECODING = 32;
};

}  // namespace
