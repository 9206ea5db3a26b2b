"""Weights in 8-bit floats with scales: which encoding they are in, by the shape of the scales.

values  float8_e4m3fn  [N, K]
scale   float          [] or [1], one for the matrix; [N] or [N, 1], one for a row; [ceil(N/128),
                       ceil(K/128)], one for a block
"""

from __future__ import annotations

import math

from torch import Tensor

from ..encodings import FP8, FP8_CHANNEL, FP8_E8M0, FP8_TENSOR, Encoding
from ..errors import Error, ShapeError, UnsupportedError

BLOCK = (128, 128)


def encoding_of(values: tuple[int, ...], scale: tuple[int, ...], e8m0: bool) -> Encoding | None:
    """The encoding of E4M3 values [N, K] with a scale of this shape: one number, one for each row,
    or one for 128 x 128 (`e8m0`: a power of two). None for other shapes.
    """
    if len(values) != 2 or 0 in values:
        return None
    n, k = values
    if math.prod(scale) == 1:
        return FP8_TENSOR
    if scale in ((n,), (n, 1)):
        return FP8_CHANNEL
    if scale == (-(-n // BLOCK[0]), -(-k // BLOCK[1])):
        return FP8_E8M0 if e8m0 else FP8
    return None


def refusal(values: Tensor, scale: Tensor) -> Error:
    """Why `encoding_of` knows none for them: a ShapeError, or an UnsupportedError for scales of
    other blocks.
    """
    if values.dim() != 2 or 0 in values.shape:
        return ShapeError(f"values are {list(values.shape)}", expected="[N, K]")
    n, k = values.shape
    blocks = [-(-n // BLOCK[0]), -(-k // BLOCK[1])]
    expected = (
        f"[], [1], [{n}, 1] or {blocks}: one for {list(values.shape)}, for a row or "
        f"for {BLOCK[0]} x {BLOCK[1]}"
    )
    other_blocks = scale.dim() == 2 and blocks[0] <= scale.shape[0] <= n and scale.shape[1] <= k
    return (UnsupportedError if other_blocks else ShapeError)(
        f"scale is {list(scale.shape)}", expected=expected
    )
