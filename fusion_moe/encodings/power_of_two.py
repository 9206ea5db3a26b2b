"""Scales that are powers of two, chosen by the bits of the largest magnitude: exactly, on any
device. The numbers of a rule are those of the kernels too (backends/cxx/elements.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PowerOfTwo:
    """A rule of Scale.choose: 2^(e - 127), e an exponent of float32, at least 0.

    e is that of amax after `carry` was added to its bits, less `bias`; 0 for bits up to `least`.
    zero: e of blocks of zeros; infinity: of blocks with infinity, 255 is NaN.

    >>> to_448 = PowerOfTwo.to_most(1.75, 8)
    >>> to_448(torch.tensor([448.0, 449.0, 3.5]), 1.0).tolist()
    [1.0, 2.0, 0.0078125]
    """

    bias: int
    carry: int
    least: int
    zero: int = 0
    infinity: int = 255

    @classmethod
    def to_most(cls, fraction: float, exponent: int, **others: int) -> PowerOfTwo:
        """The rule by which a block gets the least power of two whose quotient amax / power is at
        most fraction * 2^exponent, the largest number of the codes: 1.75 and 8 for E4M3's 448.

        fraction: at least 1 and less than 2. others: further fields of the rule.
        """
        carry = 0x7FFFFF - int((fraction - 1) * 2**23)
        return cls(
            **{
                "bias": exponent,
                "carry": carry,
                "least": (exponent + 1 << 23) - carry - 1,
                **others,
            }
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those of the C++ class of this name, in its order."""
        return self.bias, self.carry, self.least, self.zero, self.infinity

    def __call__(self, amax: Tensor, outer: Tensor | float) -> Tensor:
        """The scale float32 [...] for amax f32 [...]."""
        bits = amax.view(torch.int32)
        e = torch.where(bits > self.least, (bits + self.carry >> 23) - self.bias, 0)
        e = torch.where(bits == 0, self.zero, e)
        e = torch.where(amax.isfinite(), e, torch.where(amax.isnan(), 255, self.infinity))
        return e.to(torch.uint8).view(torch.float8_e8m0fnu).float()
