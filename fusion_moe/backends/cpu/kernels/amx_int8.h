// Products of int8 operands by AMX: int8.h has what is computed, avx512_int8.h how integers are
// made.
//
// The A tile is 16 rows of activations by 64 columns, the B tile as many of four integers of 16
// rows of the weight, as vectors make them.
#pragma once

#include <atomic>

#include "amx_thread.h"
#include "avx512_int8.h"

namespace {

// For two column blocks, a panel, block after block of 256 columns: what all rows make of it, two
// tiles of them at once. Between any steps of tiles some integers are made of the block that comes
// next, and some sums added of the rows before: the CPU does not look far enough ahead to do so by
// itself.
template <class Weight>
class AmxInt8Product {
  public:
    using Columns = typename Weight::Columns;

    AmxInt8Product(const WorkTile& work_tile, const u16* x, i64 stride, Scratch& scratch)
        : work_tile_(work_tile),
          x_(x),
          stride_(stride),
          K_(work_tile.p->K),
          F_(work_tile.p->F),
          blocks_(int8_blocks(K_)),
          tiles_((work_tile.rows + LANES - 1) / LANES),
          stored_(std::max<i64>(1, 4 / F_) * F_),
          of_stored_((stored_ + 1) / 2),
          of_row_(2 * of_stored_ * LANES),
          weights_(scratch.panel.get<u32>(2 * OF_BLOCK)),
          out_(scratch.tile.get<float>(tiles_ * LANES * of_row_)) {}

    static constexpr i64 TILE = 1024;  // bytes

    // Of 16 rows: their tiles, then what integers are worth, a block after the other.
    static const u8* tiles(const u16* rows) { return reinterpret_cast<const u8*>(rows); }
    static const float* steps(const u16* rows, i64 K) {
        return reinterpret_cast<const float*>(tiles(rows) + int8_blocks(K) * 4 * TILE);
    }

    void run() {
        const i64 all = work_tile_.column_blocks(), rest = all % stored_;
        const i64 panels = all / stored_ * of_stored_ + (rest + 1) / 2;
        open(0);
        open(1);
        for (int part = 0; part < PARTS; ++part) make(0, 0, part);
        for (i64 panel = 0; panel < panels; ++panel) {
            for (i64 block = 0; block < blocks_; ++block) {
                const bool last = block + 1 == blocks_;
                if (last)
                    open(panel + 2);  // the integers of this panel are made: the next one is read,
                                      // the one after it comes nearer
                multiply(panel, block, last && panel + 1 == panels ? -1 : last ? 0 : block + 1);
                ++count_;
            }
            add_rest();
            const i64 first = panel / of_stored_ * stored_, count = std::min(stored_, all - first);
            if ((panel + 1) % of_stored_ == 0 || panel + 1 == panels) {
                work_tile_.store(0, work_tile_.rows, first, out_, of_row_, count / F_);
            }
        }
    }

  private:
    static constexpr int PARTS = 4;  // that the integers of a block are made in
    static constexpr i64 OF_COLUMNS =
        INT8_BLOCK / 4 * LANES;  // words of a block of 16 rows of the weight
    static constexpr i64 OF_BLOCK = 2 * OF_COLUMNS;

    // The column blocks of a panel. Which is read next to the last ones `WorkTile` says.
    void open(i64 panel) {
        const i64 first = panel / of_stored_ * stored_ + panel % of_stored_ * 2;
        for (i64 s = 0; s < 2; ++s)
            columns_[panel % 3][s] = work_tile_.template columns<Weight>(first + s);
    }

    // A part of the integers of a block.
    void make(i64 panel, i64 block, int part) {
        const int s = part / 2, of_half = part % 2;
        Int8Reader<Weight>& reader = readers_[s];
        if (of_half == 0) {
            if (block == 0)
                reader =
                    Int8Reader<Weight>(columns_[panel % 3][s], columns_[(panel + 1) % 3][s], K_);
            _mm512_store_ps(steps_[made_ % 3][s], reader.start(block));
        }
        if (INT8_BLOCK * block + 128 * of_half >= K_) return;
        u32* at = weights_ + made_ % 2 * OF_BLOCK + s * OF_COLUMNS + 32 * of_half * LANES;
        reader.template half<false>(
            block, of_half, [&](int i, __m512i w) { _mm512_store_si512(at + i * LANES, w); });
    }

    // All rows by a block of a panel; next: the block that is made meanwhile, of the next panel if
    // it is 0; -1 for none.
    void multiply(i64 panel, i64 block, i64 next) {
        const int steps = int(std::min<i64>(4, (K_ - INT8_BLOCK * block + 63) / 64));
        const i64 all = (tiles_ + 1) / 2 * steps;
        i64 done = 0;
        made_ = count_ + 1;
        const i64 made_panel = next == 0 ? panel + 1 : panel;
        const auto between = [&] {
            const i64 from = PARTS * done / all, to = PARTS * (done + 1) / all;
            ++done;
            for (i64 part = from; next >= 0 && part < to; ++part) make(made_panel, next, int(part));
            if (waiting_.done < waiting_.tiles) add_next();
        };
        for (i64 t = 0; t < tiles_; t += 2) {
            if (t + 1 < tiles_) {
                group<2>(t, panel, block, steps, between);
            } else {
                group<1>(t, panel, block, steps, between);
            }
        }
    }

    template <int TILES, class Between>
    [[gnu::always_inline]] void group(i64 t, i64 panel, i64 block, int steps_of_block,
                                      const Between& between) {
        const u16* rows = x_ + t * LANES * stride_;
        const u8* x = tiles(rows) + block * 4 * TILE;
        const u32* w = weights_ + count_ % 2 * OF_BLOCK;
        std::atomic_signal_fence(
            std::memory_order_seq_cst);  // compilers don't see that tiles are read from memory
        _tile_zero(0);
        _tile_zero(1);
        if (TILES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int step = 0; step < steps_of_block; ++step, x += TILE, w += LANES * LANES) {
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + OF_COLUMNS, 64);
            _tile_loadd(4, x, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            if (TILES == 2) {
                _tile_loadd(5, x + 2 * LANES * stride_, 64);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            between();
        }
        add_rest();
        _tile_stored(0, sums_[0], 64);
        _tile_stored(1, sums_[1], 64);
        if (TILES == 2) {
            _tile_stored(2, sums_[2], 64);
            _tile_stored(3, sums_[3], 64);
        }
        std::atomic_signal_fence(std::memory_order_seq_cst);
        waiting_ = {t, panel, block, 2 * TILES, 0, steps_[count_ % 3]};
    }

    void add_rest() {
        while (waiting_.done < waiting_.tiles) add_next();
    }

    // Sums of integers of a tile [16][16], scaled, to those of the blocks before.
    [[gnu::always_inline]] void add_next() {
        const int i = waiting_.done++, s = i % 2;
        const i64 t = waiting_.t + i / 2, rows = std::min<i64>(LANES, work_tile_.rows - LANES * t);
        const float* of_rows = steps(x_ + t * LANES * stride_, K_) + waiting_.block * LANES;
        const i32* sums = sums_[i];
        const __m512 step = _mm512_load_ps(waiting_.steps[s]),
                     factor = _mm512_load_ps(columns_[waiting_.panel % 3][s].factor);
        float* out = out_ + LANES * t * of_row_ + (waiting_.panel % of_stored_ * 2 + s) * LANES;
        const bool first = waiting_.block == 0, last = waiting_.block + 1 == blocks_;
        for (i64 r = 0; r < rows; ++r, out += of_row_) {
            const __m512 both = _mm512_mul_ps(_mm512_set1_ps(of_rows[r]), step),
                         before = first ? _mm512_setzero_ps() : _mm512_load_ps(out);
            const __m512 sum = _mm512_fmadd_ps(
                _mm512_cvtepi32_ps(_mm512_load_si512(sums + r * LANES)), both, before);
            _mm512_store_ps(out, last ? _mm512_mul_ps(sum, factor) : sum);
        }
    }

    const WorkTile& work_tile_;
    const u16* const x_;
    const i64 stride_, K_, F_, blocks_, tiles_;
    const i64 stored_, of_stored_,
        of_row_;          // column blocks that are stored together, in so many panels
    u32* const weights_;  // [2] blocks of a panel: one that is multiplied, one that is made
    float* const out_;    // [rows of the work tile][of_row_]
    // Rows whose sums of a block are in sums_; of `tiles` some are added.
    struct Waiting {
        i64 t, panel, block;
        int tiles, done;
        const float (*steps)[LANES];
    };

    i64 count_ = 0,
        made_ = 0;  // of blocks, over all panels: the one that is multiplied, the one that is made
    Waiting waiting_ = {0, 0, 0, 0, 0, nullptr};
    Columns columns_[3][2];  // of this panel, the next, the one after it
    Int8Reader<Weight> readers_[2];
    alignas(64) float steps_[3][2][LANES];
    alignas(64) i32 sums_[4][LANES * LANES];
};

template <class Weight>
struct AmxInt8 {
    using Activation = float;
    using Packed = u16;  // in place of an element each, of 16 rows together: their tiles, then what
                         // integers are worth
    static constexpr i64 MAX_ROWS = TILE_M;
    static constexpr int MIN_EXPONENT = -127, MAX_EXPONENT = 128;  // whatever they are

    // Rows past the last one make results that nobody reads.
    static void pack(const float* const* x, i64 rows, Packed* packed, i64, i64 K) {
        using Product = AmxInt8Product<Weight>;
        u8* tiles = const_cast<u8*>(Product::tiles(packed));
        float* steps = const_cast<float*>(Product::steps(packed, K));
        for (i64 k = 0; k < K; k += INT8_BLOCK, tiles += 4 * Product::TILE, steps += LANES) {
            for (i64 r = 0; r < rows; ++r) {
                steps[r] = int8_block(x[r] + k, std::min(INT8_BLOCK, K - k), tiles + 64 * r,
                                      Product::TILE);
            }
        }
    }

    static void multiply(const WorkTile& work_tile, const Packed* packed, i64 stride,
                         Scratch& scratch) {
        AmxInt8Product<Weight>(work_tile, packed, stride, scratch).run();
    }
};

template <class Weight>
struct AmxInt8Tier {
    using Wide = AmxInt8<Weight>;
    template <class A>
    using Fast = Kernels<SmallM<Avx512Int8<Weight, 4>>, Wide>;
    using Thread = AmxThread;
    static constexpr double DEQUANTIZE_ROWS = 48;
};

}  // namespace
