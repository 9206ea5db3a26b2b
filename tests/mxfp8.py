"""MXFP8 in numpy and ml_dtypes, and products by Transformer Engine's recipe as loops in float64:
none of it ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

BLOCK = 32


def every_amax() -> Tensor:
    """bf16[32640, 32]: a row for each finite number of bf16 that is not negative, which is the
    largest of 32.
    """
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = (
        amax[:, None].float()
        * (torch.rand(len(amax), 32, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    ).bfloat16()
    x[:, 3] = amax
    return x


def encoded(x: Tensor, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """x float[N, K] -> its codes, e4m3[N, K], and the exponents of its scales, int[N, ceil(K/32)]
    or [ceil(N/32), K]; short last blocks.
    """
    rows = x.float().numpy() if axis == -1 else x.float().numpy().T
    n, k = rows.shape
    blocks = np.pad(rows, ((0, 0), (0, -k % BLOCK))).reshape(n, -(-k // BLOCK), BLOCK)
    wanted = np.abs(blocks).max(-1, initial=0) * np.float32(1 / 448)
    mantissa, exponent = np.frexp(wanted)
    exponent = np.where(wanted == 0, -127, exponent - (mantissa == 0.5)).clip(-127, 127)
    codes = (
        np.ldexp(blocks, -exponent[..., None])
        .clip(-448, 448)
        .astype(ml_dtypes.float8_e4m3fn)
        .reshape(n, k + -k % BLOCK)[:, :k]
    )
    return (codes, exponent) if axis == -1 else (codes.T, exponent.T)


def rounded(x: Tensor, axis: int = -1) -> Tensor:
    """x float[N, K] as its copy along an axis has it -> f64[N, K]"""
    codes, exponent = encoded(x, axis)
    scale = np.ldexp(1.0, exponent).repeat(BLOCK, axis)[: x.shape[0], : x.shape[1]]
    return torch.from_numpy(codes.astype(np.float64) * scale)


def products(
    x: Tensor, weight: Tensor, dy: Tensor, sizes: Sequence[int], wgrad: str = "mxfp8"
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [G, N, K], dy [M, N], rows of each group -> y, dx, dW in f64, zeros where
    there are no rows
    """
    y, dx = (torch.zeros(len(x), n, dtype=torch.float64) for n in weight.shape[1:])
    dw, end = torch.zeros(weight.shape, dtype=torch.float64), 0
    for g, size in enumerate(sizes):
        rows, end = slice(end, end + size), end + size
        y[rows] = rounded(x[rows]) @ rounded(weight[g]).T
        dx[rows] = rounded(dy[rows]) @ rounded(weight[g], -2)
        columns = [rounded(t[rows], -2) if wgrad == "mxfp8" else t[rows].double() for t in (dy, x)]
        dw[g] = columns[0].T @ columns[1]
    return y, dx, dw
