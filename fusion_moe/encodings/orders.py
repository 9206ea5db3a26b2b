"""How an encoding's bytes lie in the tiles of `w16x64` (layouts/w16x64.py): the order of a tile's
elements, and how the bytes of scales are recoded. A format states its own where it differs from
the usual one. x is [..., r, c, v, j, h, i], as defined there.

4 bits: code (r, c, v, j, h, i) -> byte 64 r + 16 c + 4 v + 2 j + h, the low nibble for i = 0. A
single `and` makes a pair of numbers from a word or a shifted word.

8 bits: code (r, c, v, j, h, i) -> byte 512 (v // 2) + 64 r + 16 c + 8 (v % 2) + 4 h + 2 i + j: a
word has two pairs of numbers of a step of a lane.

16 bits: element (r, c, v, j, h, i) -> byte 512 v + 64 r + 16 c + 8 h + 4 i + 2 j: step v of a lane
is 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CodeOrder(Protocol):
    """How a part's elements are packed along K, and lie in the memory of a tile."""

    def unpacked(self, t: Tensor) -> Tensor:
        """A part [..., N, packed K] -> one element each, [..., N, K]."""

    def packed(self, x: Tensor) -> Tensor:
        """The inverse of `unpacked`."""

    def stored(self, x: Tensor) -> Tensor:
        """Elements [..., r, c, v, j, h, i] -> the memory of their tiles."""

    def read(self, t: Tensor, tiles: tuple[int, ...]) -> Tensor:
        """The inverse of `stored`; tiles: the leading dimensions of the elements."""


class Nibbles:
    """Two codes a byte: the even k is in the low nibble."""

    def unpacked(self, t: Tensor) -> Tensor:
        """u8 [..., N, K/2] -> u8 [..., N, K]"""
        return torch.stack([t & 15, t >> 4], -1).flatten(-2)

    def packed(self, x: Tensor) -> Tensor:
        """u8 [..., N, K] -> u8 [..., N, K/2]"""
        return x[..., 0::2] | x[..., 1::2] << 4

    def stored(self, x: Tensor) -> Tensor:
        """u8 codes [..., r, c, v, j, h, i] -> u8 [..., r, c, v, j, h]"""
        return x[..., 0] | x[..., 1] << 4

    def read(self, t: Tensor, tiles: tuple[int, ...]) -> Tensor:
        """The inverse of `stored`."""
        return self.unpacked(t).view(*tiles, *TILE)


@dataclass(frozen=True)
class Permuted:
    """Numbers of one or two bytes. dtype: as which they are moved; sizes: of r, c, v, j, h, i,
    where a dimension may be two; order: which of these follow each other in memory.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def unpacked(self, t: Tensor) -> Tensor:
        """t"""
        return t.view(self.dtype)

    def packed(self, x: Tensor) -> Tensor:
        """x"""
        return x

    def stored(self, x: Tensor) -> Tensor:
        """[..., r, c, v, j, h, i] -> the same in the order"""
        lead = x.shape[:-6]
        x = x.reshape(*lead, *self.sizes)
        return x.permute(*range(len(lead)), *(len(lead) + d for d in self.order)).contiguous()

    def read(self, t: Tensor, tiles: tuple[int, ...]) -> Tensor:
        """The inverse of `stored`."""
        x = t.view(self.dtype).view(*tiles, *(self.sizes[d] for d in self.order))
        back = (len(tiles) + self.order.index(d) for d in range(len(self.order)))
        return x.permute(*range(len(tiles)), *back).reshape(*tiles, *TILE)


TILE = (8, 4, 4, 2, 2, 2)  # the sizes of r, c, v, j, h, i
NIBBLES = Nibbles()
# by the bits of a code; others have no order
USUAL: dict[int, CodeOrder] = {
    4: NIBBLES,
    8: Permuted(torch.uint8, (8, 4, 2, 2, 2, 2, 2), (2, 0, 1, 3, 5, 6, 4)),
    16: Permuted(torch.int16, TILE, (2, 0, 1, 4, 5, 3)),
}


@dataclass(frozen=True)
class Recoding:
    """A permutation of bytes: entry b is the new value of byte b. () changes nothing."""

    table: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Bytes [...] -> u8 [...]"""
        return _looked_up(self.table, x) if self.table else x

    def inverse(self, x: Tensor) -> Tensor:
        """The inverse of `forward`."""
        by_place = sorted(range(len(self.table)), key=self.table.__getitem__)
        return _looked_up(tuple(by_place), x) if self.table else x


UNCHANGED = Recoding()


def _looked_up(table: tuple[int, ...], x: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.uint8, device=x.device)[x.int()]
