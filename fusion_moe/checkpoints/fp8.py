"""Weights in 8-bit floats with scales, which are converted to floats when read.

values  float8_e4m3fn  [N, K]
scale   float          [] or [1], one for the matrix; or [ceil(N/128), ceil(K/128)], one for a block (another size: `block`)
"""

from __future__ import annotations

from torch import Tensor

from ..encodings import check_matrix_scales
from ..errors import NonFiniteError, ShapeError

BLOCK = (128, 128)


def check_fp8(values: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """The shape (N, K); ShapeError unless scale fits values. The values are not read."""
    if values.dim() != 2 or 0 in values.shape:
        raise ShapeError(f"values are {list(values.shape)}", expected="[N, K]")
    blocks = [-(-size // of) for size, of in zip(values.shape, block, strict=True)]
    if scale.numel() != 1 and list(scale.shape) != blocks:
        expected = f"[], [1] or {blocks}: one for {block[0]} x {block[1]} of {list(values.shape)}"
        raise ShapeError(f"scale is {list(scale.shape)}", expected=expected)
    return tuple(values.shape)


def dequantize_fp8(values: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """f32 [N, K]: values times scale, one float32 product each. ShapeError as `check_fp8`."""
    n, k = check_fp8(values, scale, block)
    factor = scale.float()
    if scale.numel() == 1:
        return values.float() * factor.reshape(())
    return values.float() * factor.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]


def check_fp8_scales(scale: Tensor, name: str) -> None:
    """NonFiniteError if scales contain NaN, infinity or a negative number, which no quantizer writes. Waits for the device."""
    try:
        check_matrix_scales(scale.float(), name)
    except NonFiniteError as error:
        raise NonFiniteError(error.found, expected="scales of 8-bit floats, amax / 448 each", todo="the file is damaged") from None
