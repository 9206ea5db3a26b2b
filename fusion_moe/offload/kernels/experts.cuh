// Experts of mapped memory of the host, in the order of the CPU's kernels, into slots in that of
// the GPU's (layouts/w16x64.py).
#pragma once

#include "routing.cuh"

namespace {

constexpr i32 TILE_ROWS = 16, TURNS = 12;

enum PartKind : i64 { BYTES = 0, NIBBLES = 1, SCALES = 2, CODES = 3, SCALES_2 = 4, SCALES_4 = 5 };

// One part of the weights: what each expert has of it, on the host and in a slot.
struct Part {
    i64 kind;
    const u8* storage;
    u8* slots;
    i64 host_bytes, slot_bytes;  // of an expert
    i64 rows, tiles;             // tiles of a row; of BYTES, pieces of an expert
    i64 each;                    // bytes of scales of a row of a tile; of a piece: 16 or 2
    const void* table;           // what codes or scales become; null: as they are
    // of NIBBLES: u32[2, TURNS], by how much eight codes are turned, and what of that a word has;
    // of SCALES, which have a byte: u8[256]. CODES have a byte too, SCALES_n n

    // How many warps have work on an expert.
    __device__ __forceinline__ u32 units() const {
        if (kind == BYTES) return u32((tiles + PIECES - 1) / PIECES);
        return u32(rows / TILE_ROWS) * across();
    }

    // Copies the unit-th part of an expert into a slot; a warp.
    __device__ __forceinline__ void copy(i64 expert, i64 slot, u32 unit) const {
        const u8* const from = storage + expert * host_bytes;
        u8* const to = slots + slot * slot_bytes;
        if (kind == BYTES && each == 16) return bytes<uint4>(from, to, unit * PIECES);
        if (kind == BYTES) return bytes<u16>(from, to, unit * PIECES);
        const u32 strip = unit / across();
        const i32 tile = i32(unit % across()) * i32(of_codes() ? 4 : 32);
        if (kind == NIBBLES) return nibbles(from, to, strip, tile);
        if (kind == CODES) return codes(from, to, strip, tile);
        if (kind == SCALES_4) return scales<u32, u32, uint2>(from, to, strip, tile);
        if (each == 4 && kind == SCALES_2)
            scales<u16, u32, uint2>(from, to, strip, tile);
        else if (each == 4)
            scales<u8, u32, uint2>(from, to, strip, tile);
        else if (kind == SCALES_2)
            scales<u16, u16, u32>(from, to, strip, tile);
        else if (each == 2)
            scales<u8, u16, u32>(from, to, strip, tile);
        else
            scales<u8, u8, u16>(from, to, strip, tile);
    }

  private:
    static constexpr i64 PIECES = 8 * 32;  // of a warp

    __device__ __forceinline__ bool of_codes() const { return kind == NIBBLES || kind == CODES; }

    __device__ __forceinline__ u32 across() const {
        return u32(of_codes() ? (tiles + (tiles % 4 ? 3 : 0) + 3) / 4 : (tiles + 31) / 32);
    }

    template <class Piece>
    __device__ __forceinline__ void bytes(const u8* from, u8* to, i64 first) const {
        first += threadIdx.x % 32;
        Piece piece[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + 32 * i < tiles)
                piece[i] = reinterpret_cast<const Piece*>(from)[first + 32 * i];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + 32 * i < tiles) reinterpret_cast<Piece*>(to)[first + 32 * i] = piece[i];
    }

    // Four tiles: a lane reads 16 codes of a row, the lane 16 further those of the row 8 further.
    // The two exchange halves, for a tile has both rows in each byte. Memory is read 128 bytes at
    // once: a row that begins within these has a smaller unit first.
    __device__ __forceinline__ void nibbles(const u8* from, u8* to, i64 strip, i32 unit) const {
        const i32 lane = threadIdx.x % 32, half = lane / 16, block = lane % 16;
        const i64 row_bytes = tiles * 32;
        const auto tile_of = [&](int r) { return unit + block / 4 - r * i32(tiles) % 4; };
        const auto here = [&](int r) { return tile_of(r) >= 0 && tile_of(r) < tiles; };
        from += (strip * TILE_ROWS + half * 8) * row_bytes + block % 4 * 8;
        to += strip * tiles * 512 + block % 4 * 16 + half * 8;
        u32 turns[2 * TURNS];
#pragma unroll
        for (int i = 0; i < 2 * TURNS; ++i) turns[i] = static_cast<const u32*>(table)[i];
        uint2 row[8];
#pragma unroll
        for (int r = 0; r < 8; ++r)
            row[r] =
                here(r) ? load_no_allocate_8(from + r * row_bytes + tile_of(r) * 32) : uint2{0, 0};
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const u32 low = __byte_perm(row[r].x, row[r].y, 0x5410),
                      high = __byte_perm(row[r].x, row[r].y, 0x7632);
            const u32 mine = half ? high : low,
                      other = __shfl_xor_sync(WHOLE_WARP, half ? low : high, 16);
            const u32 upper = half ? other : mine, lower = half ? mine : other;
            if (here(r))
                *reinterpret_cast<uint2*>(to + tile_of(r) * 512 + r * 64) =
                    uint2{word(__byte_perm(upper, lower, 0x6240), turns),
                          word(__byte_perm(upper, lower, 0x7351), turns)};
        }
    }

    // Of codes (h, i, j), which have 16 h + 8 i + 4 j bits before them.
    __device__ __forceinline__ static u32 word(u32 codes, const u32* turns) {
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
            found |= (codes << turns[i] | codes >> (32 - turns[i]) % 32) & turns[TURNS + i];
        return found;
    }

    // As `nibbles`, of codes of a byte: lanes exchange the halves of rows that tiles have apart.
    __device__ __forceinline__ void codes(const u8* from, u8* to, i64 strip, i32 unit) const {
        const i32 lane = threadIdx.x % 32, half = lane / 16, block = lane % 16;
        const i64 row_bytes = tiles * 64;
        const auto tile_of = [&](int r) { return unit + block / 4 - r * i32(tiles) % 4; };
        const auto here = [&](int r) { return tile_of(r) >= 0 && tile_of(r) < tiles; };
        from += (strip * TILE_ROWS + half * 8) * row_bytes + block % 4 * 16;
        to += strip * tiles * 1024 + half * 512 + block % 4 * 16;
        uint4 row[8];
#pragma unroll
        for (int r = 0; r < 8; ++r)
            row[r] = here(r) ? load_no_allocate(from + r * row_bytes + tile_of(r) * 64)
                             : uint4{0, 0, 0, 0};
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const u32 mine[] = {half ? row[r].y : row[r].x, half ? row[r].w : row[r].z};
            u32 words[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 sent = h ? (half ? row[r].z : row[r].w) : (half ? row[r].x : row[r].y),
                          other = __shfl_xor_sync(WHOLE_WARP, sent, 16);
                const u32 upper = half ? other : mine[h], lower = half ? mine[h] : other;
                words[h] = __byte_perm(upper, lower, 0x5410);
                words[2 + h] = __byte_perm(upper, lower, 0x7632);
            }
            if (here(r))
                *reinterpret_cast<uint4*>(to + tile_of(r) * 1024 + r * 64) =
                    uint4{words[0], words[1], words[2], words[3]};
        }
    }

    // 32 tiles: a lane has the scales of one, of 16 rows.
    template <class Scale, class Row, class Both>
    __device__ __forceinline__ void scales(const u8* from, u8* to, i64 strip, i32 tile) const {
        tile += threadIdx.x % 32;
        if (tile >= tiles) return;
        const i64 row_bytes = tiles * i64(sizeof(Row));
        from += strip * TILE_ROWS * row_bytes + tile * i64(sizeof(Row));
        to += (strip * tiles + tile) * i64(TILE_ROWS * sizeof(Row));
        Row upper[8], lower[8];
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            upper[r] = Row(load_number<sizeof(Row)>(from + r * row_bytes));
            lower[r] = Row(load_number<sizeof(Row)>(from + (r + 8) * row_bytes));
        }
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            constexpr int COUNT = sizeof(Row) / sizeof(Scale), BITS = 8 * sizeof(Scale);
            union {
                Scale at[2 * COUNT];
                Both whole;
            } found;
#pragma unroll
            for (int b = 0; b < COUNT; ++b) {
                found.at[2 * b] = recoded(Scale(u32(upper[r]) >> BITS * b));
                found.at[2 * b + 1] = recoded(Scale(u32(lower[r]) >> BITS * b));
            }
            reinterpret_cast<Both*>(to)[r] = found.whole;
        }
    }

    template <class Scale>
    __device__ __forceinline__ Scale recoded(Scale scale) const {
        if constexpr (sizeof(Scale) == 1)
            return table ? static_cast<const u8*>(table)[scale] : scale;
        else
            return scale;
    }
};

constexpr int MOST_PARTS = 12;

struct Parts {
    i64 count;
    Part at[MOST_PARTS];

    // Copies expert_of(i) into slot_of(i), for all i below `experts`; by the first `blocks` blocks.
    template <class ExpertOf, class SlotOf>
    __device__ __forceinline__ void copy(i64 experts, i64 blocks, ExpertOf expert_of,
                                         SlotOf slot_of) const {
        u32 each = 0;
        for (i64 p = 0; p < count; ++p) each += at[p].units();
        const u32 warps = blockDim.x / 32, all = u32(experts) * each;
        for (u32 i = blockIdx.x * warps + threadIdx.x / 32; i < all; i += u32(blocks) * warps) {
            const u32 which = i / each;
            u32 unit = i % each, p = 0;
            for (; unit >= at[p].units(); ++p) unit -= at[p].units();
            at[p].copy(expert_of(which), slot_of(which), unit);
        }
    }
};

// Copies experts that follow each other into slots that do, or those of pairs.
struct Load {
    i64 expert, slot, count;
    const Parts* parts;
    const i32* pairs;  // i32[2, count], or null: experts and their slots

    __device__ __forceinline__ void run() const {
        parts->copy(
            count, gridDim.x, [&](i64 i) { return pairs ? pairs[i] : expert + i; },
            [&](i64 i) { return pairs ? pairs[count + i] : slot + i; });
    }
};

}  // namespace
