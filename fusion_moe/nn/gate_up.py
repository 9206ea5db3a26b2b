"""The order of the gate and up rows of a projection: in halves, or in blocks that alternate."""

from __future__ import annotations

from torch import Tensor

from ..errors import ShapeError


def interleave(rows: Tensor, size: int, dim: int = 0) -> Tensor:
    """Blocks of gate rows and of linear rows, interleaved.

    Args:
        rows: a weight or bias, its gate rows before its linear rows along `dim`.
        size: the number of rows of a block.
        dim: the dimension of 2H rows.

    Returns:
        The same rows; along `dim`, blocks of `size` gate and `size` linear rows alternate.
    """
    return _reordered(rows, size, dim, (2, -1, size))


def deinterleave(rows: Tensor, size: int, dim: int = 0) -> Tensor:
    """The inverse of `interleave`."""
    return _reordered(rows, size, dim, (-1, 2, size))


def _reordered(rows: Tensor, size: int, dim: int, blocks: tuple[int, int, int]) -> Tensor:
    if size <= 0 or rows.shape[dim] % (2 * size):
        raise ShapeError(
            f"{rows.shape[dim]} rows in blocks of {size}",
            expected=f"a multiple of 2 * {size}",
            where="interleave",
        )
    dim %= rows.dim()
    return rows.unflatten(dim, blocks).transpose(dim, dim + 1).flatten(dim, dim + 2)
