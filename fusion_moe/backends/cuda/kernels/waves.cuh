// The waves of a persistent grid: which work tiles a block computes. Work tiles are numbered from
// the longest to the shortest.
//
// A wave has one work tile for each block. Block b takes the b-th of the first wave, the b-th from
// the end of the second, and so on, so that a block with a long tile gets a short one next. In a
// last wave that is not full, idle blocks help: each work tile is divided into parts, and a part is
// the work of some of a block's consumer warpgroups, which several blocks then do at once. Indices
// past the last part are sentinels: they count on as if tiles had not been divided.
#pragma once

namespace {

// A work tile, and which consumers compute it: a bit for each.
struct PartOfTile {
    i32 number;
    u32 consumers;
};

struct Waves {
    i32 whole, end;        // work tiles in full waves; the number after the last part's
    i32 parts, consumers;  // parts of each work tile of the last wave; consumers of a block

    __device__ static __forceinline__ Waves of(i32 work_tiles, i32 blocks, i32 consumers) {
        const i32 rest = work_tiles % blocks, parts = rest == 0 ? 1 : min(consumers, blocks / rest);
        return {work_tiles - rest, work_tiles + rest * (parts - 1), parts, consumers};
    }

    // Undivided work tiles.
    __device__ static __forceinline__ Waves plain(i32 work_tiles) {
        return {work_tiles, work_tiles, 1, 1};
    }

    __device__ __forceinline__ PartOfTile find(i32 number) const {
        if (number < whole || parts == 1) return {number, ~0u};
        if (number >= end) return {number - (end - whole) / parts * (parts - 1), ~0u};
        const i32 tile = (number - whole) / parts, part = number - whole - tile * parts;
        return {whole + tile, below(part + 1) & ~below(part)};
    }

  private:
    // A bit for each consumer that computes one of the first `part` parts.
    __device__ __forceinline__ u32 below(i32 part) const {
        return (1u << (part * consumers + parts - 1) / parts) - 1;
    }
};

// A block's tile in each wave: serpentine if by_turns, else ascending.
struct InWaves {
    i32 number, step;

    __device__ __forceinline__ InWaves(i32 block, i32 blocks, bool by_turns)
        : number(block), step(by_turns ? 2 * (blocks - block) - 1 : blocks) {}
    __device__ __forceinline__ void advance(i32 blocks) {
        number += step, step = 2 * blocks - step;
    }
};

}  // namespace
