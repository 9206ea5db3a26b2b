"""The waves of a persistent grid (kernels/waves.cuh), compiled for the host: every block goes
through its numbers as on a GPU.
"""

from __future__ import annotations

import subprocess

import pytest
from on_cpu import compiled

from fusion_moe.backends.cuda.launch import KERNELS

pytestmark = pytest.mark.compiler
MAIN = r"""
#include <algorithm>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
using i32 = int;
using u32 = unsigned;
using std::min;
#include "waves.cuh"

// Reads cases until they end: work tiles, of which `others` follow them, blocks, consumers. Says
// which work tiles are not done exactly once by each consumer, or others by one block, and the
// waves of the block with the most, how many parts, and how far apart blocks' sums are.
int main() {
    i32 tiles, others, blocks, consumers;
    while (std::scanf("%d %d %d %d", &tiles, &others, &blocks, &consumers) == 4) {
        const Waves waves = Waves::of(tiles, blocks, consumers);
        std::vector<i32> done(size_t(tiles * consumers + others));
        i32 bad = waves.parts < 1 || waves.parts > consumers, most = 0;
        std::vector<long> sums;  // of a block's numbers in whole waves
        for (i32 block = 0; block < blocks; ++block) {
            i32 wave = 0;
            sums.push_back(0);
            InWaves mine(block, blocks, true);
            for (; mine.number < waves.end; mine.advance(blocks), ++wave) {
                const PartOfTile part = waves.find(mine.number);
                if (mine.number < waves.whole) sums.back() += mine.number;
                for (i32 c = 0; c < consumers; ++c)
                    if (part.consumers >> c & 1) ++done.at(size_t(part.number * consumers + c));
            }
            most = std::max(most, wave);
            for (; mine.number < waves.end + others; mine.advance(blocks)) {
                const PartOfTile part = waves.find(mine.number);
                bad += ~part.consumers != 0;
                ++done.at(size_t(tiles * consumers + part.number - tiles));
            }
        }
        for (i32 times : done) bad += times != 1;
        const auto [least, largest] = std::minmax_element(sums.begin(), sums.end());
        std::printf("%d %d %d %ld\n", bad, most, waves.parts, *largest - *least);
    }
}
"""


@pytest.fixture(scope="module")
def waves(tmp_path_factory):
    """Of cases, what MAIN says."""
    flags = "-fsanitize=undefined", "-fno-sanitize-recover", f"-I{KERNELS}"
    main = compiled(tmp_path_factory.mktemp("waves"), MAIN, *flags)

    def run(cases):
        text = "\n".join(" ".join(map(str, case)) for case in cases)
        said = subprocess.run([main], input=text, capture_output=True, text=True, check=True).stdout
        return [tuple(map(int, line.split())) for line in said.splitlines()]

    return run


CASES = [
    (tiles, others, blocks, consumers)
    for blocks in (1, 2, 7, 132)
    for consumers in range(1, 6)
    for others in (0, 1, 200)
    for tiles in (*range(9), *range(60, 400, 7), 3000)
]


def test_each_consumer_computes_each_work_tile_once(waves):
    for case, (bad, most, parts, _) in zip(CASES, waves(CASES), strict=True):
        tiles, _, blocks, consumers = case
        assert not bad, case
        assert most == -(-tiles // blocks), case  # parts make no wave more
        assert parts == (min(consumers, blocks // rest) if (rest := tiles % blocks) else 1), case


def test_blocks_with_a_long_work_tile_have_a_short_one_next(waves):
    """After an even number of waves the numbers of all blocks add up alike, and so do work tiles
    that become shorter evenly.
    """
    for case, (*_, apart) in zip(CASES, waves(CASES), strict=True):
        tiles, _, blocks, _ = case
        assert apart == (blocks - 1 if tiles // blocks % 2 else 0), case
