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

>>> import torch
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

from ..encodings import Order
from .tiled import Tiled

_ORDER = Order(rows=(4, 32), columns=(4,), places=(1, 0, 2))


@dataclass(frozen=True)
class SF128x4(Tiled):
    """Block scales as compute capability 10.0 reads them;
    `torch.nn.functional.SwizzleType.SWIZZLE_32_4_4`. See the head of this file.
    """

    name: str = "sf128x4"
    scales: Order = _ORDER


SF128X4 = SF128x4()
