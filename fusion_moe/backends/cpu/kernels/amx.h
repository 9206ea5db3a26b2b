// e2m1 codes by AMX with bfloat16, for more rows of activations than one.
//
// The A tile is the weight, 16 of its rows by 32 codes, dequantized; the B tile 16 rows of
// activations. Their product is transposed when it is done. 64 bytes of a row of the weight are 128
// codes; look-ups by the upper byte of each 16-bit half of v << 8, v << 4, v, v >> 4 make the rows
// of four A tiles, of codes k, k + 4, k + 8, ... for k = 0, 1, 2, 3. Activations are packed in that
// order.
//
// Numbers: a code and its scale, each times a power of two that the reader names, are float16, so
// is their product, which has at most six significant bits; moved down by three bits it is 2^-112
// times as much as bfloat16. Activations are packed times 2^96, sums are multiplied by what is
// left: 2^16, less the reader's powers.
#pragma once

#include <algorithm>
#include <atomic>

#include "avx512_vnni.h"

namespace {

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

constexpr i64 TILE = 512;           // numbers of a tile of bfloat16
constexpr i64 CODES = 128;          // of a row of the weight that are dequantized at once
constexpr i64 PANEL = 32;           // rows of the weight that are multiplied at once
constexpr i64 OF_CHUNK = 8 * TILE;  // the A tiles of a panel and CODES: two for each 32 codes

// What vectors are looked up in.
template <class Weight>
struct alignas(64) AmxTables {
    u8 f16_of_code[64];  // the upper byte, whose lower is zero, times 2^F16_CODE; look-ups take six
                         // bits, of which four belong to the code
    u8 of_scales[64];    // scale b of a chunk -> the upper bytes of the 16-bit numbers, four codes
                         // each, that it scales

    constexpr AmxTables() : f16_of_code(), of_scales() {
        constexpr u8 sizes[8] = {0x00, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46};
        for (int i = 0; i < 64; ++i)
            f16_of_code[i] =
                u8(((i & 7) == 0 ? 0 : sizes[i & 7] + 4 * Weight::F16_CODE) | (i & 8) << 4);
        for (int i = 0; i < 32; ++i)
            of_scales[2 * i] = 0x80, of_scales[2 * i + 1] = u8(4 * i / Weight::BLOCK);
    }
};

template <class Weight>
constexpr AmxTables<Weight> AMX_TABLES{};

// Dequantizing, with its constants in registers. Compilers are not told what they are: they would
// make them anew for each row, on the very port that look-ups take.
template <class Weight>
struct AmxDequantizer {
    __m512i f16_of_code = _mm512_load_si512(AMX_TABLES<Weight>.f16_of_code),
            of_scales = _mm512_load_si512(AMX_TABLES<Weight>.of_scales);
    __m512i bf16_bits = _mm512_set1_epi16(short(0x8FFF)), eighth = _mm512_set1_epi16(1 << 13);
    __mmask64 upper = 0xAAAAAAAAAAAAAAAAull;

    [[gnu::always_inline]] AmxDequantizer() {
        asm("" : "+v"(f16_of_code), "+v"(of_scales), "+v"(bf16_bits), "+v"(eighth), "+Yk"(upper));
    }

    // The scales of a chunk -> each in the upper bytes of 16-bit numbers.
    [[gnu::always_inline]] __m512i spread(i64 scales) const {
        return _mm512_shuffle_epi8(_mm512_set1_epi64(scales), of_scales);
    }

    // CODES codes of a row, `scale` that of each 16-bit number -> a row of four A tiles. A look-up
    // takes the lower half of each upper byte.
    [[gnu::always_inline]] void store(u16* at, __m512i codes, __m512i scale) const {
        _mm512_store_si512(at, weights(_mm512_slli_epi16(codes, 8), scale));
        _mm512_store_si512(at + 2 * TILE, weights(_mm512_slli_epi16(codes, 4), scale));
        _mm512_store_si512(at + 4 * TILE, weights(codes, scale));
        _mm512_store_si512(at + 6 * TILE, weights(_mm512_srli_epi16(codes, 4), scale));
    }

    [[gnu::always_inline]] __m512i weights(__m512i codes, __m512i scale) const {
        const __m512i w = _mm512_maskz_permutexvar_epi8(upper, codes, f16_of_code);
        const __m512i product =
            _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(w), _mm512_castsi512_ph(scale)));
        // moved down by a multiplication: one port alone shifts
        return _mm512_and_si512(_mm512_mulhi_epi16(product, eighth), bf16_bits);
    }
};

// Whether a byte is `first` or larger.
inline bool any_from(int first, const u8* const* row, i64 rows, i64 bytes) {
    __m512i largest = _mm512_setzero_si512();
    for (i64 i = 0; i < rows; ++i) {
        i64 b = 0;
        for (; b + 64 <= bytes; b += 64)
            largest = _mm512_max_epu8(largest, _mm512_loadu_si512(row[i] + b));
        if (b < bytes) largest = _mm512_max_epu8(largest, load_some(row[i], b, bytes));
    }
    return _mm512_cmpge_epu8_mask(largest, _mm512_set1_epi8(char(first))) != 0;
}

// Where the weight of a work tile is read: panels of 32 rows (two `Columns`), and of each chunks of
// CODES.
template <class Weight>
class AmxReader {
  public:
    using Columns = typename Weight::Columns;
    explicit AmxReader(const WorkTile& work_tile)
        : work_tile_(work_tile), K_(work_tile.p->K), chunks_((K_ + CODES - 1) / CODES) {
        fill(0);
        next_panel();
    }

    i64 chunks() const { return chunks_; }

    // Of the panel that is read: its two `Columns`, and whether a scale is hard.
    const Columns* columns() const { return columns_[panel_ & 1]; }
    bool hard() const { return hard_; }
    bool done() const { return 2 * panel_ >= work_tile_.column_blocks(); }

    void next_panel() {
        ++panel_;
        fill(panel_ + 1);
        now_ = rows_[panel_ & 1], next_ = rows_[(panel_ + 1) & 1];
        if constexpr (Weight::FIRST_HARD < 256) {
            const auto any_hard = [&](const Columns& c) {
                return any_from(Weight::FIRST_HARD, c.scales, LANES, K_ / Weight::BLOCK);
            };
            hard_ = any_hard(columns()[0]) || any_hard(columns()[1]);
        }
        row_ahead_ = 0;
        start_ahead();
    }

    // Whether `dequantize_rows` may be called for a chunk: a whole one, without hard scales.
    bool dequantizes_fast(i64 chunk) const { return !hard_ && (chunk + 1) * CODES <= K_; }

    // Rows of a chunk; if `fetch`, as many lines of the next panel come nearer.
    template <int ROWS>
    [[gnu::always_inline]] void dequantize_rows(const AmxDequantizer<Weight>& dequantizer,
                                                i64 chunk, i64 row, u16* at, bool fetch) {
        for (i64 r = row; r < row + ROWS; ++r) {
            i64 scales = 0;
            std::memcpy(&scales, now_[r].scales + SCALES * chunk, SCALES);
            const __m512i codes = _mm512_loadu_si512(now_[r].codes + CODES / 2 * chunk);
            dequantizer.store(at + r * 32, codes, Weight::f16_scale(dequantizer.spread(scales)));
        }
        if (ROWS > 0 && fetch) prefetch<ROWS>();
    }

    // A chunk, whatever is in it.
    void dequantize(i64 chunk, u16* at) {
        const AmxDequantizer<Weight> dequantizer;
        for (i64 i = 0; i < PANEL; ++i) {
            const __m128i scales = _mm512_castsi512_si128(
                load_some(now_[i].scales, SCALES * chunk, K_ / Weight::BLOCK));
            const __m512i scale =
                Weight::hard_f16_scale(dequantizer.spread(_mm_cvtsi128_si64(scales)));
            dequantizer.store(at + i * 32, load_some(now_[i].codes, CODES / 2 * chunk, K_ / 2),
                              scale);
        }
        prefetch<PANEL>();
        prefetch_scales(chunk);
    }

    // Scales of the next panel, a line of them at a time.
    void prefetch_scales(i64 chunk) const {
        if (chunk % (64 / SCALES) != 0) return;
        for (i64 i = 0; i < PANEL; ++i) Weight::fetch_line(next_[i].scales + SCALES * chunk);
    }

  private:
    static constexpr i64 SCALES = CODES / Weight::BLOCK;  // of a row of a chunk

    struct Row {
        const u8 *codes, *scales;
    };

    void fill(i64 panel) {
        for (i64 half = 0; half < 2; ++half) {
            Columns& c = columns_[panel & 1][half];
            c = work_tile_.columns<Weight>(2 * panel + half);
            for (i64 i = 0; i < LANES; ++i)
                rows_[panel & 1][half * LANES + i] = {c.codes[i], c.scales[i]};
        }
    }

    // The next LINES lines of the next panel to the second-level cache, in the order of memory,
    // which the CPU's own prefetching follows.
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
        for (++row_ahead_; row_ahead_ < PANEL && next_[row_ahead_].codes == end_ahead_;
             ++row_ahead_)
            end_ahead_ += K_ / 2;
    }

    // Inlined, or g++ takes it for a function without effect.
    [[gnu::always_inline]] static void fetch_line(const u8* at) {
        _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    }

    const WorkTile& work_tile_;
    const i64 K_, chunks_;
    Columns columns_[2][2];  // of this panel, the next
    bool hard_ = false;
    Row rows_[2][PANEL];
    const Row *now_ = nullptr, *next_ = nullptr;
    i64 panel_ = -1, row_ahead_ = 0;
    const u8 *ahead_ = nullptr, *end_ahead_ = nullptr;
};

// For each panel, for each group of up to three tiles of activations, chunk by chunk: while one is
// multiplied another is dequantized, some rows between any two tile operations. These run on a unit
// of their own, but only as far ahead as the CPU looks.
//
// Up to three groups dequantize again what the one before had: that costs less than to bring it
// back from the second-level cache. More groups share a dequantized panel; of the next one each
// dequantizes some rows.
template <class Weight>
class AmxProduct {
  public:
    using Columns = typename Weight::Columns;

    AmxProduct(const WorkTile& work_tile, const u16* x, i64 stride, Scratch& scratch)
        : work_tile_(work_tile),
          x_(x),
          of_tile_(LANES * stride),
          F_(work_tile.p->F),
          tiles_((work_tile.rows + LANES - 1) / LANES),
          reader_(work_tile),
          chunks_(reader_.chunks()),
          shared_(tiles_ > 9),
          of_half_((shared_ ? chunks_ : 1) * OF_CHUNK),
          weights_(scratch.panel.get<u16>(2 * of_half_)),
          store_run_(std::max<i64>(1, 4 / F_) * 2),
          of_row_(store_run_ * F_ * LANES),
          out_(scratch.tile.get<float>(tiles_ * LANES * of_row_)) {}

    void run() {
        for (i64 c = 0; c * OF_CHUNK < of_half_; ++c)
            reader_.dequantize(c, weights_ + c * OF_CHUNK);
        for (i64 column_block = 0; column_block < work_tile_.column_blocks(); column_block += 2) {
            const __m512 factors[2] = {factors_of(reader_.columns()[0]),
                                       factors_of(reader_.columns()[1])};
            if (shared_) reader_.next_panel();
            for (i64 t = 0, group = 0; t < tiles_; t += in_group(t), ++group) {
                with_constant<1, 2, 3>(int(in_group(t)), [&](auto n) { panel<n>(t, group); });
                finish(column_block, t, factors);
            }
            if (shared_) dequantize_rest();
        }
    }

  private:
    static constexpr i64 SHARED_ROWS =
        PANEL / 4;  // of a chunk that each group dequantizes for all: at least four of them share

    // What sums are multiplied by; NaN for a row of which a scale is.
    __m512 factors_of(const Columns& c) const {
        __mmask16 nan = 0;
        for (int i = 0; i < LANES && reader_.hard(); ++i) {
            nan |= __mmask16(std::any_of(c.scales[i], c.scales[i] + work_tile_.p->K / Weight::BLOCK,
                                         Weight::is_nan)
                             << i);
        }
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(c.factor),
                                            _mm512_set1_ps(float(1 << (16 - Weight::F16_WEIGHT))));
        return _mm512_mask_mov_ps(scaled, nan, _mm512_set1_ps(as_float(0x7FC00000)));
    }

    // What is multiplied, what is dequantized.
    u16* now() const { return weights_ + half_ * of_half_; }
    u16* next() const { return weights_ + (half_ ^ 1) * of_half_; }

    // How many tiles of activations from t on are multiplied at once: three, but rather two and two
    // than three and one.
    i64 in_group(i64 t) const { return tiles_ - t == 4 ? 2 : std::min<i64>(tiles_ - t, 3); }

    // A panel of the weight by tiles t .. t + TILES - 1 of activations -> sums_.
    template <int TILES>
    void panel(i64 t, i64 group) {
        zero<TILES>();
        for (i64 c = 0; c < chunks_; ++c) {
            const u16* x = x_ + t * of_tile_ + c * 4 * TILE;
            std::atomic_signal_fence(
                std::memory_order_seq_cst);  // compilers don't see that tiles are read from memory
            if (shared_) {
                shared_chunk<TILES>(x, c, group * SHARED_ROWS);
            } else {
                own_chunk<TILES>(x, c + 1 < chunks_ ? c + 1 : 0, t);
            }
        }
        keep<TILES>();
    }

    // Sums of tile t of the group, by 16 rows of the panel each, are in tile registers 2 t and 2 t
    // + 1.
    template <int TILES>
    [[gnu::always_inline]] static void zero() {
        _tile_zero(0);
        _tile_zero(1);
        if (TILES == 1) return;
        _tile_zero(2);
        _tile_zero(3);
        if (TILES == 2) return;
        _tile_zero(4);
        _tile_zero(5);
    }

    template <int TILES>
    [[gnu::always_inline]] void keep() {
        float* sums = sums_[0];
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + LANES * LANES, 64);
        if (TILES == 1) return;
        _tile_stored(2, sums + 2 * LANES * LANES, 64);
        _tile_stored(3, sums + 3 * LANES * LANES, 64);
        if (TILES == 2) return;
        _tile_stored(4, sums + 4 * LANES * LANES, 64);
        _tile_stored(5, sums + 5 * LANES * LANES, 64);
    }

    // A chunk that these tiles alone meet, while chunk `read`, the next, is dequantized.
    template <int TILES>
    [[gnu::always_inline]] void own_chunk(const u16* x, i64 read, i64 t) {
        if (read == 0 && t + TILES >= tiles_) reader_.next_panel();
        if (reader_.dequantizes_fast(read)) {
            steps<TILES, 8>(now(), x, read, 0, next(), t == 0);
        } else {
            steps<TILES, 0>(now(), x, read, 0, next(), false);
            if (!reader_.done()) reader_.dequantize(read, next());
        }
        half_ ^= 1;
    }

    // Chunk c of a panel, while rows row .. row + SHARED_ROWS - 1 of the same one of the next panel
    // are dequantized.
    template <int TILES>
    [[gnu::always_inline]] void shared_chunk(const u16* x, i64 c, i64 row) {
        const u16* weights = now() + c * OF_CHUNK;
        u16* to = next() + c * OF_CHUNK;
        if (row >= PANEL || reader_.done() || !reader_.dequantizes_fast(c)) {
            steps<TILES, 0>(weights, x, c, 0, to, false);
        } else {
            steps<TILES, SHARED_ROWS / 4>(weights, x, c, row, to, true);
        }
    }

    // Dequantizes what of the next panel could not be by the way; it is multiplied then.
    void dequantize_rest() {
        for (i64 c = 0; c < chunks_ && !reader_.done(); ++c) {
            if (!reader_.dequantizes_fast(c)) reader_.dequantize(c, next() + c * OF_CHUNK);
        }
        half_ ^= 1;
    }

    // A chunk, while 4 ROWS rows of chunk `read` are dequantized and, if `fetch`, the next panel
    // comes nearer.
    template <int TILES, int ROWS>
    [[gnu::always_inline]] void steps(const u16* weights, const u16* x, i64 read, i64 row,
                                      u16* next, bool fetch) {
        const AmxDequantizer<Weight> dequantizer;
        step<TILES, ROWS>(dequantizer, weights, x, read, row, next, fetch);
        step<TILES, ROWS>(dequantizer, weights + 2 * TILE, x + TILE, read, row + ROWS, next, fetch);
        step<TILES, ROWS>(dequantizer, weights + 4 * TILE, x + 2 * TILE, read, row + 2 * ROWS, next,
                          fetch);
        step<TILES, ROWS>(dequantizer, weights + 6 * TILE, x + 3 * TILE, read, row + 3 * ROWS, next,
                          fetch);
        if (fetch && row == 0) reader_.prefetch_scales(read);
    }

    // 32 codes of each row of the panel. Activations pass by the first-level cache, or what is
    // dequantized would not stay there. Three tiles of them leave two registers: the weight's tiles
    // are loaded again, which costs less than as many more tiles from further away.
    template <int TILES, int ROWS>
    [[gnu::always_inline]] void step(const AmxDequantizer<Weight>& dequantizer, const u16* weights,
                                     const u16* x, i64 read, i64 row, u16* next, bool fetch) {
        _tile_loadd(6, weights, 64);
        _tile_stream_loadd(7, x, 64);
        dequantize<ROWS, 0, 2 * TILES>(dequantizer, read, row, next, fetch);
        _tile_dpbf16ps(0, 6, 7);
        if (TILES == 3) {
            _tile_loadd(6, weights + TILE, 64);
            dequantize<ROWS, 1, 6>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(1, 6, 7);
            _tile_stream_loadd(7, x + of_tile_, 64);
            dequantize<ROWS, 2, 6>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(3, 6, 7);
            _tile_loadd(6, weights, 64);
            dequantize<ROWS, 3, 6>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(2, 6, 7);
            _tile_stream_loadd(7, x + 2 * of_tile_, 64);
            dequantize<ROWS, 4, 6>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(6, weights + TILE, 64);
            dequantize<ROWS, 5, 6>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(5, 6, 7);
        } else {
            _tile_loadd(5, weights + TILE, 64);
            dequantize<ROWS, 1, 2 * TILES>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(1, 5, 7);
            if (TILES == 1) return;
            _tile_stream_loadd(4, x + of_tile_, 64);
            dequantize<ROWS, 2, 4>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(2, 6, 4);
            dequantize<ROWS, 3, 4>(dequantizer, read, row, next, fetch);
            _tile_dpbf16ps(3, 5, 4);
        }
    }

    // Share PART of PARTS of so many rows.
    template <int ROWS, int PART, int PARTS>
    [[gnu::always_inline]] void dequantize(const AmxDequantizer<Weight>& dequantizer, i64 read,
                                           i64 row, u16* next, bool fetch) {
        constexpr int FROM = ROWS * PART / PARTS, TO = ROWS * (PART + 1) / PARTS;
        reader_.template dequantize_rows<TO - FROM>(dequantizer, read, row + FROM, next, fetch);
    }

    // Results from sums_, kept until store_run_ blocks of a row can be stored together: strips of
    // sixteen columns, of rows that lie pages apart, wait for memory one by one.
    void finish(i64 column_block, i64 t, const __m512 (&factors)[2]) {
        const i64 first = column_block / (store_run_ * F_) * (store_run_ * F_);
        const i64 last = std::min(column_block + 2, work_tile_.column_blocks());
        for (i64 i = t; i < t + in_group(t); ++i) {
            const i64 rows = std::min<i64>(LANES, work_tile_.rows - LANES * i);
            float* out = out_ + i * LANES * of_row_;
            for (i64 s = column_block; s < last; ++s) {
                const float* sums = sums_[2 * (i - t) + s - column_block];
                for (i64 r = 0; r < rows; r += 4) {
                    transpose(sums + r, factors[s - column_block],
                              out + r * of_row_ + (s - first) * LANES, of_row_);
                }
            }
            if (last == first + store_run_ * F_ || last == work_tile_.column_blocks()) {
                work_tile_.store(LANES * i, rows, first, out, of_row_, (last - first) / F_);
            }
        }
    }

    // Four columns of sums [16][16] -> four rows of `out`, each times `factor`.
    static void transpose(const float* sums, __m512 factor, float* out, i64 of_row) {
        __m512 a[4];
        for (int i = 0; i < 4; ++i) {  // 128 bits j: of row 4 j + i
            const auto four = [&](int j) { return _mm_load_ps(sums + (4 * j + i) * LANES); };
            a[i] = _mm512_insertf32x4(_mm512_castps128_ps512(four(0)), four(1), 1);
            a[i] = _mm512_insertf32x4(_mm512_insertf32x4(a[i], four(2), 2), four(3), 3);
        }
        const __m512 low[2] = {_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpacklo_ps(a[2], a[3])};
        const __m512 high[2] = {_mm512_unpackhi_ps(a[0], a[1]), _mm512_unpackhi_ps(a[2], a[3])};
        const __m512 b[4] = {
            _mm512_shuffle_ps(low[0], low[1], 0x44), _mm512_shuffle_ps(low[0], low[1], 0xEE),
            _mm512_shuffle_ps(high[0], high[1], 0x44), _mm512_shuffle_ps(high[0], high[1], 0xEE)};
        for (int i = 0; i < 4; ++i) _mm512_store_ps(out + i * of_row, _mm512_mul_ps(b[i], factor));
    }

    const WorkTile& work_tile_;
    const u16* const x_;
    const i64 of_tile_, F_, tiles_;
    AmxReader<Weight> reader_;
    const i64 chunks_;
    const bool shared_;  // each group dequantizes some rows of a chunk for all, or each group all
                         // for itself
    const i64 of_half_;
    u16* const weights_;  // [2][of_half_] chunks, or panels: one that is multiplied, one that is
                          // dequantized
    const i64 store_run_, of_row_;
    float* const out_;  // [rows of the work tile][store_run_][F][16]
    i64 half_ = 0;
    alignas(64) float sums_[6][LANES *
                               LANES];  // of each tile of activations, of each 16 rows of the panel
};

template <class Weight>
struct Amx {
    using Activation = bf16;
    using Packed = u16;  // tiles, one after the other, of 16 rows; zeros up to a multiple of 16
                         // rows and 128 activations
    static constexpr i64 MAX_ROWS = TILE_M;
    // See `in_range` and the head of this file.
    static constexpr int MIN_EXPONENT = -74 - Weight::MIN_EXPONENT - Weight::F16_WEIGHT,
                         MAX_EXPONENT = 31;

    static void pack(const bf16* const* x, i64 rows, Packed* packed, i64, i64 K) {
        const __m512i order = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        for (i64 k = 0; k < (K + CODES - 1) / CODES * CODES; k += 32) {
            __m512i a[16], b[16];
            for (i64 i = 0; i < LANES; ++i) {
                const __m512i v = i < rows
                                      ? load_some(reinterpret_cast<const u8*>(x[i]), 2 * k, 2 * K)
                                      : _mm512_setzero_si512();
                const __mmask32 normal = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7F80));
                a[i] = _mm512_shuffle_epi8(
                    _mm512_maskz_add_epi16(normal, v, _mm512_set1_epi16(96 << 7)), order);
            }
            transpose_vectors(a, b);
            // word 4 i + j: activations k + 8 i + j and k + 8 i + j + 4
            Packed* at = packed + k / CODES * 4 * TILE + k % CODES / 8 * 32;
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j)
                    _mm512_store_si512(at + j * TILE + i * 32, b[4 * i + j]);
            }
        }
    }

    static void multiply(const WorkTile& work_tile, const Packed* packed, i64 stride,
                         Scratch& scratch) {
        AmxProduct<Weight>(work_tile, packed, stride, scratch).run();
    }
};

template <class Weight>
struct AmxIsa {
    using Wide = Panels<Avx512<Weight>>;
    using OfBf16 = Kernels<SmallM<Avx512Digits<Weight>>, Amx<Weight>>;
    template <class A>
    using Fast = std::conditional_t<std::is_same<A, bf16>::value, OfBf16,
                                    typename Avx512Isa<Weight>::template Fast<A>>;
    using Thread = AmxThread;
    static constexpr double DEQUANTIZE_ROWS = 32;
};

// Each panel of the weight meets all rows. Where a full tile of them is more than a core's
// second-level cache, as many as take half of it, so that two threads may share it. The weight is
// read and dequantized for each of these tiles. (On a Xeon 64 rows of 7,168 ran at 1.4 times the
// rate of 256, which came from the next cache: docs/performance/cpu.md.)
template <class Weight>
struct TileM<AmxIsa<Weight>, bf16> {
    static constexpr i64 CACHE = 1 << 21, LEAST = 3 * LANES;

    static constexpr i64 of(i64 K) {
        const i64 row = K * i64(sizeof(u16));
        return TILE_M * row <= CACHE ? TILE_M : std::max(LEAST, CACHE / 2 / row / LANES * LANES);
    }
};

}  // namespace
