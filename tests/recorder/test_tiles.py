"""Tiles of the marks that kernels make: the beginning and the next end of each warpgroup."""

from __future__ import annotations

import torch

from fusion_moe.recorder import tiles
from fusion_moe.recorder.tiles import Tile


def memory(count: int, *marks: tuple[int, int, int, int]) -> torch.Tensor:
    """As kernels write it. marks: time, multiprocessor, warpgroup, 0 for a beginning or 1."""
    pairs = [(time, (2 * of + end) << 32 | at) for time, at, of, end in marks]
    return torch.tensor([count, *(n for pair in pairs for n in pair)])


def test_a_tile_is_a_beginning_and_the_next_end_of_its_warpgroup():
    words = memory(4, (30, 5, 1, 1), (10, 3, 0, 0), (20, 5, 1, 0), (40, 3, 0, 1))
    assert list(tiles.tiles("k", words)) == [Tile("k", 5, 20, 30), Tile("k", 3, 10, 40)]


def test_marks_that_are_lost_or_were_not_made_are_no_tiles():
    lost = (10, 3, 0, 1), (20, 3, 0, 0), (30, 3, 0, 1)  # an end whose beginning was overwritten
    assert list(tiles.tiles("k", memory(3, *lost))) == [Tile("k", 3, 20, 30)]
    assert list(tiles.tiles("k", memory(1, *lost))) == []


def test_nothing_is_read_where_no_kernel_marks():
    tiles.clear()
    assert tiles.read() == []
