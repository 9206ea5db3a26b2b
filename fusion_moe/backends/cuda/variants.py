"""The kernels of grouped products, as data: compile-time parameters, conditions of use, and cost.

Tables say which of them are candidates for how many rows (table.py), and heuristics.py chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...arch import Arch
from ...layouts import ceil_to

TILE = 1024  # weights in 16 rows and 64 columns


@dataclass(frozen=True)
class Matrices:
    """The matrices of a product, as the choice of a kernel sees them.

    tiles: of 16 columns of the product; each `block` of them make 16 or 8 whole columns of a
    result. tile_bytes: bytes of the elements and block scales of 16 rows and 64 columns; tiled:
    whether these are contiguous. kind: fprop, or dgrad, which contracts the rows of such tiles;
    runs: the runs of these rows, each with an outer scale. row_order: whether all kernels must add
    up K in the same order, whatever the number of rows. rows_stored: whether these are in memory as
    small-M kernels read them.
    """

    groups: int
    k: int
    tiles: int
    block: int
    tile_bytes: int
    tiled: bool
    kind: str = "fprop"
    runs: int = 1
    row_order: bool = False
    rows_stored: bool = True

    @property
    def whole(self) -> bool:
        """Whether a dgrad's tiles make whole K blocks of a run, and whole stages if there are two
        runs.
        """
        return self.kind == "fprop" or (
            self.runs <= 2 and self.k % (64 if self.runs == 1 else 2 * 128) == 0
        )

    @property
    def weights(self) -> int:
        """The number of weights, including those that pad tiles."""
        return self.groups * 16 * self.tiles * self.k

    @property
    def wide(self) -> bool:
        """Whether a stage of shared memory has room for only 64 columns, and registers only for few
        tiles.
        """
        return self.tile_bytes >= TILE


class OnGpus:
    """What all variants have in common.

    needs: the arch.FEATURES that the kernel uses; per_sm: blocks that a multiprocessor is to have;
    cluster: blocks of a cluster, which share a work tile.
    """

    needs: tuple[str, ...]
    template: str  # in `header`
    header: str
    per_sm: int
    cluster: int = 1
    # whether blocks loop over work tiles, and only as many are launched as run at once
    persistent = True
    # whether it can read activations in fragment order, which takes fewer instructions
    reads_fragment_order = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError

    @property
    def prefers_natural_order(self) -> bool:
        """Whether reading rows in natural order is faster than writing them in fragment order."""
        return False

    def fits(self, of: Matrices, arch: Arch) -> bool:
        """Whether it computes a product of such matrices on a GPU."""
        return not self.why_not_on(arch) and self.takes(of, arch)

    def why_not_on(self, arch: Arch) -> str:
        """Why it does not run on a GPU, whatever the matrices; "" if it does."""
        room = arch.why_no_room(self.threads, self.shared(arch), self.per_sm)
        return arch.why_not(self.needs) or room

    def shared(self, arch: Arch) -> int:
        """Bytes of dynamic shared memory of a block: the most that it can have, for stages."""
        return arch.shared_per_block if self.persistent else 0

    def call(self, arch: Arch) -> str:
        """The call in the kernel."""
        arguments = ", ".join(map(str, ("Segment", *self.arguments(arch))))
        return f"{self.template}<{arguments}>::run(s, size_class);"

    def arguments(self, arch: Arch) -> tuple[int | str, ...]:
        """Those of the template, after the segment."""
        raise NotImplementedError

    def takes(self, of: Matrices, arch: Arch) -> bool:
        """Whether tiles, registers and stages suit the matrices."""
        raise NotImplementedError


@dataclass(frozen=True)
class SmallM(OnGpus):
    """kernels/small_m.cuh: 8 * tiles_m rows of a group; tiles_per_warp tiles of 16 columns per
    warp; split-K by split_k warps.

    in_flight: K blocks requested ahead, at least; batch: how many more are requested at a time.
    per_sm: blocks that share a multiprocessor, which limits their registers. row_order: whether it
    adds up K as large-M kernels do that read fragment order: without split-K, and 16 columns at a
    time, the same ones. from_k, most_k: the K from which, and up to which, it is fast; 0: no limit.
    """

    tiles_m: int
    tiles_per_warp: int
    split_k: int
    in_flight: int
    batch: int
    per_sm: int
    row_order: bool = False
    most_k: int = 0
    from_k: int = 0

    needs = ("mma",)
    template, header = "SmallM", "small_m.cuh"
    persistent = False

    @property
    def warps(self) -> int:
        """Warps of a block: few, so that none waits long for others; more if these do not make two
        tiles, as gate and up need.
        """
        return 4 if 4 * self.tiles_per_warp >= 2 * self.split_k else 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def declared(self) -> int:
        """Bytes of static shared memory of a block, at most: of partial sums, with twice the
        split-K if it splits a last wave, and of 32 tokens in each of 8 warps.
        """
        row = 16 * self.tiles_per_warp * self.warps + 4 * min(2 * self.split_k, self.warps)
        return 4 * (self.tile_m * row + 256)

    def wave(self, arch: Arch) -> int:
        """Blocks that a GPU runs at once."""
        return arch.multiprocessors * self.per_sm

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
        """The kernel's name."""
        tile = f"{self.tiles_m}x{self.tiles_per_warp}x{self.split_k}"
        return f"small_m_{tile}x{self.in_flight}x{self.batch}{'_row' if self.row_order else ''}"

    def arguments(self, arch: Arch) -> tuple[int | str, ...]:
        """As in `OnGpus`."""
        last = (0, "true") if self.row_order else (self.wave(arch),)
        tile = self.tiles_m, self.tiles_per_warp, self.split_k
        return (*tile, self.in_flight, self.batch, self.warps, *last)

    def takes(self, of: Matrices, arch: Arch) -> bool:
        """Whether all of its tiles make whole columns of a result, and registers can hold what is
        in flight.
        """
        packed = (self.in_flight + self.batch) * self.tiles_per_warp * of.tile_bytes // 128
        rows = 32 if self.row_order and self.in_flight >= 3 else 16  # as kernels/small_m.cuh
        sums_and_rows = (4 * self.tiles_per_warp + rows) * self.tiles_m
        registers = min(255, arch.registers // (self.threads * self.per_sm))
        return (
            of.kind == "fprop"
            and of.row_order == self.row_order
            and self.from_k <= of.k <= (self.most_k or of.k)
            and self.tiles % of.block == 0
            and packed + sums_and_rows + _OTHER_REGISTERS <= registers
        )

    def splits_last_wave(self, block: int) -> bool:
        """Whether idle blocks take over halves of the last wave's tiles, by twice the split-K: see
        kernels/small_m.cuh.
        """
        return (
            not self.row_order and 2 * self.split_k <= self.warps and self.tiles % (2 * block) == 0
        )

    def cost(self, blocks: float, idle_blocks: float, of: Matrices, arch: Arch) -> float:
        """The time of that many blocks with work, in units of a warp's time for a K block, as far
        as an H200's times distinguish variants of one regime.

        idle_blocks: blocks without work. Blocks run in waves, and less than a whole wave saturates
        memory; the last wave takes half as long if idle blocks are sure to take over halves.
        Prologue and epilogue take a block as long as some more K blocks.
        """
        wave, saturating = self.wave(arch), arch.warps_to_saturate_memory
        whole, rest = divmod(blocks, wave)
        waves = max(math.ceil(blocks / wave), blocks * self.warps / saturating)
        if self.splits_last_wave(of.block) and whole and 2 * rest <= min(idle_blocks, wave):
            waves = min(waves, whole * max(1, wave * self.warps / saturating) + 0.5)
        return waves * (of.k / 64 / self.split_k + _PROLOGUE_EPILOGUE_K_BLOCKS)


@dataclass(frozen=True)
class ManyRows(OnGpus):
    """Kernels of up to `tile_m` rows of a group, by `consumers` of four warps each, with `repeats`
    times as many tiles of 16 columns of the product.
    """

    tile_m: int
    consumers: int
    repeats: int = 1

    per_sm = 1

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product that are made at once."""
        return 4 * self.consumers * self.repeats


@dataclass(frozen=True)
class LargeM(ManyRows):
    """kernels/large_m.cuh: up to `tile_m` rows of a group, by `consumers` warpgroups, each with
    `repeats` times 64 columns of the product.

    cluster: blocks that share such a tile, each with a part of K.
    """

    cluster: int = 1

    needs = ("wgmma", "setmaxnreg", "TMA", "clusters")
    template, header = "LargeM", "large_m.cuh"
    reads_fragment_order = True

    @property
    def prefers_natural_order(self) -> bool:
        """Measured on an H200: 0.86 to 1.03 of the time at tile_m 160, where more rows share a
        dequantized weight; 1.0 to 1.07 below.
        """
        return self.tile_m >= 160

    @property
    def threads(self) -> int:
        """Threads of a block: one more warpgroup than consumers, for the producers."""
        return 128 * (self.consumers + 1)

    @property
    def name(self) -> str:
        """The kernel's name."""
        repeats = f"x{self.repeats}" if self.repeats > 1 else ""
        split_k = f"_k{self.cluster}" if self.cluster > 1 else ""
        return f"large_m_{self.tile_m}x{self.consumers}{repeats}{split_k}"

    def arguments(self, arch: Arch) -> tuple[int | str, ...]:
        """As in `OnGpus`."""
        split_k = (self.cluster,) if self.cluster > 1 else ()
        return self.tile_m, self.consumers, self.repeats, *split_k

    def stages(self, of: Matrices, arch: Arch) -> int:
        """Stages of the ring in shared memory, as kernels/large_m.cuh counts them."""
        stage = ceil_to(
            _stage_k_blocks(of) * (self.tile_m * 128 + self.tiles * of.tile_bytes), 1024
        )
        scheduler, work_tile, barriers = 20 * of.groups + 60, 32, 16
        return (self.shared(arch) - scheduler - work_tile - self._exchange) // (
            stage + barriers + work_tile
        )

    @property
    def _exchange(self) -> int:
        """Bytes of the buffers in which the blocks of a cluster exchange sums, and of barriers."""
        if self.cluster == 1:
            return 0
        owned = -(-self.consumers // self.cluster)
        return ceil_to(
            owned * (self.cluster - 1) * self.tile_m * 64 * 4 + 8 * (owned + self.consumers), 1024
        )

    def takes(self, of: Matrices, arch: Arch) -> bool:
        """Whether all of its tiles make whole columns of a result, and it has the stages that it
        needs.

        Two repeats, or four consumers with high M tiles, leave no registers for the last half of a
        stage, if K is not a multiple of 128, nor for a dgrad's transposition. Two repeats with high
        M tiles leave none for tiles past the last column either, and two repeats none for wide
        tiles.
        """
        short_of_registers = self.repeats > 1 or (self.consumers > 3 and self.tile_m > 80)
        whole = of.tiles % self.tiles == 0 or self.repeats == 1 or self.tile_m <= 32
        prefetched = not of.wide or self.repeats == 1
        parts = self.cluster == 1 or (
            of.kind == "fprop" and of.k % (64 * _stage_k_blocks(of) * self.cluster) == 0
        )
        return (
            (self.cluster == 1 or not of.row_order)
            and of.tiled
            and of.whole
            and self.tiles % of.block == 0
            and whole
            and prefetched
            and parts
            and self.stages(of, arch) >= _MIN_STAGES
            and ((of.k % 128 == 0 and of.kind == "fprop") or not short_of_registers)
        )

    def cost(self, blocks: float, idle_blocks: float, of: Matrices, arch: Arch) -> float:
        """The time of the tiles of one multiprocessor, including those past the product's last
        column, in units of one tile's time with one repeat, by an H200's times.

        In a single wave, one more M tile of a group would need another wave: high M tiles are
        better. Otherwise low ones are, which leave more shared memory for stages.
        """
        waves = math.ceil(blocks / arch.multiprocessors)
        tiles = waves * self.tiles * (1 if self.repeats == 1 else _TWO_REPEATS)
        return tiles / self.tile_m if waves == 1 else tiles


@dataclass(frozen=True)
class LargeMma(ManyRows):
    """kernels/large_mma.cuh: up to `tile_m` rows of a group, by `consumers` times four warps, each
    with `repeats` times 16 columns of the product.

    row_order: whether it adds up K as the other kernels do in row order.
    """

    repeats: int = 2
    row_order: bool = False

    needs = ("mma", "cp.async")
    template, header = "LargeMma", "large_mma.cuh"
    threads = 256

    @property
    def teams(self) -> int:
        """Of a block: each computes a work tile."""
        return 2 // self.consumers

    @property
    def name(self) -> str:
        """The kernel's name."""
        row = "_row" if self.row_order else ""
        return f"large_mma_{self.tile_m}x{self.consumers}x{self.repeats}{row}"

    def arguments(self, arch: Arch) -> tuple[int | str, ...]:
        """As in `OnGpus`."""
        return self.tile_m, self.consumers, self.repeats, str(self.row_order).lower()

    def stages(self, of: Matrices, arch: Arch) -> int:
        """Stages of the ring in shared memory, at most: kernels/large_mma.cuh has up to six."""
        stage = ceil_to(self.tile_m * 128 + self.tiles * of.tile_bytes, 128)
        return (self.shared(arch) - 20 * of.groups - 80) // (self.teams * stage)

    def takes(self, of: Matrices, arch: Arch) -> bool:
        """Whether all of its tiles make whole columns of a result, it has the stages that it needs,
        and its accumulators leave registers for wide tiles, and for those of capability 10.0.
        """
        most = 128 if of.wide else 192 if arch.capability[0] == 10 else 256
        return (
            of.row_order == self.row_order
            and of.tiled
            and of.whole
            and self.tiles % of.block == 0
            and self.stages(of, arch) >= _MIN_STAGES
            and self.tile_m * self.repeats <= most
        )

    def cost(self, blocks: float, idle_blocks: float, of: Matrices, arch: Arch) -> float:
        """The time of the tiles of one multiprocessor, in units of the products of one row with 16
        columns. Reading a row from shared memory is shared by the repeats, dequantizing by the
        rows.
        """
        tiles = math.ceil(blocks / arch.multiprocessors) * self.tiles
        return tiles * (self.tile_m * (1 + _READING / self.repeats) + _DEQUANTIZING)


Variant = SmallM | LargeM | LargeMma


def _of_both_orders(*sizes: tuple[int, int, int]) -> tuple[LargeMma, ...]:
    return tuple(LargeMma(*of, row_order=row) for row in (False, True) for of in sizes)


# Sets of kernels that tables name. Of each set, the kernel with the least cost is chosen, of equal
# ones the first.
M8 = (
    SmallM(1, 1, 1, 1, 3, 8),
    SmallM(1, 1, 2, 2, 2, 8, most_k=2048),  # with more, the next one is as fast or faster
    SmallM(1, 1, 2, 1, 3, 8),
    SmallM(1, 1, 4, 2, 2, 4),
    SmallM(1, 1, 8, 1, 3, 4),
    SmallM(1, 1, 1, 4, 4, 4, row_order=True),
    SmallM(1, 1, 1, 3, 1, 6, row_order=True, most_k=3072),
    SmallM(1, 1, 1, 1, 3, 6, row_order=True),
)
M16 = (
    SmallM(2, 2, 1, 2, 2, 4),
    SmallM(2, 2, 2, 2, 2, 4),
    SmallM(2, 2, 4, 2, 2, 4),
    SmallM(2, 2, 1, 2, 2, 4, row_order=True),
)
# Registers hold fewer tiles of 2,048 bytes.
WIDE_M8 = (
    SmallM(1, 1, 1, 1, 2, 4),
    SmallM(1, 1, 2, 1, 2, 4),
    SmallM(1, 1, 4, 1, 2, 2),
    SmallM(1, 1, 8, 1, 2, 2),
    SmallM(1, 1, 1, 1, 2, 4, row_order=True),
)
SMALL_M32 = (SmallM(4, 2, 4, 1, 1, 2), SmallM(4, 2, 1, 1, 1, 2, row_order=True))
M32, M48_96 = (LargeM(32, 5), LargeM(32, 4, 2)), (LargeM(48, 4, 2), LargeM(64, 4), LargeM(96, 4))
M80, M112, M160 = (LargeM(80, 4),), (LargeM(112, 4),), (LargeM(160, 3),)
SETS: Mapping[str, tuple[Variant, ...]] = {
    "M8": M8,
    "M16": M16,
    "ROW_M32": (LargeM(32, 4),),
    "M32": M32,
    "M48_96": M48_96,
    "M48_64": (LargeM(48, 4, 2), LargeM(64, 4)),
    "M64": (LargeM(64, 4),),
    "M64_96": (LargeM(64, 4), LargeM(96, 4)),
    "M80": M80,
    "M112": M112,
    "M160": M160,
    "SMALL_M32": SMALL_M32,
    "LINEAR_M8": (
        SmallM(1, 1, 2, 1, 3, 4),
        SmallM(1, 1, 4, 1, 3, 2),
        SmallM(1, 1, 8, 1, 3, 2),
        SmallM(1, 1, 1, 1, 3, 4, row_order=True),
    ),
    "LINEAR_M16": (
        SmallM(2, 1, 2, 1, 3, 4),
        SmallM(2, 1, 4, 1, 3, 2),
        SmallM(2, 1, 1, 1, 3, 4, row_order=True),
    ),
    "WIDE_M8": WIDE_M8,
    # of tiles of 1,024 bytes more blocks run at once
    "WIDE_TILES_M8": (
        SmallM(1, 1, 1, 1, 2, 7),
        SmallM(1, 1, 2, 1, 2, 7),
        SmallM(1, 1, 4, 1, 2, 3),
        SmallM(1, 1, 8, 1, 2, 3),
        *WIDE_M8,
    ),
    # of rows of 8 bits two K blocks share a line of 128 bytes: they are requested together
    "WIDE_LINEAR_M8": (
        SmallM(1, 1, 1, 2, 4, 4),
        SmallM(1, 1, 2, 2, 4, 4),
        SmallM(1, 1, 4, 2, 2, 2),
        SmallM(1, 1, 8, 2, 2, 2),
        # with K between these, rows that are rounded have room in four blocks, not in five
        SmallM(1, 1, 1, 2, 2, 5, most_k=2560),
        SmallM(1, 1, 2, 2, 2, 5, most_k=2560),
        SmallM(1, 1, 1, 2, 2, 5, from_k=3329),
        SmallM(1, 1, 2, 2, 2, 5, from_k=3329),
        *WIDE_M8,
    ),
    "WIDE_M16": (
        SmallM(2, 1, 2, 1, 1, 4),
        SmallM(2, 1, 4, 1, 1, 2),
        SmallM(2, 1, 1, 1, 1, 4, row_order=True),
    ),
    "MMA_M32": _of_both_orders((32, 1, 4), (32, 1, 2)),
    "MMA_M64": _of_both_orders((48, 1, 4), (64, 1, 4), (64, 1, 2), (64, 2, 2)),
}
# only for products with one group: see one_group.py
SPLIT_K = (LargeM(64, 4, 1, 2), LargeM(96, 4, 1, 2), LargeM(96, 4, 1, 4))
ALL: tuple[Variant, ...] = tuple(
    dict.fromkeys(v for among in (*SETS.values(), SPLIT_K) for v in among)
)
_OTHER_REGISTERS = 26  # of a thread of a small-M kernel: addresses, fragments
_MIN_STAGES = 3
_PROLOGUE_EPILOGUE_K_BLOCKS = 4  # how many K blocks take as long
# of kernels/large_mma.cuh: what does not overlap with products, in their units, by counted bytes
# and by the times of tiles of 48 and 64 rows on an H200 (docs/extend/large_m.md)
_READING, _DEQUANTIZING = 0.67, 32
_TWO_REPEATS = 0.955  # relative time of a tile, since repeats share the work for each stage


def _stage_k_blocks(of: Matrices) -> int:
    """K blocks of a stage of kernels/large_m.cuh."""
    return 1 if of.wide else 2
