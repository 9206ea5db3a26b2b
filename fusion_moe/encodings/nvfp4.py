"""NVFP4: E2M1 codes, an e4m3 scale for every 16 of them, and a float32 scale for the matrix.

    codes         uint8          [..., N, K/2]    two codes a byte, the low nibble is the even k
    block_scale   float8_e4m3fn  [..., N, K/16]   linear order, never negative
    decode_scale  float32        [...] or [..., S]   S divides N: row n uses entry n // (N // S), so
                                                     gate and up keep their own

The scales are chosen as nvidia-modelopt's `NVFP4QTensor.quantize` does on the CPU (source: its
order of operations, compared byte by byte): decode scale = amax / 2688, block scale = e4m3(block
amax / (6 * decode scale)) within [2^-9, 448], 1.0 for a block of zeros. A search (search.py) tries
that block scale and 4/6, or the numbers of e4m3 from five below it to six above.

In the tiles of `w16x64` a block scale becomes an unsigned number with five exponent bits and three
mantissa bits: one multiplication and one addition turn it into the tensor cores' bfloat16, also for
e4m3's subnormal numbers. 2^e (1 + m/8) is byte 8 (e + 23) + m, which for all but subnormal scales
is 0x80 more than before. Zero stays byte 0, which kernels read as 2^-23: 2^-32 of the largest
scale. The bytes of negative scales and NaN, which no quantizer writes, take the remaining places;
kernels read them as some other number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .e2m1 import E2M1
from .encoding import Encoding, Scale, register
from .orders import Recoding

_BLOCK_MAX = 448.0  # of e4m3


def _block_scale(amax: Tensor, decode: Tensor | float) -> Tensor:
    wanted = amax / (E2M1.maximum * decode)
    # the NaN of inf / inf has a sign on x86
    return torch.where(amax == 0, 1.0, torch.where(wanted.isnan(), torch.nan, wanted))


def _decode_scale(amax: Tensor, outer: Tensor | float) -> Tensor:
    """The scale with which the block of the largest element gets the largest block scale. 0 for a
    zero matrix, for which ModelOpt gets NaN.

    The divisor is a tensor, since CUDA would multiply by the reciprocal of a Python number.
    """
    return amax / torch.full_like(amax, E2M1.maximum * _BLOCK_MAX)


def _e5m3() -> Recoding:
    """The stored byte of each e4m3 byte."""
    table = [0]
    for byte in range(1, 127):
        number = (byte & 7) * 2.0**-9 if byte < 8 else (8 + byte % 8) * 2.0 ** (byte // 8 - 10)
        mantissa, exponent = math.frexp(number)  # mantissa in [0.5, 1)
        table.append((exponent + 22) * 8 + int(mantissa * 16) - 8)
    return Recoding((*table, *sorted(set(range(256)) - set(table))))


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
                signed=False,
                recoding=_e5m3(),
                others={
                    "four_over_six": ((1.5, 0),),
                    "mse": tuple((1.0, d) for d in range(-5, 7) if d),
                },
                usual="mse",
            ),
            Scale("decode_scale", torch.float32, 0, _decode_scale),
        ),
    )
)
