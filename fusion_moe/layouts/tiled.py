"""Layouts that are described by orders: `Tiled`. Backends derive from a descriptor how they read
weights that are stored so, as they do from that of an encoding.

Whoever has scales in another order describes it, and registers the layout:

>>> pairs = Tiled("pairs", scales=Order(rows=(2,), columns=(2,), places=(1, 0)))
>>> x = torch.arange(6).view(2, 3)
>>> pairs.forward(x)  # whole tiles of 2 x 2, columns first
tensor([[0, 3, 1, 4],
        [2, 5, 0, 0]])
>>> torch.equal(pairs.inverse(pairs.forward(x), x.shape), x)
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..encodings import Encoding, Order
from ..errors import DtypeError, ShapeError
from . import groups
from .layout import TensorLayout, as_bytes, check_stored

PIECE = 16  # elements of a row that stay together
ROW_MAJOR = Order((), (), ())


@dataclass(frozen=True)
class Tiled(TensorLayout):
    """Block scales in an order, padded with zeros to whole tiles; elements in another one, in
    pieces of 16 that follow each other in a row, of whole tiles. None: as in the linear layout.
    """

    scales: Order = ROW_MAJOR
    elements: Order | None = None

    @property
    def rows(self) -> int:
        """To a multiple of which rows of scales are padded, those of each group by themselves."""
        return self.scales.tile[0]

    def why_not(self, n: Any, k: Any, encoding: Encoding) -> str:
        """Why a weight [N, K] in an encoding cannot be stored in this order; "" if it can."""
        if self.elements is None:
            return ""
        (rows, columns), element = self.elements.tile, encoding.element
        if element.bits > 8 or encoding.axis != -1:
            return f"{encoding.name} has no pieces of {PIECE} codes along K"
        if n % rows or k % (columns * PIECE):
            return f"N = {n} is not a multiple of {rows}, or K = {k} not of {columns * PIECE}"
        return ""

    def pack(
        self, *parts: Tensor, encoding: Encoding, ends: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Elements and block scales in their orders. ShapeError: see `why_not`."""
        elements, *scales = super().pack(*parts, encoding=encoding, ends=ends)
        return self._pieces(elements, encoding, back=False), *scales

    def unpack(
        self, *parts: Tensor, encoding: Encoding, ends: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The inverse of `pack`."""
        elements, *scales = super().unpack(*parts, encoding=encoding, ends=ends)
        return self._pieces(elements, encoding, back=True), *scales

    def _pieces(self, t: Tensor, encoding: Encoding, *, back: bool) -> Tensor:
        if self.elements is None:
            return t
        n, k = t.shape[-2], encoding.elements(t.shape[-1])
        if why := self.why_not(n, k, encoding):
            raise ShapeError(why, expected="whole tiles", todo="keep linear", where=self.name)
        move = self.elements.inverse if back else self.elements.forward
        pieces = as_bytes(t).unflatten(-1, (k // PIECE, -1))
        return move(pieces, items=1).view(t.shape).view(t.dtype)

    def storage_shape(self, shape: tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
        """[..., R, C] of scales -> the same in whole tiles; in `count` groups [M, C] ->
        [groups.bound(M, count, rows of a tile), C in whole tiles].
        """
        *lead, r, c = shape
        rows, columns = self.scales.tile
        padded_rows = groups.ceil_to(r, rows) if count is None else groups.bound(r, count, rows)
        return (*lead, padded_rows, groups.ceil_to(c, columns))

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x [..., R, C] of any dtype -> `storage_shape`; with ends i32 [G]: x [M, C] in groups,
        each of which is padded and stored as a separate matrix, one after the other.

        Everything that holds no element of x is zero. With ends, each group starts at
        `groups.padded_starts(ends, rows)`; rows at or past the last end are left out. Sizes are not
        read, so nothing waits for the device; `groups.clamp_ends` makes invalid ends safe.
        ShapeError, DtypeError: x or ends has the wrong rank or dtype.
        """
        _check_rank(x.shape, ends, self.name)
        shape = self.storage_shape(tuple(x.shape), None if ends is None else ends.shape[0])
        data = as_bytes(x)
        if ends is None:
            padded = torch.nn.functional.pad(
                data, (0, shape[-1] - x.shape[-1], 0, shape[-2] - x.shape[-2])
            )
        else:
            # the last row takes the rows that belong to no group
            room = data.new_zeros(shape[0] + 1, shape[1])
            room[:, : x.shape[1]].index_copy_(
                0, self._stored_rows(ends, x.shape[0], shape[0]), data
            )
            padded = room[:-1]
        return self.scales.forward(padded).view(x.dtype)

    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """What `forward` returns -> x of `shape` [..., R, C]; with ends i32 [G] -> [M, C].

        Padding is not read: it may be NaN or uninitialized. Rows that belong to no group are zero.
        ShapeError: the shape of `stored` is not `storage_shape(shape)`.
        """
        _check_rank(shape, ends, self.name)
        *_, r, c = shape
        check_stored(
            stored,
            self.storage_shape(tuple(shape), None if ends is None else ends.shape[0]),
            self.name,
        )
        padded = self.scales.inverse(as_bytes(stored))
        if ends is None:
            return padded[..., :r, :c].contiguous().view(stored.dtype)
        source = self._stored_rows(ends, r, stored.shape[0])
        grouped = torch.cat([padded[:, :c], padded.new_zeros(1, c)]).index_select(0, source)
        return grouped.view(stored.dtype)

    def _stored_rows(self, ends: Tensor, rows: int, nowhere: int) -> Tensor:
        """ends i32 [G] -> i64 [rows]: the position of each row among the padded ones; `nowhere` for
        rows that belong to no group.
        """
        ends = groups.clamp_ends(ends, rows)
        return groups.places(ends, rows, groups.padded_starts(ends, self.rows), nowhere)


def _check_rank(shape: tuple[int, ...], ends: Tensor | None, where: str) -> None:
    if ends is None:
        if len(shape) < 2:
            raise ShapeError(
                f"x is {list(shape)}", expected="[..., R, C], at least two dimensions", where=where
            )
        return
    if len(shape) != 2:
        raise ShapeError(
            f"x is {list(shape)} with group ends",
            expected="[M, C]",
            todo="flatten the leading dimensions into rows",
            where=where,
        )
    if ends.dim() != 1:
        raise ShapeError(
            f"ends is {list(ends.shape)}", expected="[G], one end for each group", where=where
        )
    if ends.dtype != torch.int32:
        raise DtypeError(
            f"ends is {ends.dtype}",
            expected="torch.int32",
            todo="ends.to(torch.int32)",
            where=where,
        )
