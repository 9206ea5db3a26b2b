"""`sf128x4` is the order in which the tensor cores of compute capability 10.0 read block scales.
Rows are padded with zeros to a multiple of 128, columns to a multiple of 4. Each tile of 128 rows
and 4 columns becomes 512 consecutive elements, 32 runs of 16: row r of the tile is in run r % 32,
in its group of four r // 32; the column selects one of the four. The tiles follow each other from
left to right, then down:

    element (row r, column j)  ->  r//128 * 128*C  +  j//4 * 512  +  r%32 * 16  +  r%128//32 * 4
                                   +  j%4                                      C = padded columns

Here 33 rows of 2 columns, element (r, j) written as 10 * r + j, the first 24 of 512 stored
elements. Row 32 comes right after row 0 (both have r % 32 = 0), then the rows 64 and 96 of the
padding, then row 1:

>>> x = 10 * torch.arange(33)[:, None] + torch.arange(2)
>>> stored = SF128X4.forward(x)
>>> stored.shape
torch.Size([128, 4])
>>> stored.flatten()[:24].view(6, 4).tolist()
[[0, 1, 0, 0], [320, 321, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [10, 11, 0, 0], [0, 0, 0, 0]]
>>> torch.equal(SF128X4.inverse(stored, x.shape), x)
True

With `ends` the rows are in groups, and each group is padded and stored as a separate matrix, one
after the other:

>>> # 2 rows, none, 1 row; the rows from 3 on belong to no group
>>> ends = torch.tensor([2, 2, 3], dtype=torch.int32)
>>> grouped = SF128X4.forward(x, ends)
>>> # allocated by bound: 3 runs, whatever their lengths
>>> grouped.shape, grouped[[0, 128]].tolist()
(torch.Size([384, 4]), [[0, 1, 0, 0], [20, 21, 0, 0]])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from . import groups
from .layout import TensorLayout, as_bytes, check_stored


@dataclass(frozen=True)
class SF128x4(TensorLayout):
    """Block scales as compute capability 10.0 reads them;
    `torch.nn.functional.SwizzleType.SWIZZLE_32_4_4`. See the head of this file.
    """

    name: str = "sf128x4"
    rows: int = 128
    cols: int = 4

    def storage_shape(self, shape: tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
        """[..., R, C] -> [..., ceil128(R), ceil4(C)]; in `count` groups [M, C] -> [groups.bound(M,
        count, 128), ceil4(C)].
        """
        *lead, r, c = shape
        padded_rows = (
            groups.ceil_to(r, self.rows) if count is None else groups.bound(r, count, self.rows)
        )
        return (*lead, padded_rows, groups.ceil_to(c, self.cols))

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x [..., R, C] of any dtype -> [..., ceil128(R), ceil4(C)]; with ends i32 [G]: x [M, C] ->
        [bound(M, G, 128), ceil4(C)].

        Everything that holds no element of x is zero. With ends, each group starts at
        `groups.padded_starts(ends, 128)`; rows at or past the last end are left out. Sizes are not
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
        return _to_tiles(padded).view(x.dtype)

    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """[..., ceil128(R), ceil4(C)] -> x of `shape` [..., R, C]; with ends i32 [G]: [bound(M, G,
        128), ceil4(C)] -> [M, C].

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
        padded = _from_tiles(as_bytes(stored))
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
        shift = groups.padded_starts(ends, self.rows) - groups.starts(ends)
        shift = torch.nn.functional.pad(shift, (0, 1))  # group G: no group
        group = groups.row_groups(ends, rows)
        row = torch.arange(rows, device=ends.device)
        return torch.where(group < ends.shape[0], row + shift.index_select(0, group), nowhere)


SF128X4 = SF128x4()


def _to_tiles(x: Tensor) -> Tensor:
    """x [..., 128 a, 4 b] -> the same shape, its elements in tile order."""
    # [..., a, r//32, r%32, b, j%4] -> [..., a, b, r%32, r//32, j%4]
    return _exchanged(x, 4, 32, x.shape[-1] // 4)


def _from_tiles(x: Tensor) -> Tensor:
    """The inverse of `_to_tiles`."""
    return _exchanged(x, x.shape[-1] // 4, 32, 4)


def _exchanged(x: Tensor, *sizes: int) -> Tensor:
    """x as [..., a, *sizes, j%4], of whose three sizes the first and the last are exchanged; in the
    shape of x.
    """
    *lead, r, _ = x.shape
    fours = _fours(x)
    tiles = fours.view(*lead, r // 128, *sizes, fours.shape[-1]).transpose(-4, -2)
    return tiles.contiguous().view(x.dtype).view(x.shape)


def _fours(x: Tensor) -> Tensor:
    """x [..., 4 b] -> contiguous [..., b, 4]; for bytes int32 [..., b, 1], which moves four at once
    and is twelve times as fast.
    """
    x = x.contiguous()
    if x.element_size() > 1 or x.shape[-1] == 0:
        return x.view(*x.shape[:-1], x.shape[-1] // 4, 4)
    return (x if x.storage_offset() % 4 == 0 else x.clone()).view(torch.int32).unsqueeze(-1)


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
