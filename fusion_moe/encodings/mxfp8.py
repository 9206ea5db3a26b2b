"""MXFP8: E4M3 elements, a power of two for 32 of them. What Transformer Engine multiplies with, forward and backward.

    codes        float8_e4m3fn  [..., N, K]
    block_scale  float8_e8m0fnu [..., N, K/32]  mxfp8: blocks along K
                                [..., N/32, K]  mxfp8_columns: blocks along N

The scale is amax * float32(1/448), rounded up to a power of two: the largest code lies in (224, 448]. Blocks of zeros, and what is below
2^-127, get 2^-127, infinity 2^127, NaN the scale NaN. Codes are rounded to nearest, ties to even; beyond 448 they saturate.
Source: Transformer Engine, common/util/ptx.cuh and its casts to MXFP8; torchao's `to_mx` with ScaleCalculationMode.RCEIL has equal
scales, and equal codes where amax is above 2.7e-36.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .encoding import Element, Encoding, Scale, register

_LARGEST = 448.0
_HALF_SUBNORMAL = 0x400000  # of the mantissa bits: 2^-127, the least scale


def encode(x: Tensor) -> Tensor:
    """x f32 [...] -> float8_e4m3fn [...], to nearest, ties to even; what is larger than 448 becomes 448. NaN stays."""
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def _power_of_two(amax: Tensor, outer: Tensor | float) -> Tensor:
    """amax / 448 rounded up to a power of two, from its bits: exact."""
    bits = (amax * (1 / _LARGEST)).view(torch.int32)  # torch rounds the number to float32 first
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent < 254) & ((exponent > 0) | (mantissa > _HALF_SUBNORMAL))
    byte = (exponent + up.int()).clamp(max=254).to(torch.uint8)  # infinity's exponent is 255
    return torch.where(amax.isnan(), 255, byte).view(torch.float8_e8m0fnu).float()


_E4M3 = Element("e4m3", 8, torch.float8_e4m3fn, _LARGEST, encode=encode)
_SCALES = (Scale("block_scale", torch.float8_e8m0fnu, 32, _power_of_two, minimum=2.0**-127),)

MXFP8 = register(Encoding("mxfp8", _E4M3, _SCALES))
MXFP8_COLUMNS = register(Encoding("mxfp8_columns", _E4M3, _SCALES, axis=-2))
BY_AXIS = {encoding.axis: encoding for encoding in (MXFP8, MXFP8_COLUMNS)}
