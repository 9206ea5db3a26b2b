"""The kernel for a product with one group: the fastest one, by a model of the kernels' times.

With one group, the host knows what every block does, so the time can be computed for a matrix of
any size. With several groups, whose sizes only the device knows, tables of measured times decide
(table.py). tools/tune fits the model's constants to measured times as well, of an H200 and an H100;
GPUs differ in their multiprocessors and memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from ...arch import Arch
from .variants import M8, M16, M80, M160, SMALL_M32, SPLIT_K, LargeM, Matrices, SmallM

CONSTANTS = Path(__file__).with_suffix(".json")
VARIANTS: tuple[SmallM | LargeM, ...] = (
    *M8,
    *M16[1:],
    *SMALL_M32,
    LargeM(64, 4),
    *M80,
    LargeM(96, 4),
    *M160,
    *SPLIT_K,
)


@dataclass(frozen=True)
class Constants:
    """Times in us. For small M: what a launch takes besides its products, and what each wave after
    the first takes; for a warp and 16 columns of a K block: issuing the dequantization and each
    product with 8 rows, and waiting, which takes `wait_of_product` longer for each product.
    few_in_flight: a factor for the times per K block if a lane has the weights of only two K blocks
    in flight.

    For large M: a stage of four consumer warpgroups, which takes longer for each row of the M tile
    and, as a share, for each further warpgroup; what a work tile takes besides its stages, longer
    for each row; and what blocks of a cluster take to exchange sums, longer for each row of each
    other block.

    small_memory, large_memory: how much longer reading weights takes than by the GPU's bandwidth.
    overlap: the power of the norm that adds up overlapping times.
    """

    launch: float
    wave: float
    dequantize: float
    product: float
    wait: float
    wait_of_product: float
    few_in_flight: float
    stage: float
    stage_row: float
    consumer: float
    work_tile: float
    work_tile_row: float
    exchange: float
    exchange_row: float
    small_memory: float
    large_memory: float
    overlap: float


@cache
def constants() -> Constants:
    """The constants of the model of a product's time, fitted to measurements of a GPU."""
    return Constants(**json.loads(CONSTANTS.read_text(encoding="utf-8")))


def admits(of: Matrices) -> bool:
    """Whether the model covers a product: an fprop with one group, whose weights are tiled and not
    wide.
    """
    return of.groups == 1 and of.kind == "fprop" and of.tiled and not of.wide


def fastest(rows: int, of: Matrices, arch: Arch) -> SmallM | LargeM | None:
    """The fastest kernel for this many rows; None if none fits, and on GPUs without wgmma, of
    which the model has no times.
    """
    if arch.why_not(LargeM.needs):
        return None
    return min(
        (v for v in VARIANTS if v.fits(of, arch)),
        key=lambda v: microseconds(v, max(rows, 1), of, arch, constants()),
        default=None,
    )


def microseconds(v: SmallM | LargeM, rows: int, of: Matrices, arch: Arch, by: Constants) -> float:
    """The time that a kernel takes for a product."""
    memory = of.tiles * (of.k / 64) * of.tile_bytes / arch.memory_bandwidth * 1e6
    return (
        _small_m(v, rows, of, memory, arch, by)
        if isinstance(v, SmallM)
        else _large_m(v, rows, of, memory, arch, by)
    )


def _small_m(v: SmallM, rows: int, of: Matrices, memory: float, arch: Arch, by: Constants) -> float:
    blocks = ceil(rows / v.tile_m) * ceil(of.tiles / v.tiles)
    products = v.tiles_per_warp * min(v.tiles_m, ceil(rows / 8))
    waves, k_blocks = ceil(blocks / v.wave(arch)), of.k / 64 / v.split_k
    issued = (
        blocks
        * v.warps
        * k_blocks
        * (v.tiles_per_warp * by.dequantize + products * by.product)
        / arch.multiprocessors
    )
    waited = waves * k_blocks * (by.wait + products * by.wait_of_product)
    slower = by.few_in_flight if v.in_flight + v.batch <= 2 else 1
    return (
        by.launch
        + by.wave * (waves - 1)
        + slower * _overlapped(by, issued, waited, memory * by.small_memory)
    )


def _large_m(v: LargeM, rows: int, of: Matrices, memory: float, arch: Arch, by: Constants) -> float:
    m_tiles = ceil(rows / v.tile_m)
    high = ceil(rows / m_tiles / 8) * 8
    waves = ceil(m_tiles * ceil(of.tiles / v.tiles) * v.cluster / arch.clustered(v.cluster))
    stage = (by.stage + by.stage_row * high) * (1 + by.consumer * (v.consumers * v.repeats - 4))
    busy = waves * (of.k / 128 / v.cluster * stage + by.work_tile + by.work_tile_row * high)
    exchange = by.exchange + by.exchange_row * high * (v.cluster - 1) if v.cluster > 1 else 0
    return exchange + _overlapped(by, busy, memory * by.large_memory)


def _overlapped(by: Constants, *times: float) -> float:
    return sum(t**by.overlap for t in times) ** (1 / by.overlap)
