"""Layouts: the same numbers in another order of bytes, as objects with an inverse. A layout never changes meaning.

`sf128x4` is the order in which the tensor cores of compute capability 10.0 read block scales. Rows are padded to a multiple of
128, columns to a multiple of 4, with zeros. Each tile of 128 rows and 4 columns becomes 512 consecutive elements: row r of the tile
is cut into r % 32 (which 16 of them) and r // 32 (which 4 of those 16), and the column picks among the 4. The tiles of 128 rows
follow each other from left to right, then down:

    element (row r, column j)  ->  r//128 * 128*C  +  j//4 * 512  +  r%32 * 16  +  r%128//32 * 4  +  j%4        C = padded columns

Here 33 rows of 2 columns, element (r, j) written as 10 * r + j, the first 24 of 512 stored elements. Row 32 comes right after row 0
(both have r % 32 = 0), then the rows 64 and 96 of the padding, then row 1:

>>> x = 10 * torch.arange(33)[:, None] + torch.arange(2)
>>> stored = SF128X4.forward(x)
>>> stored.shape, stored.flatten()[:24].view(6, 4).tolist()
(torch.Size([128, 4]), [[0, 1, 0, 0], [320, 321, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [10, 11, 0, 0], [0, 0, 0, 0]])
>>> torch.equal(SF128X4.inverse(stored, x.shape), x)
True

With `ends` the rows are cut into groups, and each group is padded and stored as a matrix of its own, one after the other:

>>> ends = torch.tensor([2, 2, 3], dtype=torch.int32)               # 2 rows, none, 1 row; the rows from 3 on belong to no group
>>> grouped = SF128X4.forward(x, ends)
>>> grouped.shape, grouped[[0, 128]].tolist()                       # allocated by bound: 3 runs, whatever their lengths
(torch.Size([384, 4]), [[0, 1, 0, 0], [20, 21, 0, 0]])

`w16x64` is the order in which the CUDA kernels read NVFP4 weights, codes and block scales: a warp's lane loads 16 consecutive bytes, and
what it then holds are operands of mma.sync. Matrices are cut into tiles of 16 rows and 64 columns, from left to right, then down; a tile
is 512 bytes of codes, and elsewhere 64 of scales. Lane 4 r + c has of the rows r and r + 8 the 16 codes of block c, and the two scales:

    scale (row r + 8 i, block c of the tile)  ->  byte  8 r + 2 c + i                                            r < 8, c < 4, i < 2
    code  (row r + 8 i, column 16 c + 8 h + 2 v + j)  ->  byte  64 r + 16 c + 4 v + 2 j and the one after it     v < 4, h < 2, j < 2

These two bytes, low byte first, are the half j of a word, and have four codes, each as sign s and size abc. Those of h = 0, i = 0 stand
where bfloat16 has its sign and lowest exponent bits, so that one `and` makes a pair of numbers of a word; those of h = 0, i = 1 do six
places lower; those of h = 1, i = 0 twelve, in a word that is turned: each half has the sizes of the other; those of h = 1, i = 1 are two
pieces in what is left, which two shifts put there. (Whole codes at four distances from their place cannot fill sixteen bits.)

    bit    15     14     13     12-10        9      8-6      5      4      3      2-0
           s 00   a 11   s 11   abc 10 *     s 01   abc 00   b 11   c 11   s 10   abc 01      (s 10: of h = 1, i = 0; *: of the other half)

>>> codes = torch.zeros(16, 32, dtype=torch.uint8)
>>> codes[0, 4] = 0x0F                                       # row 0, column 8 is -6: h = 1, i = 0, j = 0; all other codes are 0
>>> scale = torch.arange(0x30, 0x70, dtype=torch.uint8).view(16, 4)
>>> stored, stored_scale = W16X64.pack(codes, scale)
>>> stored.flatten()[:4].tolist(), hex(0x1C000008)           # bit 3 of half 0, bits 12-10 of half 1
([8, 0, 0, 28], '0x1c000008')

Scales are stored as numbers without a sign, five bits of exponent and three of mantissa: the tensor cores' bfloat16 is one multiplication
and one addition away, and the subnormal numbers of e4m3 are as the others. 2^e (1 + m/8) is byte 8 (e + 23) + m, which for all but
subnormal scales is 0x80 more than before. Zero stays byte 0, which kernels read as 2^-23: 2^-32 of the largest scale. The bytes of
negative scales and NaN, which NVFP4 has no use for, take the places that are left; kernels read them as some other number.

>>> (stored_scale - 0x80).view(8, 4, 2)[0].tolist()          # rows 0 and 8, which begin with 0x30 and 0x50
[[48, 80], [49, 81], [50, 82], [51, 83]]
>>> [torch.equal(a, b) for a, b in zip(W16X64.unpack(stored, stored_scale), (codes, scale))]
[True, True]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_moe import groups
from fusion_moe.errors import DtypeError, ShapeError


@dataclass(frozen=True)
class Layout(ABC):
    """An order of elements in memory. `inverse(forward(x, ends), x.shape, ends)` is x, but for rows that belong to no group."""

    name: str

    @abstractmethod
    def storage_shape(self, shape: tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
        """The shape of what `forward` returns for x of `shape`, its rows cut into `count` groups (None: not cut). Sizes: int or SymInt."""

    @abstractmethod
    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x [..., R, C] in row-major order -> the same elements in this order; with ends i32 [G] x is [M, C], its rows cut into groups."""

    @abstractmethod
    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """What `forward` returned -> x of `shape` in row-major order; rows that belong to no group are zero."""


@dataclass(frozen=True)
class Linear(Layout):
    """Row-major order: nothing moves."""

    name: str = "linear"

    def storage_shape(self, shape: tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
        """`shape`."""
        return tuple(shape)

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x itself."""
        return x

    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """stored itself. ShapeError when its shape is another."""
        _check_stored(stored, tuple(shape), self.name)
        return stored


@dataclass(frozen=True)
class SF128x4(Layout):
    """Block scales as compute capability 10.0 reads them; `torch.nn.functional.SwizzleType.SWIZZLE_32_4_4`. See the head of this file."""

    name: str = "sf128x4"
    rows: int = 128
    cols: int = 4

    def storage_shape(self, shape: tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
        """[..., R, C] -> [..., ceil128(R), ceil4(C)]; in `count` groups [M, C] -> [groups.bound(M, count, 128), ceil4(C)]."""
        *lead, r, c = shape
        padded_rows = groups.ceil_to(r, self.rows) if count is None else groups.bound(r, count, self.rows)
        return (*lead, padded_rows, groups.ceil_to(c, self.cols))

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x [..., R, C] of any dtype -> [..., ceil128(R), ceil4(C)]; with ends i32 [G]: x [M, C] -> [bound(M, G, 128), ceil4(C)].

        All that holds no element of x is zero. With ends, each group starts at `groups.padded_starts(ends, 128)`; rows at or past the
        last end are left out; the sizes are not read, so nothing waits for the device; bad ends are made safe by `groups.clamp_ends`.
        ShapeError, DtypeError: x or ends of the wrong rank or type.
        """
        _check_rank(x.shape, ends, self.name)
        shape, data = self.storage_shape(tuple(x.shape), None if ends is None else ends.shape[0]), _bytes(x)
        if ends is None:
            padded = torch.nn.functional.pad(data, (0, shape[-1] - x.shape[-1], 0, shape[-2] - x.shape[-2]))
        else:
            room = data.new_zeros(shape[0] + 1, shape[1])  # the last row takes the rows that belong to no group
            room[:, : x.shape[1]].index_copy_(0, self._stored_rows(ends, x.shape[0], shape[0]), data)
            padded = room[:-1]
        return self._to_tiles(padded).view(x.dtype)

    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """[..., ceil128(R), ceil4(C)] -> x of `shape` [..., R, C]; with ends i32 [G]: [bound(M, G, 128), ceil4(C)] -> [M, C].

        Padding is not read: it may be NaN or never written. Rows that belong to no group are zero.
        ShapeError: `stored` is not of `storage_shape(shape)`.
        """
        _check_rank(shape, ends, self.name)
        *_, r, c = shape
        _check_stored(stored, self.storage_shape(tuple(shape), None if ends is None else ends.shape[0]), self.name)
        padded = self._from_tiles(_bytes(stored))
        if ends is None:
            return padded[..., :r, :c].contiguous().view(stored.dtype)
        source = self._stored_rows(ends, r, stored.shape[0])
        grouped = torch.cat([padded[:, :c], padded.new_zeros(1, c)]).index_select(0, source)
        return grouped.view(stored.dtype)

    def _stored_rows(self, ends: Tensor, rows: int, nowhere: int) -> Tensor:
        """ends i32 [G] -> i64 [rows]: where each row goes among the padded ones; `nowhere` for rows that belong to no group."""
        ends = groups.clamp_ends(ends, rows)
        shift = groups.padded_starts(ends, self.rows) - groups.starts(ends)
        shift = torch.nn.functional.pad(shift, (0, 1))  # group G: no group
        group = groups.row_groups(ends, rows)
        row = torch.arange(rows, device=ends.device)
        return torch.where(group < ends.shape[0], row + shift.index_select(0, group), nowhere)

    def _to_tiles(self, x: Tensor) -> Tensor:
        """x [..., 128 a, 4 b] -> the same shape, its elements in tile order."""
        *lead, r, c = x.shape
        fours = _fours(x)
        tiles = fours.view(*lead, r // 128, 4, 32, c // 4, fours.shape[-1])  # [..., a, r//32, r%32, b, j%4]
        return _of_fours(tiles.transpose(-4, -2), x)  # [..., a, b, r%32, r//32, j%4]

    def _from_tiles(self, x: Tensor) -> Tensor:
        """The inverse of `_to_tiles`."""
        *lead, r, c = x.shape
        fours = _fours(x)
        tiles = fours.view(*lead, r // 128, c // 4, 32, 4, fours.shape[-1])  # [..., a, b, r%32, r//32, j%4]
        return _of_fours(tiles.transpose(-4, -2), x)  # [..., a, r//32, r%32, b, j%4]


@dataclass(frozen=True)
class W16x64(Layout):
    """NVFP4 weights as CUDA kernels read them, codes and block scales. See the head of this file.

    `forward` and `inverse` are about block scales [..., N, K/16]; `pack` and `unpack` about codes too. N is a multiple of 16, K of 64.
    """

    name: str = "w16x64"
    rows: int = 16
    blocks: int = 4  # of 16 columns, in a tile

    def why_not(self, n: int, k: int) -> str:
        """Why a matrix [N, K] has no such order; "" if it has."""
        return "" if n % self.rows == 0 and k % 64 == 0 else f"N = {n} is no multiple of 16, or K = {k} of 64"

    def storage_shape(self, shape: tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
        """`shape`, [..., N, K/16]. ShapeError for sizes that are not in whole tiles."""
        *_, n, blocks = shape
        if why := self.why_not(n, 16 * blocks):
            raise ShapeError(why, expected="whole tiles of 16 rows and 64 columns", todo="keep the linear layout", where=self.name)
        return tuple(shape)

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """Block scales e4m3 (or their bytes) [..., N, K/16] -> the same bytes recoded, in tile order."""
        *lead, n, blocks = self.storage_shape(tuple(x.shape))
        tiles = _bytes(x).view(*lead, n // 16, 2, 8, blocks // 4, 4)  # i r . c
        return _E5M3.to(x.device)[_moved(tiles, (0, 3, 2, 4, 1)).int()].view(x.dtype).view(x.shape)

    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """What `forward` returned -> block scales e4m3 [..., N, K/16]."""
        *lead, n, blocks = self.storage_shape(tuple(shape))
        _check_stored(stored, tuple(shape), self.name)
        tiles = _bytes(stored).view(*lead, n // 16, blocks // 4, 8, 4, 2)
        return _E4M3.to(stored.device)[_moved(tiles, (0, 4, 2, 1, 3)).int()].view(stored.dtype).view(stored.shape)

    def pack(self, codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
        """codes u8 [..., N, K/2], block_scale [..., N, K/16] in linear order -> the same bytes in this one."""
        *lead, n, blocks = self.storage_shape(tuple(block_scale.shape))
        both = torch.stack([codes & 15, codes >> 4], -1)
        code = both.view(*lead, n // 16, 2, 8, blocks // 4, 4, 2, 4, 2)  # i r . c h v j
        code = _moved(code, (0, 3, 2, 4, 6, 7, 5, 1)).int()  # . r c v j h i
        sign, size = code >> 3, code & 7
        last, turned = size[..., 1, 1], size[..., 1, 0].flip(-1)
        half = sign[..., 0, 0] << 15 | sign[..., 0, 1] << 9 | sign[..., 1, 0] << 3 | sign[..., 1, 1] << 13
        half |= size[..., 0, 0] << 6 | size[..., 0, 1] | turned << 10 | (last >> 2) << 14 | (last & 3) << 4
        stored = torch.stack([half & 0xFF, half >> 8], -1).to(torch.uint8)
        return stored.view(codes.shape), self.forward(block_scale)

    def unpack(self, codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`."""
        *lead, n, blocks = self.storage_shape(tuple(block_scale.shape))
        low, high = codes.view(*lead, n // 16, blocks // 4, 8, 4, 4, 2, 2).int().unbind(-1)  # . . r c v j
        half = low | high << 8
        code = half.new_empty(*half.shape, 2, 2)
        code[..., 0, 0] = (half >> 15) << 3 | half >> 6 & 7
        code[..., 0, 1] = (half >> 9 & 1) << 3 | half & 7
        code[..., 1, 0] = (half >> 3 & 1) << 3 | half.flip(-1) >> 10 & 7
        code[..., 1, 1] = (half >> 13 & 1) << 3 | (half >> 14 & 1) << 2 | half >> 4 & 3
        both = _moved(code.to(torch.uint8), (0, 7, 2, 1, 3, 6, 4, 5)).view(*lead, n, 8 * blocks, 2)
        return both[..., 0] | both[..., 1] << 4, self.inverse(block_scale, tuple(block_scale.shape))


def _moved(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x with its last dimensions in another order, in one piece."""
    lead = x.dim() - len(order)
    return x.permute(*range(lead), *(lead + d for d in order)).contiguous()


def _e5m3() -> Tensor:
    """u8 [256]: the stored byte of each e4m3 byte."""
    table = torch.zeros(256, dtype=torch.uint8)
    number = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    mantissa, exponent = torch.frexp(number)  # of [0.5, 1)
    table[1:127] = ((exponent + 22) * 8 + (mantissa * 16 - 8)).to(torch.uint8)
    unused = torch.ones(256, dtype=torch.bool).index_fill_(0, table[:127].long(), False)
    table[127:] = unused.nonzero().flatten().to(torch.uint8)
    return table


_E5M3 = _e5m3()
_E4M3 = _E5M3.argsort().to(torch.uint8)
LINEAR, SF128X4, W16X64 = Linear(), SF128x4(), W16x64()
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (LINEAR, SF128X4, W16X64)}


def _bytes(x: Tensor) -> Tensor:
    """x as a dtype that every operation takes: fp8 and fp4 as uint8, all else as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _fours(x: Tensor) -> Tensor:
    """x [..., 4 b] -> contiguous [..., b, 4]; of bytes int32 [..., b, 1], which moves four at once, twelve times as fast."""
    x = x.contiguous()
    if x.element_size() > 1 or x.shape[-1] == 0:
        return x.view(*x.shape[:-1], x.shape[-1] // 4, 4)
    return (x if x.storage_offset() % 4 == 0 else x.clone()).view(torch.int32).unsqueeze(-1)


def _of_fours(fours: Tensor, x: Tensor) -> Tensor:
    """What `_fours` made of x, in any order -> the same elements in that order, with the shape and dtype of x."""
    return fours.contiguous().view(x.dtype).view(x.shape)


def _check_rank(shape: tuple[int, ...], ends: Tensor | None, where: str) -> None:
    if ends is None:
        if len(shape) < 2:
            raise ShapeError(f"x is {list(shape)}", expected="[..., R, C], at least two dimensions", where=where)
        return
    if len(shape) != 2:
        raise ShapeError(
            f"x is {list(shape)} with group ends", expected="[M, C]", todo="flatten the leading dimensions into rows", where=where
        )
    if ends.dim() != 1:
        raise ShapeError(f"ends is {list(ends.shape)}", expected="[G], one end for each group", where=where)
    if ends.dtype != torch.int32:
        raise DtypeError(f"ends is {ends.dtype}", expected="torch.int32", todo="ends.to(torch.int32)", where=where)


def _check_stored(stored: Tensor, want: tuple[int, ...], where: str) -> None:
    if tuple(stored.shape) != want:
        raise ShapeError(
            f"stored is {list(stored.shape)}",
            expected=f"{list(want)}, what forward makes of the shape asked for",
            todo="pass the shape and the ends that forward was given",
            where=where,
        )
