"""NVFP4: E2M1 codes, an e4m3 scale for every 16 of them, and a float32 scale for the matrix.

    codes         uint8          [..., N, K/2]    two codes a byte, the low nibble is the even k
    block_scale   float8_e4m3fn  [..., N, K/16]   linear order, never negative
    decode_scale  float32        [...] or [..., S]   S divides N: row n uses entry n // (N // S), so
                                                     gate and up keep their own

The scales are chosen as nvidia-modelopt's `NVFP4QTensor.quantize` does on the CPU (source: its
order of operations, compared byte by byte): decode scale = amax / 2688, block scale = e4m3(block
amax / (6 * decode scale)) within [2^-9, 448], 1.0 for a block of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .e2m1 import E2M1
from .encoding import Encoding, Scale, register

_BLOCK_MAX = 448.0  # of e4m3


def _block_scale(amax: Tensor, decode: Tensor | float) -> Tensor:
    return torch.where(amax == 0, 1.0, amax / (E2M1.maximum * decode))


def _decode_scale(amax: Tensor, outer: Tensor | float) -> Tensor:
    """The scale with which the block of the largest element gets the largest block scale. 0 for a
    zero matrix, for which ModelOpt gets NaN.

    The divisor is a tensor, since CUDA would multiply by the reciprocal of a Python number.
    """
    return amax / torch.full_like(amax, E2M1.maximum * _BLOCK_MAX)


NVFP4 = register(
    Encoding(
        "nvfp4",
        E2M1,
        (
            Scale(
                "block_scale",
                torch.float8_e4m3fn,
                16,
                _block_scale,
                minimum=2.0**-9,
                maximum=_BLOCK_MAX,
            ),
            Scale("decode_scale", torch.float32, 0, _decode_scale),
        ),
    )
)
