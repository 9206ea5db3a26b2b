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
class SmallM:
    """kernels/small_m.cuh: 8 * tiles_m rows of a group; tiles_per_warp tiles of 16 columns a warp; split-K by split_k warps.

    in_flight: K blocks requested ahead, at least; batch: how many more are requested at a time.
    per_sm: blocks that share a multiprocessor, which is what registers are limited by.
    """

    tiles_m: int
    tiles_per_warp: int
    split_k: int
    in_flight: int
    batch: int
    per_sm: int

    header = "small_m.cuh"
    shared = 0  # bytes that a launch asks for
    persistent = False  # whether a block loops over work tiles, and no more are launched than run at once
    reads_fragment_order = False  # whether it can read activations in fragment order, which takes fewer instructions
    prefers_natural_order = False  # whether rows in natural order are faster read as they are than written in fragment order first

    @property
    def warps(self) -> int:
        """Of a block: few, of which none waits long for the others; more where these make no two tiles, which gate and up are."""
        return 4 if 4 * self.tiles_per_warp >= 2 * self.split_k else 8

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def wave(self) -> int:
        """Blocks that an H200 runs at once."""
        return _MULTIPROCESSORS * self.per_sm

    @property
    def tile_m(self) -> int:
        """Rows of an M tile."""
        return 8 * self.tiles_m

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product that a block makes at once."""
        return self.tiles_per_warp * self.warps // self.split_k

    @property
    def name(self) -> str:
        """Names the kernel."""
        return f"small_m_{self.tiles_m}x{self.tiles_per_warp}x{self.split_k}x{self.in_flight}x{self.batch}"

    def call(self, blocks: int) -> str:
        """What the kernel runs in that many blocks. No more than one wave has no use for the code that splits the last."""
        wave = self.wave if blocks > self.wave else 0
        sizes = self.tiles_m, self.tiles_per_warp, self.split_k, self.in_flight, self.batch, self.warps, wave
        return f"SmallM<Segment, {', '.join(map(str, sizes))}>::run(s);"

    def fits(self, of: Matrices, arch: str) -> bool:
        """Whether it makes whole columns of a result of all its tiles, and registers hold what is in flight."""
        packed = (self.in_flight + self.batch) * self.tiles_per_warp * of.tile_bytes // 128
        sums_and_rows = (4 * self.tiles_per_warp + 16) * self.tiles_m
        registers = min(255, _REGISTERS // (self.threads * self.per_sm))
        return self.tiles % of.block == 0 and packed + sums_and_rows + _OTHER_REGISTERS <= registers

    def splits_last_wave(self, block: int) -> bool:
        """Whether idle blocks take halves of the last wave's tiles: see kernels/small_m.cuh."""
        return 2 * self.split_k <= self.warps and self.tiles % (2 * block) == 0

    def cost(self, blocks: float, idle_blocks: float, of: Matrices) -> float:
        """The time of that many blocks with work, in what a warp takes for a K block, as far as an H200's times tell variants of one
        regime apart.

        idle_blocks: blocks without work. Blocks run in waves, and less than a whole one saturates memory; the last is half as long where
        idle blocks are sure to take halves. Prologue and epilogue take a block as long as some more K blocks.
        """
        whole, rest = divmod(blocks, self.wave)
        waves = max(math.ceil(blocks / self.wave), blocks * self.warps / _WARPS_TO_SATURATE_MEMORY)
        if self.splits_last_wave(of.block) and whole and 2 * rest <= min(idle_blocks, self.wave):
            waves = min(waves, whole * max(1, self.wave * self.warps / _WARPS_TO_SATURATE_MEMORY) + 0.5)
        return waves * (of.k / 64 / self.split_k + _PROLOGUE_EPILOGUE_K_BLOCKS)


@dataclass(frozen=True)
class LargeM:
    """kernels/large_m.cuh: up to `tile_m` rows of a group, by `consumers` warpgroups, each with `repeats` times 64 columns of the product.

    Needs wgmma.
    """

    tile_m: int
    consumers: int
    repeats: int = 1

    header = "large_m.cuh"
    per_sm = 1
    shared = 227 * 1024
    persistent = True
    reads_fragment_order = True

    @property
    def prefers_natural_order(self) -> bool:
        """As measured on an H200: 0.86 to 1.03 of the time at tile_m 160, where more rows share a dequantized weight; 1.0 to 1.07 below."""
        return self.tile_m >= 160

    @property
    def threads(self) -> int:
        """One more warpgroup: producers."""
        return 128 * (self.consumers + 1)

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product that a block makes at once."""
        return 4 * self.consumers * self.repeats

    @property
    def name(self) -> str:
        """Names the kernel."""
        repeats = f"x{self.repeats}" if self.repeats > 1 else ""
        return f"large_m_{self.tile_m}x{self.consumers}{repeats}"

    def call(self, blocks: int) -> str:
        """What the kernel runs."""
        return f"LargeM<Segment, {self.tile_m}, {self.consumers}, {self.repeats}>::run(s);"

    def stages(self, of: Matrices) -> int:
        """Of the ring in shared memory, as kernels/large_m.cuh counts them."""
        depth = 1 if of.wide else 2
        stage = ceil_to(depth * (self.tile_m * 128 + self.tiles * of.tile_bytes), 1024)
        scheduler, work_tile, barriers = 20 * of.groups + 36, 32, 16
        return (self.shared - scheduler - work_tile) // (stage + barriers + work_tile)

    def fits(self, of: Matrices, arch: str) -> bool:
        """Whether it makes whole columns of a result of all its tiles, on an architecture, and has the stages that it needs.

        Two repeats, or four consumers with high M tiles, leave no registers for the last half of a stage, of K that is no multiple of 128;
        two repeats with high M tiles none for tiles past the last column either, and two repeats none for wide tiles.
        """
        short_of_registers = self.repeats > 1 or (self.consumers > 3 and self.tile_m > 80)
        whole = of.tiles % self.tiles == 0 or self.repeats == 1 or self.tile_m <= 32
        prefetched = not of.wide or self.repeats == 1
        return (
            arch == "sm_90a" and of.tiled and self.tiles % of.block == 0 and whole and prefetched and self.stages(of) >= _MIN_STAGES
            and (of.k % 128 == 0 or not short_of_registers)
        )  # fmt: skip

    def cost(self, blocks: float, idle_blocks: float, of: Matrices) -> float:
        """The time of the tiles of one multiprocessor, those past the product's last column too, in what one takes with one repeat, as an
        H200's times say.

        In a single wave, one more M tile of a group would be a wave of its own: high M tiles. Else low ones, which leave more shared memory
        to stages.
        """
        waves = math.ceil(blocks / _MULTIPROCESSORS)
        tiles = waves * self.tiles * (1 if self.repeats == 1 else _TWO_REPEATS)
        return tiles / self.tile_m if waves == 1 else tiles


Variant = SmallM | LargeM


@dataclass(frozen=True)
class Regime:
    """max_average: rows that a group has on average, up to which one of the variants is chosen: the fastest.

    size_classes: in products of at least min_weights weights, beside which more launches are short, the same for groups of up to so many
    rows each, by concurrent kernels. Where rows pick groups evenly, nearly all groups are in one of these.
    """

    max_average: float
    variants: tuple[Variant, ...]
    size_classes: tuple[tuple[int | None, tuple[Variant, ...]], ...] = ()
    min_weights: int = 0


@dataclass(frozen=True)
class SizeClass:
    """A kernel, and the groups that it handles: those of more than above_rows rows, and at most max_rows if that is not None."""

    variant: Variant
    above_rows: int = 0
    max_rows: int | None = None

    def __str__(self) -> str:
        """Names the kernel and, if it does not handle all, its groups."""
        if self.max_rows is None:
            return f"{self.variant.name} (groups of more than {self.above_rows} rows)" if self.above_rows else self.variant.name
        return f"{self.variant.name} (groups of {self.above_rows + 1} to {self.max_rows} rows)"


ALWAYS = float("inf")
M8 = (SmallM(1, 1, 1, 1, 3, 8), SmallM(1, 1, 2, 1, 3, 8), SmallM(1, 1, 4, 1, 3, 4), SmallM(1, 1, 8, 1, 3, 4))
M16 = (SmallM(2, 2, 1, 2, 2, 4), SmallM(2, 2, 2, 2, 2, 4), SmallM(2, 2, 4, 2, 2, 4))
M32, M48_96 = (LargeM(32, 5), LargeM(32, 4, 2)), (LargeM(48, 4, 2), LargeM(64, 4), LargeM(96, 4))
M80, M160 = (LargeM(80, 4),), (LargeM(160, 3),)
TILED = (
    Regime(3, M8),
    Regime(6, M8, ((12, M8), (None, M80)), 2**30),
    Regime(12, M16, ((24, M16), (None, M80)), 2**30),
    Regime(20, M32, ((32, M32), (None, M80)), 2**29),
    Regime(36, M48_96, ((64, M48_96), (None, M160)), 2**29),
    Regime(48, (LargeM(64, 4), LargeM(96, 4))),
    Regime(68, M80, ((32, M32), (112, M80), (None, M160)), 2**30),  # weights of a group that is higher are dequantized twice
    Regime(ALWAYS, M160),
    Regime(24, M16),  # without wgmma
    Regime(ALWAYS, (SmallM(4, 2, 4, 1, 1, 2),)),
)
LINEAR = (
    Regime(6, (SmallM(1, 1, 2, 1, 3, 4), SmallM(1, 1, 4, 1, 3, 2), SmallM(1, 1, 8, 1, 3, 2))),
    Regime(24, (SmallM(2, 1, 2, 1, 3, 4), SmallM(2, 1, 4, 1, 3, 2))),
    Regime(ALWAYS, (SmallM(4, 2, 4, 1, 1, 2),)),
)
# Of tiles of 2,048 bytes registers hold fewer. Not tuned: where regimes begin is taken from above.
WIDE_M8 = (SmallM(1, 1, 1, 1, 2, 4), SmallM(1, 1, 2, 1, 2, 4), SmallM(1, 1, 4, 1, 2, 2), SmallM(1, 1, 8, 1, 2, 2))
WIDE_M16 = (SmallM(2, 1, 2, 1, 1, 4), SmallM(2, 1, 4, 1, 1, 2))
WIDE_TILED = (Regime(6, WIDE_M8), Regime(12, WIDE_M16), *TILED[3:8], Regime(24, WIDE_M16), TILED[-1])
WIDE_LINEAR = (Regime(6, WIDE_M8), Regime(24, WIDE_M16), LINEAR[-1])
_REGISTERS = 65536  # of a multiprocessor
_OTHER_REGISTERS = 26  # of a thread of a small-M kernel: addresses, fragments
_MIN_STAGES = 3
_MULTIPROCESSORS = 132  # of an H200
_WARPS_TO_SATURATE_MEMORY = 3200  # of an H200
_PROLOGUE_EPILOGUE_K_BLOCKS = 4  # K blocks that take as long
_MIN_GROUPS = 16  # groups, of which some can be much heavier
_TWO_REPEATS = 0.955  # of the time of a tile, since repeats share what is done for each stage


def regimes(of: Matrices) -> Sequence[Regime]:
    """The table of kernels for such matrices."""
    if of.tiled:
        return WIDE_TILED if of.wide else TILED
    return WIDE_LINEAR if of.wide else LINEAR


def choose(rows: int, of: Matrices, arch: str) -> tuple[SizeClass, ...]:
    """The kernels, in order, for `rows` rows in groups.

    Few blocks leave a GPU idle: split-K makes more of them.
    """
    groups = of.groups
    touched = groups * (1 - (1 - 1 / groups) ** rows)  # groups with a row, if rows pick them evenly

    def cost(v: Variant) -> float:
        expected = max(touched, rows / v.tile_m) * -(-of.tiles // v.tiles)
        return v.cost(expected, blocks(SizeClass(v), rows, of) - expected, of)

    def fastest(among: Sequence[Variant]) -> Variant | None:
        return min((v for v in among if v.fits(of, arch)), key=cost, default=None)

    possible = ((regime, fastest(regime.variants)) for regime in regimes(of) if rows <= regime.max_average * groups)
    regime, usual = next((regime, variant) for regime, variant in possible if variant)
    bounds, found = [most for most, _ in regime.size_classes], [v for _, among in regime.size_classes if (v := fastest(among))]
    long = groups >= _MIN_GROUPS and groups * of.tiles * 16 * of.k >= regime.min_weights
    if not found or len(found) < len(bounds) or not long:
        return (SizeClass(usual),)
    size_classes = [SizeClass(v, above or 0, most) for v, above, most in zip(found, [0, *bounds], bounds, strict=False)]
    return tuple(sorted(size_classes, key=lambda c: not c.variant.persistent))  # what persistent kernels leave of a GPU, others fill


def blocks(size_class: SizeClass, rows: int, of: Matrices) -> int:
    """How much there is to do, in blocks, whatever the sizes of groups. Rows of no group are one more group."""
    tile_m, count = size_class.variant.tile_m, min(of.groups, rows // (size_class.above_rows + 1))
    high = ragged.bound(rows, count + 1, tile_m) // tile_m
    if size_class.max_rows is not None:
        high = min(high, count * -(-size_class.max_rows // tile_m))
    return high * -(-of.tiles // size_class.variant.tiles)
