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
    """unpacked: a part [..., N, packed K] -> one element each, [..., N, K]; packed: its inverse.

    stored: x [..., r, c, v, j, h, i] -> the tile's memory; read: its inverse, for the given tiles.
    """

    def unpacked(self, t: Tensor) -> Tensor: ...
    def packed(self, x: Tensor) -> Tensor: ...
    def stored(self, x: Tensor) -> Tensor: ...
    def read(self, t: Tensor, tiles: tuple[int, ...]) -> Tensor: ...


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
        return self.unpacked(t).view(*tiles, 8, 4, 4, 2, 2, 2)


class Bytes:
    """Codes of a byte."""

    def unpacked(self, t: Tensor) -> Tensor:
        """t"""
        return t.view(torch.uint8)

    def packed(self, x: Tensor) -> Tensor:
        """x"""
        return x

    def stored(self, x: Tensor) -> Tensor:
        """[..., r, c, v, j, h, i] -> [..., v // 2, r, c, v % 2, h, i, j]"""
        x, lead = x.unflatten(-4, (2, 2)), x.dim() - 6
        return x.permute(*range(lead), *(lead + d for d in (2, 0, 1, 3, 5, 6, 4))).contiguous()

    def read(self, t: Tensor, tiles: tuple[int, ...]) -> Tensor:
        """The inverse of `stored`."""
        x, lead = t.view(torch.uint8).view(*tiles, 2, 8, 4, 2, 2, 2, 2), len(tiles)
        x = x.permute(*range(lead), *(lead + d for d in (1, 2, 0, 3, 6, 4, 5)))
        return x.flatten(-5, -4)


class SixteenBits:
    """Numbers of 16 bits."""

    def unpacked(self, t: Tensor) -> Tensor:
        """t"""
        return t.view(torch.int16)

    def packed(self, x: Tensor) -> Tensor:
        """x"""
        return x

    def stored(self, x: Tensor) -> Tensor:
        """[..., r, c, v, j, h, i] -> [..., v, r, c, h, i, j]"""
        lead = x.dim() - 6
        return x.permute(*range(lead), *(lead + d for d in (2, 0, 1, 4, 5, 3))).contiguous()

    def read(self, t: Tensor, tiles: tuple[int, ...]) -> Tensor:
        """The inverse of `stored`."""
        lead = len(tiles)
        return (
            t.view(torch.int16)
            .view(*tiles, 4, 8, 4, 2, 2, 2)
            .permute(*range(lead), *(lead + d for d in (1, 2, 0, 5, 3, 4)))
        )


_USUAL: dict[int, CodeOrder] = {4: Nibbles(), 8: Bytes(), 16: SixteenBits()}


def usual_order(bits: int) -> CodeOrder | None:
    """The order of codes of so many bits; None if they have none."""
    return _USUAL.get(bits)


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
