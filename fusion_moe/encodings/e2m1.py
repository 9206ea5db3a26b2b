"""E2M1, the 4-bit element: a sign bit (8) and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
Code 8 is -0.0.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .encoding import Element


def encode(x: Tensor) -> Tensor:
    """x f32 [...] -> the nearest code, uint8 [...]: 7 less the midpoints above |x|. A tie goes to
    the even code, NaN to 7.

    -0.0 gives code 0; a negative number that rounds to zero gives code 8. Compares with Python
    numbers, since a table of midpoints would have to be copied to the device at every call.
    """
    size = x.abs()
    code = 7 - (size <= 0.25).view(torch.uint8)
    for midpoint, tie_goes_up in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code -= (size < midpoint if tie_goes_up else size <= midpoint).view(torch.uint8)
    return code.add_((x < 0).view(torch.uint8), alpha=8)


def decode(code: Tensor) -> Tensor:
    """code int [...] of 0 .. 15 -> f32 [...]. By arithmetic on the device, so that a CUDA graph may
    capture it.
    """
    magnitude, mantissa, exponent = code & 7, code & 1, code >> 1 & 3
    positive = torch.where(
        magnitude < 2,
        magnitude.float() * 0.5,
        (2 + mantissa).float() * (1 << exponent.int()) * 0.25,
    )
    return torch.where(code < 8, positive, -positive)


E2M1 = Element("e2m1", 4, torch.uint8, maximum=6.0, encode=encode, decode=decode)
