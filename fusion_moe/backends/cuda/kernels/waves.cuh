// The waves of a persistent grid: which of the numbered work tiles a block does, when all are in
// order from long to short.
//
// A wave is as many work tiles as there are blocks. Block b has the b-th of the first wave, the
// b-th from the end of the second, and so on: who has a long one has a short one next. Of a last
// wave that is not whole, each work tile is divided into as many parts as there are idle blocks
// for, but no more than it has: a part is for some of a block's consumer warpgroups, whose work is
// then done sooner, by several blocks at once. What follows the work tiles is numbered on.
#pragma once

namespace {

// A work tile, and which consumers compute it: a bit for each.
struct PartOfTile {
    i32 number;
    u32 consumers;
};

struct Waves {
    i32 whole, end;        // work tiles of whole waves; numbers up to the last part's
    i32 parts, consumers;  // of each work tile of the last wave; of a block

    __device__ static __forceinline__ Waves of(i32 work_tiles, i32 blocks, i32 consumers) {
        const i32 rest = work_tiles % blocks, parts = rest == 0 ? 1 : min(consumers, blocks / rest);
        return {work_tiles - rest, work_tiles + rest * (parts - 1), parts, consumers};
    }

    // All in the order of numbers, by whole work tiles.
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
    // The consumers of the first so many parts.
    __device__ __forceinline__ u32 below(i32 part) const {
        return (1u << (part * consumers + parts - 1) / parts) - 1;
    }
};

// The numbers of a block: its place in each wave, from either end by turns, or from the same one.
struct InWaves {
    i32 number, step;

    __device__ __forceinline__ InWaves(i32 block, i32 blocks, bool by_turns)
        : number(block), step(by_turns ? 2 * (blocks - block) - 1 : blocks) {}
    __device__ __forceinline__ void advance(i32 blocks) {
        number += step, step = 2 * blocks - step;
    }
};

}  // namespace
