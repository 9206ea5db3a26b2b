"""How the elements of a tile of `w16x64` lie in its bytes, by element type. x is [..., r, c, v, j,
h, i], as defined in w16x64.py.

e2m1: code (r, c, v, j, h, i) -> byte 64 r + 16 c + 4 v + 2 j and the next one. These two bytes, low
byte first, are half j of a 32-bit word and hold four codes, each as a sign s and a magnitude abc.
Codes with h = 0, i = 0 lie where bfloat16 has its sign and lowest exponent bits, so that a single
`and` makes a pair of numbers from a word. Those with h = 0, i = 1 lie six bits lower. Those with h
= 1, i = 0 lie twelve bits lower, in a word that is rotated, so that each half has the magnitudes of
the other. Those with h = 1, i = 1 are in two pieces in the remaining bits, which two shifts move
into place. (Four whole codes at four distances from their places would not fit in sixteen bits.)

    bit    15     14     13     12-10        9      8-6      5      4      3      2-0
           s 00   a 11   s 11   abc 10 *     s 01   abc 00   b 11   c 11   s 10   abc 01      (s 10:
               of h = 1, i = 0; *: of the other half)

int4: code (r, c, v, j, h, i) -> byte 64 r + 16 c + 4 v + 2 j + h, the low nibble for i = 0. A
single `and` makes a pair of numbers from a word or a shifted word.

16 bits: element (r, c, v, j, h, i) -> byte 512 v + 64 r + 16 c + 8 h + 4 i + 2 j: step v of a lane
is 16 bytes.
"""

from __future__ import annotations

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


class SignsAndSizes(Nibbles):
    """Codes with a sign and a magnitude, which go to different places."""

    def stored(self, x: Tensor) -> Tensor:
        """u8 codes [..., r, c, v, j, h, i] -> u8 [..., r, c, v, j, 2]"""
        code = x.int()
        sign, size = code >> 3, code & 7
        last, rotated = size[..., 1, 1], size[..., 1, 0].flip(-1)
        half = (
            sign[..., 0, 0] << 15
            | sign[..., 0, 1] << 9
            | sign[..., 1, 0] << 3
            | sign[..., 1, 1] << 13
        )
        half |= (
            size[..., 0, 0] << 6
            | size[..., 0, 1]
            | rotated << 10
            | (last >> 2) << 14
            | (last & 3) << 4
        )
        return torch.stack([half & 0xFF, half >> 8], -1).to(torch.uint8)

    def read(self, t: Tensor, tiles: tuple[int, ...]) -> Tensor:
        """The inverse of `stored`."""
        low, high = t.view(*tiles, 8, 4, 4, 2, 2).int().unbind(-1)
        half = low | high << 8
        code = half.new_empty(*half.shape, 2, 2)
        code[..., 0, 0] = (half >> 15) << 3 | half >> 6 & 7
        code[..., 0, 1] = (half >> 9 & 1) << 3 | half & 7
        code[..., 1, 0] = (half >> 3 & 1) << 3 | half.flip(-1) >> 10 & 7
        code[..., 1, 1] = (half >> 13 & 1) << 3 | (half >> 14 & 1) << 2 | half >> 4 & 3
        return code.to(torch.uint8)


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


# by element
CODE_ORDERS: dict[str, CodeOrder] = {
    "e2m1": SignsAndSizes(),
    "int4": Nibbles(),
    "bf16": SixteenBits(),
    "f16": SixteenBits(),
}
