"""Rows of groups in an encoding with blocks along rows: blocks start at each group's first row, and
a group's last block may be short.

    codes        [M/g, K]
    block_scale  [ceil(M/32) + G, K]     of each block's columns; groups.block_slots says which
                                         block a row is in

The numbers are the same as for every group by itself, padded with zero rows. Rows past the last end
are zeros.
"""

from __future__ import annotations

import torch

from ...encodings import Encoding, Part, Quantized, quantize
from ...layouts import as_bytes
from ...layouts.groups import block_count, block_slots
from ..sizes import AnySize, ceildiv
from ..types import Dim, Rows

IN_TILES = 32  # columns that `transpose_row_blocks` puts into another order


def part_shape(encoding: Encoding, part: Part, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape of a part of a value [..., N, K]."""
    *lead, n, k = shape
    if in_runs(encoding, shape) and part.scale is not None:
        assert isinstance(n, Rows)
        blocks: AnySize = ceildiv(n.total, part.scale.block) + n.groups.count
        return (blocks, k)
    return encoding.part_shape(part, lead, n, k)  # type: ignore[arg-type]


def in_runs(encoding: Encoding, shape: tuple[Dim, ...]) -> bool:
    """Whether the blocks of a value of this shape lie along rows of groups."""
    return encoding.axis == -2 and isinstance(shape[-2], Rows)


def quantize_runs(x: torch.Tensor, ends: torch.Tensor, encoding: Encoding) -> Quantized:
    """x float[M, K], ends i32[G] -> codes [M, K], block_scale [ceil(M/32) + G, K]. Nothing waits
    for the device.
    """
    count, slots = _blocks(x.shape[0], ends, encoding)
    inside = slots < count * encoding.block
    padded = x.new_zeros((count + 1) * encoding.block, x.shape[1])
    padded.index_copy_(0, slots, torch.where(inside[:, None], x, 0))
    codes, scales = quantize(padded, encoding)
    return Quantized(rows_at(codes, slots), scales[:count], encoding=encoding)


def dequantize_runs(q: Quantized, ends: torch.Tensor) -> torch.Tensor:
    """codes [M, K], block_scale [ceil(M/32) + G, K], ends i32[G] -> f32[M, K]"""
    codes, scales = q
    count, slots = _blocks(codes.shape[0], ends, q.encoding)
    block = slots // q.encoding.block
    numbers = codes.float() * rows_at(scales, block.clamp(max=count - 1)).float()
    return torch.where((block < count)[:, None], numbers, 0)


def transpose_row_blocks(
    codes: torch.Tensor, ends: torch.Tensor, encoding: Encoding
) -> torch.Tensor:
    """codes [M, K], ends i32[G] -> [ceil(M/128) + G, K, 128], zeros where a block has no row;
    columns as `_in_tiles` has them.
    """
    block, k = encoding.block, codes.shape[1]
    count, slots = _blocks(codes.shape[0], ends, encoding)
    padded = as_bytes(codes).new_zeros((count + 1) * block, k)
    padded.index_copy_(0, slots, as_bytes(codes))
    turned = padded[: count * block].view(count, block, k).mT
    return _in_tiles(turned).contiguous().view(codes.dtype)


def untranspose_row_blocks(
    turned: torch.Tensor, ends: torch.Tensor, rows: int, encoding: Encoding
) -> torch.Tensor:
    """What `transpose_row_blocks` was given; zeros past the last end."""
    _, slots = _blocks(rows, ends, encoding)
    codes = _in_tiles(as_bytes(turned)).mT.flatten(0, 1)
    padded = torch.nn.functional.pad(codes, (0, 0, 0, 1))
    return padded.index_select(0, slots).view(turned.dtype)


def _in_tiles(turned: torch.Tensor) -> torch.Tensor:
    """[blocks, K, 128], K a multiple of 32 -> each 32 columns in the order in which the threads of
    a tensor core hold sums: pairs 0, 4, 8, 12, 1, 5, ... The same again restores them.
    """
    return turned.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1, 4)


def _blocks(rows: int, ends: torch.Tensor, encoding: Encoding) -> tuple[int, torch.Tensor]:
    return block_count(rows, len(ends), encoding.block), block_slots(ends, rows, encoding.block)


def rows_at(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rows of t, viewed as bytes if needed: torch cannot index other 8-bit dtypes."""
    return as_bytes(t).index_select(0, at).view(t.dtype)
