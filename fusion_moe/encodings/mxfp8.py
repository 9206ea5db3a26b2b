"""MXFP8: E4M3 elements and a power-of-two scale for every 32 of them. Transformer Engine multiplies
in it, forward and backward.

    codes        float8_e4m3fn  [..., N, K]
    block_scale  float8_e8m0fnu [..., N, K/32]  mxfp8: blocks along K
                                [..., N/32, K]  mxfp8_columns: blocks along N

The scale is amax * float32(1/448), rounded up to a power of two: the largest code lies in (224,
448]. Blocks of zeros and values below 2^-127 get 2^-127, infinity gets 2^127, and NaN gets a scale
of NaN. Codes are rounded to nearest, ties to even, and saturate beyond 448. Source: Transformer
Engine, common/util/ptx.cuh and its casts to MXFP8; torchao's `to_mx` with
ScaleCalculationMode.RCEIL has equal scales, and equal codes where amax is above 2.7e-36.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .encoding import Element, Encoding, Scale, register
from .power_of_two import PowerOfTwo

_LARGEST = 448.0


def encode(x: Tensor) -> Tensor:
    """x f32 [...] -> float8_e4m3fn [...], to nearest, ties to even; values beyond 448 become 448.
    NaN stays NaN.
    """
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


E4M3 = Element("e4m3", 8, torch.float8_e4m3fn, _LARGEST, encode=encode)
# float32(1/448) is rounded down: with it one more number is at most 448 * 2^-127
TO_448 = PowerOfTwo.to_most(1.75, 8, least=0x4600001, infinity=254)
_SCALES = (Scale("block_scale", torch.float8_e8m0fnu, 32, TO_448, minimum=2.0**-127, signed=False),)

MXFP8 = register(Encoding("mxfp8", E4M3, _SCALES))
MXFP8_COLUMNS = register(Encoding("mxfp8_columns", E4M3, _SCALES, axis=-2))
