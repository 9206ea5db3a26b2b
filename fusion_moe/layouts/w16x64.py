"""`w16x64` is the order in which the CUDA kernels read weights: each lane of a warp loads 16
consecutive bytes, which are then operands of mma.sync. It consists of three choices:

tile order        matrices are cut into tiles of 16 rows and 64 columns, from left to right, then
                  down. Lane 4 r + c holds the 16 elements of block c in rows r and r + 8:
                  (row r + 8 i, column 16 c + 8 h + 2 v + j), r < 8, c < 4, i, h, j < 2, v < 4
code order        the order of a tile's elements in its bytes: of the element (encodings/orders.py)
scale recoding    of the bytes of block scales, zero points among them: of the scale. A tile's
                  scales, one for `block` elements along K, lie in this order:

    scale (row r + 8 i, block b of the tile)  ->  place  2 (64 / block) r + 2 b + i

Tiles of scales for more than 64 elements, or for whole rows, are as wide as one block.

Codes and scales are separate parts, each in tile order. Scales of a whole matrix stay unchanged.

>>> import torch
>>> from fusion_moe.encodings import NVFP4
>>> codes = torch.zeros(16, 32, dtype=torch.uint8)
>>> # row 0, column 8 is -6: h = 1, i = 0, j = 0; all other codes are 0
>>> codes[0, 4] = 0x0F
>>> scale = torch.arange(0x30, 0x70, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 4)
>>> stored, stored_scale = W16X64.pack(codes, scale, encoding=NVFP4)
>>> stored.flatten()[:4].tolist(), hex(0x1C000008)           # bit 3 of half 0, bits 12-10 of half 1
([8, 0, 0, 28], '0x1c000008')
>>> # rows 0 and 8, which begin with 0x30 and 0x50
>>> (stored_scale.view(torch.uint8) - 0x80).view(8, 4, 2)[0].tolist()
[[48, 80], [49, 81], [50, 82], [51, 83]]
>>> linear = W16X64.unpack(stored, stored_scale, encoding=NVFP4)
>>> [torch.equal(a, b) for a, b in zip(linear, (codes, scale))]
[True, True]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..encodings import CodeOrder, Encoding, Order, Part
from ..encodings.encoded import plain
from ..encodings.orders import Recoding
from ..errors import ShapeError
from .layout import Layout, as_bytes

ROWS, COLUMNS = 16, 64  # of a tile


@dataclass(frozen=True)
class W16x64(Layout):
    """Weights as CUDA kernels read them. See the head of this file. N is a multiple of 16, K of 64
    (padding.py).
    """

    name: str = "w16x64"
    tile: ClassVar[tuple[int, int]] = (ROWS, COLUMNS)

    def why_not(self, n: Any, k: Any, encoding: Encoding) -> str:
        """Why a matrix [N, K] cannot be stored in this order; "" if it can."""
        if n % ROWS or k % COLUMNS:
            return f"N = {n} is not a multiple of {ROWS}, or K = {k} not of {COLUMNS}"
        if encoding.element.tile_order is None or encoding.axis != -1:
            return (
                f"{encoding.name} has elements of {encoding.element.bits} bits and blocks along "
                f"{'K' if encoding.axis == -1 else 'N'}, which have no order"
            )
        odd = [b for b in (s.block for s in encoding.block_scales) if b > 0]
        odd = [b for b in odd if COLUMNS % b and b % COLUMNS]
        return f"{encoding.name} has blocks of {odd[0]}, which cross tiles" if odd else ""

    def pack(self, *parts: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
        """The parts of a weight [..., N, K] in linear order, or only the first -> the same in this
        order. ShapeError: see `why_not`.
        """
        return tuple(_moved(*part_of, encoding) for part_of in self._whole(parts, encoding))

    def unpack(self, *parts: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
        """The inverse of `pack`."""
        whole = self._whole(parts, encoding)
        return tuple(_moved(*part_of, encoding, back=True) for part_of in whole)

    def _whole(self, parts: Sequence[Tensor], encoding: Encoding) -> Iterator[tuple[Part, Tensor]]:
        """Parts with what they are. ShapeError unless the elements, the first, are whole tiles."""
        n, k = parts[0].shape[-2], encoding.elements(parts[0].shape[-1])
        if why := self.why_not(n, k, encoding):
            raise ShapeError(
                why,
                expected=f"whole tiles of {ROWS} rows and {COLUMNS} columns",
                todo="keep the linear layout",
                where=self.name,
            )
        return zip(encoding.parts, map(plain, parts), strict=False)


def _moved(part: Part, t: Tensor, encoding: Encoding, *, back: bool = False) -> Tensor:
    """A part in this order; back: in the linear one."""
    moved = as_bytes(t)
    for step in _steps(part, encoding):  # which may come in any order
        moved = step.inverse(moved) if back else step.forward(moved)
    return moved.view(t.dtype)


def _steps(part: Part, encoding: Encoding) -> tuple[CodeOrder | Order | Recoding, ...]:
    """What is done to a part."""
    if part.scale is None:
        assert encoding.element.tile_order is not None, "why_not comes first"
        return (encoding.element.tile_order,)
    return (_of_scales(part.scale.block), part.scale.recoding) if part.scale.block else ()


def _of_scales(block: int) -> Order:
    """The order of scales for so many elements along K."""
    return Order((2, 8), (max(1, COLUMNS // block) if block > 0 else 1,), (1, 2, 0))


W16X64 = W16x64()
