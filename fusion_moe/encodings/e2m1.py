"""E2M1, the 4-bit element: a sign bit (8) and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
Code 8 is -0.0.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.

In the tiles of `w16x64`: code (r, c, v, j, h, i) -> byte 64 r + 16 c + 4 v + 2 j and the next one.
These two bytes, low byte first, are half j of a 32-bit word and hold four codes, each as a sign s
and a magnitude abc. Codes with h = 0, i = 0 lie where bfloat16 has its sign and lowest exponent
bits, so that a single `and` makes a pair of numbers from a word. Those with h = 0, i = 1 lie six
bits lower. Those with h = 1, i = 0 lie twelve bits lower, in a word that is rotated, so that each
half has the magnitudes of the other. Those with h = 1, i = 1 are in two pieces in the remaining
bits, which two shifts move into place. (Four whole codes at four distances from their places would
not fit in sixteen bits.)

    bit    15     14     13     12-10        9      8-6      5      4      3      2-0
           s 00   a 11   s 11   abc 10 *     s 01   abc 00   b 11   c 11   s 10   abc 01
    (s 10: of h = 1, i = 0; *: of the other half)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .encoding import Element
from .orders import Nibbles


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


def nearest(x: Tensor) -> Tensor:
    """`decode(encode(x))` in a fraction of the time; NaN stays NaN.

    Codes from 2^e on are 2^e / 2 apart, below 1 as from there on. Adding 2^23 of such a distance
    leaves no bits below it, and so rounds, ties to even.
    """
    size = x.abs().clamp_max_(6.0)
    powers = size.clamp_min(1.0).view(torch.int32).bitwise_and_(0x7F800000)
    large = powers.view(torch.float32).mul_(2.0**22)
    return size.add_(large).sub_(large).copysign_(x)


class SignsAndSizes(Nibbles):
    """Codes with a sign and a magnitude, which go to different places."""

    def stored(self, x: Tensor) -> Tensor:
        """E2M1 codes u8 [..., K] of a tile, eight of a word in the order j h i -> the bytes
        u8 [..., K/2] in which the layout `w16x64` stores them: four signs and four sizes of 3 bits
        in 16 bits.
        """
        code = x.int().unflatten(-1, (-1, 2, 2, 2))
        sign, size = code >> 3, code & 7
        last, rotated = size[..., 1, 1], size[..., 1, 0].flip(-1)
        half = (
            sign[..., 0, 0] << 15
            | sign[..., 0, 1] << 9
            | sign[..., 1, 0] << 3
            | sign[..., 1, 1] << 13
        )
        half |= (
            size[..., 0, 0] << 6
            | size[..., 0, 1]
            | rotated << 10
            | (last >> 2) << 14
            | (last & 3) << 4
        )
        return torch.stack([half & 0xFF, half >> 8], -1).to(torch.uint8).flatten(-3)

    def read(self, t: Tensor) -> Tensor:
        """The inverse of `stored`."""
        low, high = t.unflatten(-1, (-1, 2, 2)).int().unbind(-1)
        half = low | high << 8
        code = half.new_empty(*half.shape, 2, 2)
        code[..., 0, 0] = (half >> 15) << 3 | half >> 6 & 7
        code[..., 0, 1] = (half >> 9 & 1) << 3 | half & 7
        code[..., 1, 0] = (half >> 3 & 1) << 3 | half.flip(-1) >> 10 & 7
        code[..., 1, 1] = (half >> 13 & 1) << 3 | (half >> 14 & 1) << 2 | half >> 4 & 3
        return code.to(torch.uint8).flatten(-4)


E2M1 = Element("e2m1", 4, torch.uint8, 6.0, encode, decode, order=SignsAndSizes(), nearest=nearest)
