"""How evenly the blocks of persistent kernels work, and how far products are from their floors.
Needs no GPU.

Sizes of groups are drawn as the sweep draws them. A work tile of h rows takes as long as h + 32
rows: its weights are dequantized in about the time in which 32 rows are multiplied (31 to 40 fit an
H200's times of kernels with M tiles of 48 to 160 rows).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np
import sweep
from fit import fitted
from timings import Cell, Timings

from fusion_moe.backends.cuda.heuristics import choose_from
from fusion_moe.backends.cuda.table import Table
from fusion_moe.backends.cuda.variants import LargeM

# bytes and operations a second, of an H200's floor (benchmarks/h200_cells.py)
_READ, _MULTIPLIED = 4.55e12, 7.8e14
_DEQUANTIZED = 32  # rows
_SEEDS = 4
_LAYERS = {layer.name: layer for layer in (*sweep.LAYERS, *sweep.DENSE, *sweep.OTHERS)}
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def sizes(cell: Cell) -> list[list[int]]:
    """Of the groups, by a few routings."""
    layer = _LAYERS[cell.product.split()[0]]
    ends = [
        sweep.ends(layer, cell.tokens, cell.routing, seed, device="cpu").tolist()
        for seed in range(_SEEDS)
    ]
    return [[b - a for a, b in zip([0, *e], e, strict=False)] for e in ends]


def floor(cell: Cell, of_groups: Sequence[Sequence[int]]) -> float:
    """Microseconds to read the weights of groups that have a row, or to multiply."""
    of, touched = cell.matrices, fmean(sum(size > 0 for size in found) for found in of_groups)
    read = touched * of.tiles * (of.k // 64) * of.tile_bytes / _READ
    return 1e6 * max(read, 2 * cell.rows * 16 * of.tiles * of.k / _MULTIPLIED)


def work_tiles(variant: LargeM, cell: Cell, of_groups: Sequence[int]) -> Floats:
    """How long they take, in order, as kernels/schedule.cuh has them."""
    tall = sorted(
        (
            (-(-size // (8 * n)) * 8, n)
            for size in of_groups
            if size and (n := -(-size // variant.tile_m))
        ),
        reverse=True,
    )
    n_tiles = -(-cell.matrices.tiles // variant.tiles)
    return np.repeat([h + float(_DEQUANTIZED) for h, _ in tall], [n * n_tiles for _, n in tall])


def spans(tiles: Floats, blocks: int, parts: int) -> dict[str, float]:
    """How long the longest block works, by ways to share work tiles; and how long each would if all
    were as long ("even").
    """

    def longest(waves: Floats, back_and_forth: bool) -> float:
        waves = waves.copy()
        if back_and_forth:
            waves[1::2] = waves[1::2, ::-1]
        return float(waves.sum(0).max())

    rest = len(tiles) % blocks
    whole, last = tiles[: len(tiles) - rest].reshape(-1, blocks), np.zeros((1, blocks))
    each = min(parts, blocks // rest) if rest else 1
    divided = last.copy()
    last[0, :rest] = tiles[len(tiles) - rest :]
    divided[0, : rest * each] = np.repeat(
        tiles[len(tiles) - rest :] * (-(-parts // each) / parts), each
    )
    as_it_is, in_parts = np.concatenate([whole, last]), np.concatenate([whole, divided])
    return {
        "in order": longest(as_it_is, False),
        "back and forth": longest(as_it_is, True),
        "last wave in parts": longest(in_parts, False),
        "both": longest(in_parts, True),
        "even": float(tiles.sum() / blocks),
    }


def shown(table: Table, timings: Timings) -> Iterator[str]:
    """For each product and routing, geometric means: of what is chosen over the floor, and of what
    ways to share would take.
    """
    over, shares = (
        defaultdict[tuple[str, str], list[float]](list),
        defaultdict[tuple[str, str], list[list[float]]](list),
    )
    names = list[str]()
    for f in fitted(table, timings):
        cell, of_groups, key = f.cell, sizes(f.cell), (f.cell.routing, f.cell.product)
        if f.loss is not None:
            over[key].append(math.log(f.loss * cell.us[cell.best] / floor(cell, of_groups)))
        chosen = choose_from(table, cell.rows, cell.matrices, timings.arch)
        if len(chosen) == 1 and isinstance(variant := chosen[0].variant, LargeM):
            for one in of_groups:
                found = spans(
                    work_tiles(variant, cell, one), timings.arch.multiprocessors, variant.consumers
                )
                names = list(found)
                shares[key].append([math.log(us / found["in order"]) for us in found.values()])
    yield (
        f"{'routing':<8} {'product':<22} {'of floor':>8}   one large-M kernel, its work tiles "
        f"shared: {', '.join(names[1:])}"
    )
    for key in sorted(over):
        ways = [math.exp(fmean(column)) for column in zip(*shares[key], strict=True)][1:]
        yield (
            f"{key[0]:<8} {key[1]:<22} {math.exp(fmean(over[key])):8.2f}   "
            f"{' '.join(f'{way:.3f}' for way in ways)}"
        )
    for routing in sweep.ROUTINGS:
        if means := [fmean(found) for (r, _), found in over.items() if r == routing]:
            yield f"{routing}: {math.exp(fmean(means)):.3f} of the floor"
