"""How block scales are recoded in `w16x64`, by their dtype.

e4m3: becomes an unsigned number with five exponent bits and three mantissa bits: one multiplication
and one addition turn it into the tensor cores' bfloat16, also for e4m3's subnormal numbers. 2^e (1
+ m/8) is byte 8 (e + 23) + m, which for all but subnormal scales is 0x80 more than before. Zero
stays byte 0, which kernels read as 2^-23: 2^-32 of the largest scale. The bytes of negative scales
and NaN, which no quantizer writes, take the remaining places; kernels read them as some other
number.

e8m0: unchanged; one shift gives the exponent of a bfloat16. bfloat16: unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recoding:
    """A permutation of bytes: entry b is the new value of byte b. () changes nothing."""

    table: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """u8 [...] -> u8 [...]"""
        return _looked_up(self.table, x) if self.table else x

    def inverse(self, x: Tensor) -> Tensor:
        """The inverse of `forward`."""
        return (
            _looked_up(tuple(sorted(range(256), key=self.table.__getitem__)), x)
            if self.table
            else x
        )


def _looked_up(table: tuple[int, ...], x: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.uint8, device=x.device)[x.int()]


def _e5m3() -> Recoding:
    """The stored byte of each e4m3 byte."""
    table = [0]
    for byte in range(1, 127):
        number = (byte & 7) * 2.0**-9 if byte < 8 else (8 + byte % 8) * 2.0 ** (byte // 8 - 10)
        mantissa, exponent = math.frexp(number)  # mantissa in [0.5, 1)
        table.append((exponent + 22) * 8 + int(mantissa * 16) - 8)
    return Recoding((*table, *sorted(set(range(256)) - set(table))))


RECODINGS = {
    torch.float8_e4m3fn: _e5m3(),
    torch.float8_e8m0fnu: Recoding(),
    torch.bfloat16: Recoding(),
}
