"""The kernels of grouped products, as data: what each is compiled with, and which one is chosen, or some for groups by their sizes.

The choice looks at sizes that the host knows, rows, groups and those of a matrix, and never at how many rows a group has: a kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ... import groups as ragged
from ...groups import ceil_to

TILE = 1024  # weights in 16 rows and 64 columns


@dataclass(frozen=True)
class Matrices:
    """The matrices of a product, as the choice of a kernel sees them.

    tiles: of 16 columns of the product, `block` of which make whole columns of a result, for each 16 or 8. tile_bytes: of the elements
    and block scales of 16 rows and 64 columns; tiled: whether these lie in one piece.
    """

    groups: int
    k: int
    tiles: int
    block: int
    tile_bytes: int
    tiled: bool

    @property
    def wide(self) -> bool:
        """Whether a stage of shared memory has room for 64 columns alone, and registers for few tiles."""
        return self.tile_bytes > TILE


@dataclass(frozen=True)
class FewRows:
    """kernels/few_rows.cuh: 8 * nt rows of a group; r tiles of 16 columns a warp; wk warps along K.

    u: blocks of 64 k in flight, at least; c: how many more are asked for at a time.
    per_sm: blocks that share a multiprocessor, which is what registers are limited by.
    """

    nt: int
    r: int
    wk: int
    u: int
    c: int
    per_sm: int

    header = "few_rows.cuh"
    shared = 0  # bytes that a launch asks for
    persistent = False  # whether blocks stay on their multiprocessor, and no more than fit are launched
    ordered = False  # whether it can read activations in the order of kernels/order.cuh, which takes fewer instructions
    in_turn = False  # whether it is faster with rows that lie in turn as they are than after a kernel that puts them in order

    @property
    def warps(self) -> int:
        """Of a block: few, of which none waits long for the others; more where these make no two tiles, which gate and up are."""
        return 4 if 4 * self.r >= 2 * self.wk else 8

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def at_once(self) -> int:
        """Blocks that an H200 has running."""
        return _MULTIPROCESSORS * self.per_sm

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return 8 * self.nt

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product that a block makes at once."""
        return self.r * self.warps // self.wk

    @property
    def name(self) -> str:
        """Names the kernel."""
        return f"few_rows_{self.nt}x{self.r}x{self.wk}x{self.u}x{self.c}"

    def call(self, blocks: int) -> str:
        """What the kernel runs in that many blocks. No more than run at once have no use for the code that makes halves."""
        at_once = self.at_once if blocks > self.at_once else 0
        return f"FewRows<Segment, {self.nt}, {self.r}, {self.wk}, {self.u}, {self.c}, {self.warps}, {at_once}>::run(s);"

    def fits(self, of: Matrices, arch: str) -> bool:
        """Whether it makes whole columns of a result of all its tiles, and registers hold what it reads ahead."""
        held = (self.u + self.c) * self.r * of.tile_bytes // 128
        sums_and_rows = (4 * self.r + 16) * self.nt
        registers = min(255, _REGISTERS // (self.threads * self.per_sm))
        return self.tiles % of.block == 0 and held + sums_and_rows + _OTHER_REGISTERS <= registers

    def halves(self, block: int) -> bool:
        """Whether blocks that have nothing to do take halves of the last ones: see kernels/few_rows.cuh."""
        return 2 * self.wk <= self.warps and self.tiles % (2 * block) == 0

    def time(self, blocks: float, spare: float, of: Matrices) -> float:
        """Of that many blocks with work, in what a warp takes for 64 k, as far as an H200's times tell variants of one regime apart.

        spare: blocks without work. Blocks run in waves, and memory is busy with less than whole ones; the last is half as long where spare
        blocks are sure to take halves. To begin and to end takes a block as long as some more k.
        """
        whole, rest = divmod(blocks, self.at_once)
        waves = max(math.ceil(blocks / self.at_once), blocks * self.warps / _BUSY)
        if self.halves(of.block) and whole and 2 * rest <= min(spare, self.at_once):
            waves = min(waves, whole * max(1, self.at_once * self.warps / _BUSY) + 0.5)
        return waves * (of.k / 64 / self.wk + _BEGIN_AND_END)


@dataclass(frozen=True)
class ManyRows:
    """kernels/many_rows.cuh: up to `height` rows of a group, by `teams` warpgroups, each with `bands` times 64 columns of the product.

    Needs wgmma.
    """

    height: int
    teams: int
    bands: int = 1

    header = "many_rows.cuh"
    per_sm = 1
    shared = 227 * 1024
    persistent = True
    ordered = True

    @property
    def in_turn(self) -> bool:
        """As measured on an H200: in 0.86 to 1.03 of the time at height 160, where a weight is decoded for many rows; 1.0 to 1.07 below."""
        return self.height >= 160

    @property
    def threads(self) -> int:
        """One more warpgroup copies."""
        return 128 * (self.teams + 1)

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product that a block makes at once."""
        return 4 * self.teams * self.bands

    @property
    def name(self) -> str:
        """Names the kernel."""
        bands = f"x{self.bands}" if self.bands > 1 else ""
        return f"many_rows_{self.height}x{self.teams}{bands}"

    def call(self, blocks: int) -> str:
        """What the kernel runs."""
        return f"ManyRows<Segment, {self.height}, {self.teams}, {self.bands}>::run(s);"

    def stages(self, of: Matrices) -> int:
        """Of the ring in shared memory, as kernels/many_rows.cuh counts them."""
        depth = 1 if of.wide else 2
        stage = ceil_to(depth * (self.height * 128 + self.tiles * of.tile_bytes), 1024)
        schedule, item, barriers = 20 * of.groups + 36, 32, 16
        return (self.shared - schedule - item) // (stage + barriers + item)

    def fits(self, of: Matrices, arch: str) -> bool:
        """Whether it makes whole columns of a result of all its tiles, on an architecture, and has the stages that it needs.

        Two bands, or four teams with high spans, leave no registers for the last half of a stage, of K that is no multiple of 128; two
        bands with high spans none for tiles past the last column either, and two bands none for wide tiles.
        """
        short_of_registers = self.bands > 1 or (self.teams > 3 and self.height > 80)
        whole = of.tiles % self.tiles == 0 or self.bands == 1 or self.height <= 32
        held = not of.wide or self.bands == 1
        return (
            arch == "sm_90a" and of.tiled and self.tiles % of.block == 0 and whole and held and self.stages(of) >= _LEAST_STAGES
            and (of.k % 128 == 0 or not short_of_registers)
        )  # fmt: skip

    def time(self, blocks: float, spare: float, of: Matrices) -> float:
        """Of the tiles of one multiprocessor, those past the product's last column too, in what one takes with one band, as an H200's times
        say.

        Where all blocks run at once, one more span of a group would be a turn of its own: high spans. Else low ones, which leave more
        shared memory to copies.
        """
        turns = math.ceil(blocks / _MULTIPROCESSORS)
        tiles = turns * self.tiles * (1 if self.bands == 1 else _TWO_BANDS)
        return tiles / self.height if turns == 1 else tiles


Variant = FewRows | ManyRows


@dataclass(frozen=True)
class Regime:
    """most: rows that a group has on average, up to which one of the variants is chosen: the fastest.

    uneven: in products of at least `long` weights, beside which more launches are short, the same for groups of up to so many rows each,
    made by kernels that run beside each other. Where rows pick groups evenly, nearly all are left to one of these.
    """

    most: float
    variants: tuple[Variant, ...]
    uneven: tuple[tuple[int | None, tuple[Variant, ...]], ...] = ()
    long: int = 0


@dataclass(frozen=True)
class Share:
    """A kernel, and the groups that it makes: those of more than `above` rows, and at most `most` if that is not None."""

    variant: Variant
    above: int = 0
    most: int | None = None

    def __str__(self) -> str:
        """Names the kernel and, if it does not make all, its groups."""
        if self.most is None:
            return f"{self.variant.name} (groups of more than {self.above} rows)" if self.above else self.variant.name
        return f"{self.variant.name} (groups of {self.above + 1} to {self.most} rows)"


ALWAYS = float("inf")
FEW = (FewRows(1, 1, 1, 1, 3, 8), FewRows(1, 1, 2, 1, 3, 8), FewRows(1, 1, 4, 1, 3, 4), FewRows(1, 1, 8, 1, 3, 4))
FEW_TALL = (FewRows(2, 2, 1, 2, 2, 4), FewRows(2, 2, 2, 2, 2, 4), FewRows(2, 2, 4, 2, 2, 4))
LOW, MIDDLE = (ManyRows(32, 5), ManyRows(32, 4, 2)), (ManyRows(48, 4, 2), ManyRows(64, 4), ManyRows(96, 4))
TALL, TALLEST = (ManyRows(80, 4),), (ManyRows(160, 3),)
TILED = (
    Regime(3, FEW),
    Regime(6, FEW, ((12, FEW), (None, TALL)), 2**30),
    Regime(12, FEW_TALL, ((24, FEW_TALL), (None, TALL)), 2**30),
    Regime(20, LOW, ((32, LOW), (None, TALL)), 2**29),
    Regime(36, MIDDLE, ((64, MIDDLE), (None, TALLEST)), 2**29),
    Regime(48, (ManyRows(64, 4), ManyRows(96, 4))),
    Regime(68, TALL, ((32, LOW), (112, TALL), (None, TALLEST)), 2**30),  # weights of a group that is higher are decoded twice
    Regime(ALWAYS, TALLEST),
    Regime(24, FEW_TALL),  # without wgmma
    Regime(ALWAYS, (FewRows(4, 2, 4, 1, 1, 2),)),
)
LINEAR = (
    Regime(6, (FewRows(1, 1, 2, 1, 3, 4), FewRows(1, 1, 4, 1, 3, 2), FewRows(1, 1, 8, 1, 3, 2))),
    Regime(24, (FewRows(2, 1, 2, 1, 3, 4), FewRows(2, 1, 4, 1, 3, 2))),
    Regime(ALWAYS, (FewRows(4, 2, 4, 1, 1, 2),)),
)
# Of tiles of 2,048 bytes registers hold fewer. Not tuned: where regimes begin is taken from above.
WIDE_FEW = (FewRows(1, 1, 1, 1, 2, 4), FewRows(1, 1, 2, 1, 2, 4), FewRows(1, 1, 4, 1, 2, 2), FewRows(1, 1, 8, 1, 2, 2))
WIDE_FEW_TALL = (FewRows(2, 1, 2, 1, 1, 4), FewRows(2, 1, 4, 1, 1, 2))
WIDE_TILED = (Regime(6, WIDE_FEW), Regime(12, WIDE_FEW_TALL), *TILED[3:8], Regime(24, WIDE_FEW_TALL), TILED[-1])
WIDE_LINEAR = (Regime(6, WIDE_FEW), Regime(24, WIDE_FEW_TALL), LINEAR[-1])
_REGISTERS = 65536  # of a multiprocessor
_OTHER_REGISTERS = 26  # of a thread of a kernel of few rows: addresses, fragments
_LEAST_STAGES = 3
_MULTIPROCESSORS = 132  # of an H200
_BUSY = 3200  # warps that keep its memory busy
_BEGIN_AND_END = 4  # times 64 k
_MANY = 16  # groups, of which some can be much heavier
_TWO_BANDS = 0.955  # of the time of a tile, since bands share what is done for each stage


def regimes(of: Matrices) -> Sequence[Regime]:
    """The table of kernels for such matrices."""
    if of.tiled:
        return WIDE_TILED if of.wide else TILED
    return WIDE_LINEAR if of.wide else LINEAR


def choose(rows: int, of: Matrices, arch: str) -> tuple[Share, ...]:
    """The kernels, in order, for `rows` rows in groups.

    Few blocks leave a GPU idle: warps along K make more of them.
    """
    groups = of.groups
    touched = groups * (1 - (1 - 1 / groups) ** rows)  # groups with a row, if rows pick them evenly

    def time(v: Variant) -> float:
        expected = max(touched, rows / v.height) * -(-of.tiles // v.tiles)
        return v.time(expected, blocks(Share(v), rows, of) - expected, of)

    def fastest(among: Sequence[Variant]) -> Variant | None:
        return min((v for v in among if v.fits(of, arch)), key=time, default=None)

    possible = ((regime, fastest(regime.variants)) for regime in regimes(of) if rows <= regime.most * groups)
    regime, usual = next((regime, variant) for regime, variant in possible if variant)
    bounds, found = [most for most, _ in regime.uneven], [v for _, among in regime.uneven if (v := fastest(among))]
    long = groups >= _MANY and groups * of.tiles * 16 * of.k >= regime.long
    if not found or len(found) < len(bounds) or not long:
        return (Share(usual),)
    shares = [Share(v, above or 0, most) for v, above, most in zip(found, [0, *bounds], bounds, strict=False)]
    return tuple(sorted(shares, key=lambda share: not share.variant.persistent))  # what these leave of a GPU, others fill


def blocks(share: Share, rows: int, of: Matrices) -> int:
    """How much there is to do, in blocks, whatever the sizes of groups. Rows of no group are one more group."""
    height, count = share.variant.height, min(of.groups, rows // (share.above + 1))
    high = ragged.bound(rows, count + 1, height) // height
    if share.most is not None:
        high = min(high, count * -(-share.most // height))
    return high * -(-of.tiles // share.variant.tiles)
