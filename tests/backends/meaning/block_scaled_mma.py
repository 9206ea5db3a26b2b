"""The arithmetic of Blackwell's matrix instruction for 4-bit operands with block scales
(`tcgen05.mma` with kind::mxf4nvf4, a scale for each 16), as measured on hardware by others:
"MMA-Sim" (arXiv 2511.10909). Simulated: it never ran beside a device here.

A step adds 64 products to a float32 accumulator. The 16 products of a block are summed exactly.
Each of the four sums, times the significands of its two scales, and the accumulator are then
aligned to the largest of their five exponents, of which a sum has that of its scales; what lies
beyond 35 fractional bits is cut, the rest added, and cut once more to float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP, BLOCK, FRACTION = 64, 16, 35
_LEAST_SCALE, _LEAST_FLOAT = -6, -126  # exponents: of e4m3 and of float32


def block_scaled_mma(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """float32[m, n]: a [m, k] and b [n, k], values of e2m1, times e4m3 scales [m, k/16], [n,
    k/16], which are not negative; k a multiple of 64.
    """
    sums = torch.zeros(len(a), len(b))
    for start in range(0, a.shape[1], STEP):
        blocks = slice(start // BLOCK, (start + STEP) // BLOCK)
        left, right = (
            (t[:, start : start + STEP].double().unflatten(1, (-1, BLOCK)), s[:, blocks].double())
            for t, s in ((a, scale_a), (b, scale_b))
        )
        sums = _step(sums, *left, *right)
    return sums


def _step(c: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """c float32[m, n], a [m, 4, 16], b [n, 4, 16], scales [m, 4], [n, 4], all in float64."""
    exact = torch.einsum("mbk,nbk->mnb", a, b) * scale_a[:, None] * scale_b
    ea, eb = (_exponents(s, _LEAST_SCALE) for s in (scale_a, scale_b))
    exponents = torch.cat([_exponents(c.double(), _LEAST_FLOAT)[..., None], ea[:, None] + eb], -1)
    unit = torch.exp2(exponents.amax(-1, keepdim=True) - FRACTION)
    terms = torch.cat([c.double()[..., None], exact], -1)
    return _cut((torch.trunc(terms / unit) * unit).sum(-1))


def _exponents(x: Tensor, least: int) -> Tensor:
    """Of float64 numbers, as float64; that of zero is the least of float32."""
    exponent = (torch.frexp(x).exponent - 1).clamp(min=least).double()
    return torch.where(x == 0, float(_LEAST_FLOAT), exponent)


def _cut(x: Tensor) -> Tensor:
    """float64 to float32, towards zero."""
    near = x.float()
    beyond = near.double().abs() > x.abs()
    return torch.where(beyond, torch.nextafter(near, torch.zeros_like(near)), near)
