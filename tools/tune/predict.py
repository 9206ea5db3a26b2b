"""Times, and so a table, for a GPU that nobody has timed: those of another one, scaled by what is
known of both. Needs no GPU.

A kernel's time is that of a launch, and those of memory and of work, which overlap as in
one_group.py. Memory's follows bandwidths, work's the multiprocessors, and is at least the tensor
cores'. Kernels that the timed GPU does not choose (large_mma.cuh) have a model of their own, of a
multiprocessor's clocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist, quantiles

import fit
from timings import Cell, Timings, way

from fusion_moe.arch import KNOWN, Arch, tensor_rate
from fusion_moe.backends.cuda.heuristics import SizeClass
from fusion_moe.backends.cuda.one_group import constants
from fusion_moe.backends.cuda.table import ALWAYS, Change, Regime, Table, table_of
from fusion_moe.backends.cuda.variants import ALL, SETS, LargeM, LargeMma, Variant

_NAMED: Mapping[str, Variant] = {v.name: v for v in ALL}
# Regimes without wgmma: rows of a group up to which a set is used. Those after the first without a
# limit are for products that large_mma.cuh does not take.
COUNTED: Mapping[str, tuple[tuple[float, str], ...]] = {
    "tiled": (
        (8, "M8"),
        (24, "M16"),
        (40, "MMA_M32"),
        (ALWAYS, "MMA_M64"),
        (24, "M16"),
        (ALWAYS, "SMALL_M32"),
    ),
    "wide_tiled": (
        (6, "WIDE_TILES_M8"),
        (20, "WIDE_M16"),
        (40, "MMA_M32"),
        (ALWAYS, "MMA_M64"),
        (24, "WIDE_M16"),
        (ALWAYS, "SMALL_M32"),
    ),
    "wide_linear": ((6, "WIDE_M8"), (24, "WIDE_M16"), (ALWAYS, "SMALL_M32")),
}
# rows of a group from which codes are multiplied, and below how many weights: an H200's, before
# its products rounded few rows in shared memory, of which others have less
CODES = ((1, 2**29), (0.5, 2**30), (0.1, 2**32), (0, None))
_PRICE = 3.0  # of one more regime: small differences of predicted times mean nothing
_WARPS = 8  # of a multiprocessor, by large_mma.cuh
_FLOP = 4096  # of an mma of 16 x 8 x 16


def predicted(timings: Timings, gpu: Arch) -> Timings:
    """The times of another GPU's kernels for the same products."""
    cells = (replace(c, us=dict(_times(c, timings.arch, gpu))) for c in timings.cells)
    about = {"predicted": f"by the times of {timings.arch.name}"}
    return Timings(gpu, about, tuple(cell for cell in cells if cell.us))


def _times(cell: Cell, timed: Arch, gpu: Arch) -> Iterator[tuple[str, float]]:
    before, after = (_memory(cell, arch) for arch in (timed, gpu))
    launch, by = constants().launch, constants().overlap
    for name, us in cell.us.items():
        used = [_NAMED.get(part.split(" ")[0]) for part in name.split(" + ")]
        if all(v and v.fits(cell.matrices, gpu) for v in used):  # a kernel that is gone has times
            work = max(max(us - launch, 0) ** by - before**by, 0) ** (1 / by)
            work *= timed.multiprocessors / gpu.multiprocessors
            yield name, launch + _overlapped(after, max(work, _tensor(cell, gpu)))
    for v in ALL if gpu.why_not(LargeM.needs) else ():
        if isinstance(v, LargeMma) and v.fits(cell.matrices, gpu):
            yield way([SizeClass(v)]), launch + _overlapped(after, _of_large_mma(v, cell, gpu))


def _overlapped(*times: float) -> float:
    by = constants().overlap
    return sum(t**by for t in times) ** (1 / by)


def _touched(cell: Cell) -> float:
    """Groups that have rows, if rows choose them evenly."""
    groups = cell.matrices.groups
    return groups * (1 - (1 - 1 / groups) ** cell.rows)


def _memory(cell: Cell, gpu: Arch) -> float:
    """The us in which the weights of groups with rows are read."""
    of = cell.matrices
    return _touched(cell) * of.tiles * of.k / 64 * of.tile_bytes / gpu.memory_bandwidth * 1e6


def _tensor(cell: Cell, gpu: Arch) -> float:
    """The us in which the tensor cores multiply groups of whole eight rows."""
    of, touched = cell.matrices, _touched(cell)
    rows = touched * math.ceil(cell.rows / touched / 8) * 8
    return 2 * rows * 16 * of.tiles * of.k / gpu.tensor_rate * 1e6


def _of_large_mma(v: LargeMma, cell: Cell, gpu: Arch) -> float:
    """The us of the work of kernels/large_mma.cuh: for a K block the tensor cores, the issue of
    instructions and shared memory overlap.
    """
    of, touched = cell.matrices, _touched(cell)
    driver = (name for name, known in KNOWN.items() if known.name == gpu.name)
    each_clock = tensor_rate(next(driver, gpu.name), gpu.capability, 1, 1)
    clock = gpu.tensor_rate / (each_clock * gpu.multiprocessors)
    rows = cell.rows / touched  # of a group, on average
    m_tiles = _m_tiles(rows, v.tile_m)
    height = max(8.0, rows / m_tiles + 4)  # a multiple of 8
    clocks = _overlapped(
        4 * v.repeats * height / 8 * _FLOP / each_clock,
        (60 * v.repeats + height * (v.repeats / 2 + 0.25) + 35) / 4,
        height + 5 * v.repeats + height / 3,
    )
    blocks = touched * m_tiles * math.ceil(of.tiles / v.tiles)
    waves = math.ceil(blocks / (gpu.multiprocessors * v.teams))
    return waves * (_WARPS * of.k / 64 * clocks / clock * 1e6 + constants().work_tile)


def _m_tiles(rows: float, tile_m: int) -> float:
    """M tiles of a group, whose rows vary as if each chose a group at random."""
    found = NormalDist(rows, math.sqrt(rows))
    return 1 + sum(1 - found.cdf(k * tile_m + 0.5) for k in range(1, math.ceil(rows / tile_m) + 4))


def table(timings: Timings, gpu: Arch) -> Table:
    """The table of a GPU without wgmma: the regimes that suit its predicted times, whatever the
    shape of a product; for weights that were not timed, those that counted instructions suggest.
    """
    timed = table_of(timings.arch)
    counted = {
        kind: tuple(Regime(most, SETS[name]) for most, name in COUNTED[kind]) for kind in COUNTED
    }
    codes = tuple(Change(from_average=least, below_weights=most) for least, most in CODES)
    changed = replace(timed, row_order=(), changes={**timed.changes, "codes": codes}, **counted)
    return fit.fit(changed, predicted(timings, gpu), fit.SHAPES[-1:], _PRICE)


# How good it is -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """errors: predicted times in measured ones, at the 5th, 50th and 95th percentile; losses: of
    what three tables choose, in measured times of the fastest: the GPU's own, the predicted one,
    and the other GPU's.
    """

    gpu: str
    by: str
    errors: tuple[float, float, float]
    losses: tuple[float, float, float]

    def __str__(self) -> str:
        low, middle, high = self.errors
        own, found, other = self.losses
        return (
            f"{self.gpu} by {self.by}: predicted times are {low:.2f} to {high:.2f} of the measured "
            f"ones, median {middle:.2f}; what the predicted table chooses takes {found:.3f} times "
            f"as long as the fastest, what its own chooses {own:.3f}, what {self.by}'s {other:.3f}"
        )


def quality(measured: Timings, by: Timings) -> Quality:
    """How well one timed GPU predicts another."""
    guessed = predicted(by, measured.arch)
    times = {cell.key: cell.us for cell in measured.cells}
    ratios = [
        us / times[cell.key][name]
        for cell in guessed.cells
        for name, us in cell.us.items()
        if name in times.get(cell.key, {})
    ]
    cuts = quantiles(ratios, n=20)
    own, other = (table_of(t.arch) for t in (measured, by))
    losses = [
        math.exp(fit.mean_loss(found, measured)) for found in (own, fit.fit(other, guessed), other)
    ]
    return Quality(measured.arch.name, by.arch.name, (cuts[0], cuts[9], cuts[18]), (*losses,)[:3])
