"""Orders of items in memory as data: what a layout does with the block scales of a weight, or with
its elements, alone or sixteen of a row at a time; and how codes and the bytes of scales lie in the
tiles of `w16x64` (layouts/w16x64.py). A format states its own where it differs from the usual one.

Items [R, C] are cut into tiles, which follow each other from left to right, then down. The numbers
of a row and of a column within its tile are spelled in digits, and `places` says in which order
these count, the slowest first. `sf128x4` has tiles of 128 rows, spelled 32 d0 + d1, and of 4
columns, and d1 counts slowest:

>>> sf128x4 = Order(rows=(4, 32), columns=(4,), places=(1, 0, 2))
>>> sf128x4.tile, sf128x4.run
((128, 4), 4)
>>> [sf128x4.place(r, c, 4) for r, c in ((0, 0), (0, 3), (1, 0), (32, 0), (127, 3), (128, 0))]
[0, 3, 16, 4, 511, 512]
>>> x = torch.arange(128 * 4).view(128, 4)
>>> stored = sf128x4.forward(x)
>>> stored.flatten()[sf128x4.place(33, 2, 4)] == x[33, 2], torch.equal(sf128x4.inverse(stored), x)
(tensor(True), True)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..errors import ShapeError

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes that move at once


@dataclass(frozen=True)
class Order:
    """rows, columns: the sizes of the digits of a row's and of a column's number in a tile, the
    most significant first. places: the digits, the rows' first, from the slowest to the fastest.

    ShapeError unless `places` names each digit once.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = (*self.rows, *self.columns)
        if min(sizes, default=1) < 1 or sorted(self.places) != [*range(len(sizes))]:
            raise ShapeError(
                f"places {self.places} of digits {self.rows} and {self.columns}",
                expected=f"positive sizes, and each of 0 to {len(sizes) - 1} once",
            )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of one tile."""
        return prod(self.rows), prod(self.columns)

    @property
    def run(self) -> int:
        """How many columns that follow each other do so in memory, from a multiple of it on."""
        last = len(self.rows) + len(self.columns) - 1
        return self.columns[-1] if self.columns and self.places[-1] == last else 1

    def digits(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Of rows and of columns: (divisor, size, stride), of which a number x has the digit
        x / divisor % size, which counts `stride` items.
        """
        sizes, count = (*self.rows, *self.columns), len(self.rows)
        strides = dict[int, int]()
        for place in reversed(self.places):
            strides[place] = prod(sizes[p] for p in strides)
        results = [
            (prod(sizes[i + 1 : count if i < count else None]), size, strides[i])
            for i, size in enumerate(sizes)
        ]
        return results[:count], results[count:]

    def place(self, r: int, c: int, columns: int) -> int:
        """Where item (r, c) of a matrix of so many columns lies, a multiple of a tile's."""
        (rows, width), of = self.tile, zip(self.digits(), (r, c), strict=True)
        inside = sum(
            x // below % size * stride for digits, x in of for below, size, stride in digits
        )
        return r // rows * rows * columns + c // width * rows * width + inside

    def forward(self, x: Tensor, *, items: int = 0) -> Tensor:
        """x [..., R, C] of whole tiles, followed by as many dimensions of an item -> the same shape
        in this order.
        """
        return self._moved(x, items, back=False)

    def inverse(self, stored: Tensor, *, items: int = 0) -> Tensor:
        """The inverse of `forward`."""
        return self._moved(stored, items, back=True)

    def _moved(self, x: Tensor, items: int, *, back: bool) -> Tensor:
        if self.run > 1 and not items and x.element_size() * self.run in _WORDS and x.numel():
            words, shape = _as_words(x, _WORDS[x.element_size() * self.run]), x.shape
            whole = Order(self.rows, (*self.columns[:-1], 1), self.places)
            return whole._moved(words, 0, back=back).view(x.dtype).view(shape)
        end = x.dim() - items
        lead, (r, c), item = x.shape[: end - 2], x.shape[end - 2 : end], x.shape[end:]
        (rows, columns), first = self.tile, len(lead)
        sizes = [r // rows, *self.rows, c // columns, *self.columns]
        # in memory: the tile's row and column, then its digits
        split = len(self.rows)
        order = [0, split + 1, *(p + 1 + (p >= split) for p in self.places)]
        axes = [order.index(i) for i in range(len(order))] if back else order
        inputs = [sizes[i] for i in order] if back else sizes
        moved = x.contiguous().view(*lead, *inputs, *item)
        dims = (*range(first), *(first + a for a in axes), *range(moved.dim() - items, moved.dim()))
        return moved.permute(dims).contiguous().view(x.shape)


def _as_words(x: Tensor, word: torch.dtype) -> Tensor:
    x = x.contiguous()
    aligned = x.storage_offset() * x.element_size() % word.itemsize == 0
    return (x if aligned else x.clone()).view(word)


# Codes --------------------------------------------------------------------------------------------

# The digits of a row of a tile are i r, those of a column c h v j, as layouts/w16x64.py has them.


@dataclass(frozen=True)
class CodeOrder:
    """How a part's elements are packed along K, and lie in the memory of a tile. dtype: as which
    they are moved; order: of a tile's elements.
    """

    dtype: torch.dtype
    order: Order

    def unpacked(self, t: Tensor) -> Tensor:
        """A part [..., N, packed K] -> one element each, [..., N, K]."""
        return t.view(self.dtype)

    def packed(self, x: Tensor) -> Tensor:
        """The inverse of `unpacked`."""
        return x

    def forward(self, t: Tensor) -> Tensor:
        """A part [..., N, packed K] in linear order -> in that of tiles."""
        return self.stored(self.order.forward(self.unpacked(t)))

    def inverse(self, t: Tensor) -> Tensor:
        """The inverse of `forward`."""
        return self.packed(self.order.inverse(self.read(t)))

    def stored(self, x: Tensor) -> Tensor:
        """Elements [..., K] that follow each other in a tile -> its memory."""
        return self.packed(x)

    def read(self, t: Tensor) -> Tensor:
        """The inverse of `stored`."""
        return self.unpacked(t)


@dataclass(frozen=True)
class Nibbles(CodeOrder):
    """Two codes a byte: the even k is in the low nibble."""

    # byte 64 r + 16 c + 4 v + 2 j + h, the low nibble for i = 0: a single `and` makes a pair of
    # numbers from a word or a shifted word
    dtype: torch.dtype = torch.uint8
    order: Order = Order((2, 8), (4, 2, 4, 2), (1, 2, 4, 5, 3, 0))

    def unpacked(self, t: Tensor) -> Tensor:
        """u8 [..., N, K/2] -> u8 [..., N, K]"""
        return torch.stack([t & 15, t >> 4], -1).flatten(-2)

    def packed(self, x: Tensor) -> Tensor:
        """u8 [..., N, K] -> u8 [..., N, K/2]"""
        return x[..., 0::2] | x[..., 1::2] << 4


NIBBLES = Nibbles()
# by the bits of a code; others have no order
USUAL: dict[int, CodeOrder] = {
    4: NIBBLES,
    # v = 2 v1 + v0, byte 512 v1 + 64 r + 16 c + 8 v0 + 4 h + 2 i + j: a word has two pairs of
    # numbers of a step of a lane
    8: CodeOrder(torch.uint8, Order((2, 8), (4, 2, 2, 2, 2), (4, 1, 2, 5, 3, 0, 6))),
    # byte 512 v + 64 r + 16 c + 8 h + 4 i + 2 j: step v of a lane is 16 bytes
    16: CodeOrder(torch.int16, Order((2, 8), (4, 2, 4, 2), (4, 1, 2, 3, 0, 5))),
}


# Scales -------------------------------------------------------------------------------------------


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
