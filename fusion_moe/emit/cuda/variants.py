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

    per_sm: blocks that share a multiprocessor, which is what registers are limited by.
    """

    nt: int
    r: int
    wk: int
    u: int
    per_sm: int

    threads = 32 * WARPS

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

    def blocks(self, rows: int, groups: int, tiles: int) -> int:
        """How much there is to do, in blocks, whatever the sizes of groups. Rows of no group are one more group."""
        return ragged.bound(rows, groups + 1, self.height) // self.height * -(-tiles // self.tiles)


@dataclass(frozen=True)
class Regime:
    """most: rows that a group has on average, up to which it is chosen; variants: from few warps along K to many."""

    most: float
    variants: tuple[FewRows, ...]


TILED = (
    Regime(6, (FewRows(1, 1, 2, 4, 4), FewRows(1, 1, 4, 4, 3), FewRows(1, 1, 8, 4, 4))),
    Regime(24, (FewRows(2, 1, 2, 4, 2), FewRows(2, 1, 4, 4, 2))),
    Regime(float("inf"), (FewRows(4, 2, 4, 2, 1),)),
)
LINEAR = (
    Regime(6, (FewRows(1, 1, 2, 4, 2), FewRows(1, 1, 4, 4, 2), FewRows(1, 1, 8, 4, 2))),
    Regime(24, (FewRows(2, 1, 2, 4, 2), FewRows(2, 1, 4, 4, 2))),
    Regime(float("inf"), (FewRows(4, 2, 4, 2, 1),)),
)
_ENOUGH = 320  # blocks that keep the memory of the largest GPUs busy


def choose(rows: int, groups: int, tiles: int, block: int, regimes: Sequence[Regime]) -> FewRows:
    """The variant for `rows` rows in `groups` groups, of `tiles` tiles of 16 columns, `block` of which make whole columns of the result.

    Few blocks leave a GPU idle: warps along K make more of them.
    """
    regime = next(r for r in regimes if rows <= r.most * groups)
    fitting = [v for v in regime.variants if v.tiles % block == 0]
    touched = groups * (1 - (1 - 1 / groups) ** rows)  # groups with a row, if rows pick them evenly
    wide = (v for v in fitting if max(touched, rows / v.height) * -(-tiles // v.tiles) >= _ENOUGH)
    return next(wide, fitting[-1])
