"""MXFP4: E2M1 codes and a power-of-two scale for every 32 of them. The weights of gpt-oss.

    codes        uint8          [..., N, K/2]    two codes a byte, the low nibble is the even k
    block_scale  float8_e8m0fnu [..., N, K/32]   2^(byte - 127); 255 is NaN

The scale is 2^(floor(log2 amax) - 2), 2 being the exponent of the largest code: codes beyond 6
saturate. Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3; torchao's `to_mx`
with its default ScaleCalculationMode.FLOOR, compared byte by byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .e2m1 import E2M1
from .encoding import Encoding, Scale, register

_LARGEST_EXPONENT = 2  # of the codes: 6 is 1.5 * 2^2


def _power_of_two(amax: Tensor, outer: Tensor | float) -> Tensor:
    """2^(floor(log2 amax) - 2), from the bits of amax: exact. Zeros and numbers below 2^-125 get
    2^-127.
    """
    exponent = (amax.view(torch.int32) >> 23 & 0xFF) - _LARGEST_EXPONENT
    byte = exponent.clamp(0, 254).to(torch.uint8)
    return torch.where(amax.isfinite(), byte, 255).view(torch.float8_e8m0fnu).float()


MXFP4 = register(
    Encoding(
        "mxfp4",
        E2M1,
        (
            Scale(
                "block_scale",
                torch.float8_e8m0fnu,
                32,
                _power_of_two,
                minimum=2.0**-127,
                signed=False,
            ),
        ),
    )
)
