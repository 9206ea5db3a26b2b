"""Products of many rows whose weights do not lie in tiles: a kernel reorders them first, in memory
of the call, if that takes less than kernels of few rows would lose.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ... import options
from ...arch import Arch
from ...encodings import Encoding, Scale, real_tensors
from ...errors import UnsupportedError
from ...layouts import LAYOUTS, W16X64, Tiled
from ..cxx import ProductPlan, inner
from .grouped_mm import ByVariants
from .heuristics import AUTO, Chosen
from .readers import TILED, order_lines
from .source import MAX_RESIDENT, THREADS, Array, KernelSource, Sizes

_ROWS, _COLUMNS = W16X64.tile
_LANE_COLUMNS = 16  # of a row, that a lane reads
_BANDS, _RUN = 8, 4  # tiles that the warps of a block have below each other, and each in a row
_BITS = 4  # of a code


class Reordered(ByVariants):
    """A planned fprop by kernels that read tiles of weights, which one before them makes. The
    option order="row" keeps to weights as they lie, as order_weights=False does.
    """

    def __init__(self, plan: ProductPlan):
        super().__init__(replace(plan, layout=TILED))
        self.stored_layout, self.stored_parts = plan.layout, self._part_names(plan)
        names, weights = self.reader.names(plan.encoding), plan.groups * plan.n * plan.k
        bytes_ = weights * _BITS // 8, weights // self._scale.block
        self.tile_arrays = [
            Array(name, "u8", count) for name, count in zip(names, bytes_, strict=False)
        ]
        self.scratch += self.tile_arrays

    def choose(self, sizes: Sizes | None, arch: Arch, variant: str = AUTO) -> Chosen:
        """UnsupportedError if those for few rows are the fastest, which do not need tiles."""
        chosen = super().choose(sizes, arch, variant)
        persistent = any(of.variant.persistent for of in chosen.size_classes)
        if variant == AUTO and (self.plan.row_order or not persistent):
            raise UnsupportedError("kernels that read weights as they lie are faster")
        return chosen

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """The one that reorders comes first."""
        return [self.once(self._reorder), *super().kernels(chosen, sizes, arch)]

    def _part_names(self, plan: ProductPlan) -> list[str]:
        names = super()._part_names(plan)
        parts = zip(plan.encoding.parts, names, strict=True)
        return [name if part.of_matrix else f"stored_{name}" for part, name in parts]

    @property
    def _is_ready(self) -> bool:
        return False

    @property
    def _knows_ids(self) -> bool:
        return False

    @property
    def _scale(self) -> Scale:
        return self.plan.encoding.block_scales[0]

    def _reorder(self) -> KernelSource:
        plan, runs = self.plan, -(-self.plan.k // (_COLUMNS * _RUN))
        bands = -(-plan.n // (_ROWS * _BANDS))
        warps = plan.groups * bands * runs * _BANDS
        body = [
            *self.WAIT,
            "__shared__ u8 table[256];",
            "table[threadIdx.x] = recoded(threadIdx.x);",
            "__syncthreads();",
            f"for_all_warps({warps}, [&](i64 i) {{",
            f"    const i32 unit = i32(i / {_BANDS}), run = unit % {runs}, "
            f"band = unit / {runs} % {bands}, group = unit / {runs * bands};",
            f"    const i32 row = {_ROWS} * ({_BANDS} * band + i32(i % {_BANDS}));",
            "    if (row >= N) return;",
            f"    TilesOfLane<Segment, {_RUN}> tiles(*this, group, row, {_RUN} * run, "
            "threadIdx.x % 32);",
            "    tiles.load();",
            "    tiles.store([&](u32 scale) {",
            f"        if (scale > {_most(self._scale)}) report(error, BAD_WEIGHT, group, scale);",
            "        return u32(table[scale]);",
            "    });",
            "});",
        ]
        functions = [*reordering(self), "__device__ void run() const {", *inner(body), "}"]
        return self.calling(
            "s.run();",
            "reorder_weights",
            functions,
            -(-warps // (THREADS // 32)),
            headers=("routing.cuh", "reorder.cuh"),
            max_resident=MAX_RESIDENT,
        )


def reordering(product: Reordered) -> list[str]:
    """What kernels/reorder.cuh asks of a segment's struct."""
    layout, scale = LAYOUTS[product.stored_layout], product.plan.encoding.block_scales[0]
    orders = (layout.elements, layout.scales) if isinstance(layout, Tiled) else (None, None)
    codes, scales, *_ = product.stored_parts
    names = [array.name for array in product.tile_arrays]
    return [
        *order_lines("StoredElements", orders[0]),
        *order_lines("StoredScales", orders[1]),
        f"static constexpr i32 TILE_SCALES = {_COLUMNS // scale.block};",
        *(
            f"__device__ const u8* {function}() const "
            f"{{ return reinterpret_cast<const u8*>({of}); }}"
            for function, of in (("codes_from", codes), ("scales_from", scales))
        ),
        *(
            f"__device__ u8* {function}() const {{ return {of}; }}"
            for function, of in zip(("codes_to", "scales_to"), names, strict=True)
        ),
        *_tile_words(product.plan.encoding),
        *_recoded(scale),
    ]


def takes(plan: ProductPlan) -> bool:
    """Whether a weight has four bits and scales of a byte that tiles take."""
    encoding, scales = plan.encoding, plan.encoding.block_scales
    return (
        options.current().order_weights
        and plan.layout != TILED
        and plan.kind == "fprop"
        and encoding.element.bits == _BITS
        and len(scales) == 1
        and scales[0].dtype.itemsize == 1
        and scales[0].block in (16, 32, 64)
        and not W16X64.why_not(plan.n, plan.k, encoding)
    )


@real_tensors()
def _most(scale: Scale) -> int:
    """The last byte of scales that quantizers write; the ones before it are others."""
    values = torch.arange(256).to(torch.uint8).view(scale.dtype).float()
    good = values.isfinite() & ~(values.signbit() & (not scale.signed))
    return int(good.nonzero().max())


@real_tensors()
def _recoded(scale: Scale) -> list[str]:
    """The function `recoded`: what a tile stores for each byte."""
    table = scale.recoding.forward(torch.arange(256, dtype=torch.uint8)).tolist()
    return [
        "static __device__ __forceinline__ u8 recoded(u32 byte) {",
        f"    static const u8 bytes[] = {{{', '.join(map(str, table))}}};",
        "    return bytes[byte];",
        "}",
    ]


@real_tensors()
def _tile_words(encoding: Encoding) -> list[str]:
    """The function `tile_words`: where the layout puts each bit of a lane's codes. Bits of a word
    that move as far into the same word move at once.
    """
    bits, each = 2 * _LANE_COLUMNS * _BITS, _LANE_COLUMNS * _BITS
    codes = torch.zeros(bits, _ROWS, _COLUMNS * _BITS // 8, dtype=torch.uint8)
    for bit in range(bits):  # one in each tile, of row 0 or row 8
        codes[bit, bit // each * 8, bit % each // 8] = 1 << bit % 8
    (stored,) = W16X64.pack(codes, encoding=encoding)
    places = (stored.view(bits, -1)[:, : bits // 8, None] >> torch.arange(8) & 1).view(bits, bits)
    moves: dict[tuple[int, int, int], int] = {}
    for bit, place in places.nonzero().tolist():
        move = place // 32, bit // 32, place % 32 - bit % 32
        moves[move] = moves.get(move, 0) | 1 << bit % 32
    words = ("low.x", "low.y", "high.x", "high.y")
    terms = [
        " | ".join(
            f"({words[source]} & {mask:#010x}u) {'<<' if by > 0 else '>>'} {abs(by)}"
            for (to, source, by), mask in moves.items()
            if to == word
        )
        for word in range(4)
    ]
    return [
        "static __device__ __forceinline__ uint4 tile_words(uint2 low, uint2 high) {",
        f"    return {{{', '.join(terms)}}};",
        "}",
    ]
