"""The kernels of grouped products, as data: what each is compiled with, and which one is chosen.

The choice looks at sizes that the host knows, rows, groups and those of a matrix, and never at how many rows a group has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ... import groups as ragged

WARPS = 8


@dataclass(frozen=True)
class FewRows:
    """kernels/few_rows.cuh: 8 * nt rows of a group; r tiles of 16 columns a warp; wk warps along K; u blocks of 64 k in flight.

    per_sm: blocks that share a multiprocessor, which is what registers are limited by; least: blocks with work from which it is chosen, as
    measured on an H200.
    """

    nt: int
    r: int
    wk: int
    u: int
    per_sm: int
    least: int = 0

    header = "few_rows.cuh"
    threads = 32 * WARPS
    shared = 0  # bytes that a launch asks for
    persistent = False  # whether blocks stay on their multiprocessor, and no more than fit are launched
    ordered = False  # whether it reads activations in the order of kernels/order.cuh

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return 8 * self.nt

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product that a block makes at once."""
        return self.r * WARPS // self.wk

    @property
    def name(self) -> str:
        """Names the kernel."""
        return f"few_rows_{self.nt}x{self.r}x{self.wk}x{self.u}"

    @property
    def call(self) -> str:
        """What the kernel runs."""
        return f"FewRows<Segment, {self.nt}, {self.r}, {self.wk}, {self.u}>::run(s);"

    def fits(self, block: int, arch: str) -> bool:
        """Whether it makes whole columns of a result, `block` tiles for each 16 or 8, on an architecture."""
        return self.tiles % block == 0


@dataclass(frozen=True)
class ManyRows:
    """kernels/many_rows.cuh: up to `height` rows of a group, by `teams` warpgroups with 64 columns of the product each; needs wgmma."""

    height: int
    teams: int

    header = "many_rows.cuh"
    per_sm = 1
    least = 0
    shared = 227 * 1024
    persistent = True
    ordered = True

    @property
    def threads(self) -> int:
        """One more warpgroup copies."""
        return 128 * (self.teams + 1)

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product that a block makes at once."""
        return 4 * self.teams

    @property
    def name(self) -> str:
        """Names the kernel."""
        return f"many_rows_{self.height}x{self.teams}"

    @property
    def call(self) -> str:
        """What the kernel runs."""
        return f"ManyRows<Segment, {self.height}, {self.teams}>::run(s);"

    def fits(self, block: int, arch: str) -> bool:
        """Whether it makes whole columns of a result, `block` tiles for each 16 or 8, on an architecture."""
        return arch == "sm_90a" and self.tiles % block == 0


Variant = FewRows | ManyRows


@dataclass(frozen=True)
class Regime:
    """most: rows that a group has on average, up to which it is chosen; variants: from the one that needs the most blocks of work."""

    most: float
    variants: tuple[Variant, ...]


ALWAYS = float("inf")
TILED = (
    Regime(6, (FewRows(1, 1, 1, 4, 4, 700), FewRows(1, 1, 2, 4, 4, 320), FewRows(1, 1, 4, 4, 3, 320), FewRows(1, 1, 8, 4, 4))),
    Regime(12, (FewRows(2, 2, 1, 2, 2, 700), FewRows(2, 2, 2, 2, 2, 250), FewRows(2, 2, 4, 2, 2))),
    Regime(64, (ManyRows(64, 4),)),
    Regime(ALWAYS, (ManyRows(160, 3),)),
    Regime(24, (FewRows(2, 2, 2, 2, 2, 250), FewRows(2, 2, 4, 2, 2))),  # without wgmma
    Regime(ALWAYS, (FewRows(4, 2, 4, 2, 1),)),
)
LINEAR = (
    Regime(6, (FewRows(1, 1, 2, 4, 2, 320), FewRows(1, 1, 4, 4, 2, 320), FewRows(1, 1, 8, 4, 2))),
    Regime(24, (FewRows(2, 1, 2, 4, 2, 320), FewRows(2, 1, 4, 4, 2))),
    Regime(ALWAYS, (FewRows(4, 2, 4, 2, 1),)),
)


def choose(rows: int, groups: int, tiles: int, block: int, regimes: Sequence[Regime], arch: str) -> Variant:
    """The variant for `rows` rows in `groups` groups, of `tiles` tiles of 16 columns, `block` of which make whole columns of the result.

    Few blocks leave a GPU idle: warps along K make more of them.
    """
    possible = ([v for v in r.variants if v.fits(block, arch)] for r in regimes if rows <= r.most * groups)
    fitting = next(variants for variants in possible if variants)
    touched = groups * (1 - (1 - 1 / groups) ** rows)  # groups with a row, if rows pick them evenly
    wide = (v for v in fitting if max(touched, rows / v.height) * -(-tiles // v.tiles) >= v.least)
    return next(wide, fitting[-1])


def blocks(variant: Variant, rows: int, groups: int, tiles: int) -> int:
    """How much there is to do, in blocks, whatever the sizes of groups. Rows of no group are one more group."""
    return ragged.bound(rows, groups + 1, variant.height) // variant.height * -(-tiles // variant.tiles)
