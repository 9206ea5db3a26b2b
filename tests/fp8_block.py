"""Transformer Engine's recipe Float8BlockScaling in numpy and ml_dtypes, by its published rules,
and products by it as loops in float64: none of it ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

BLOCK = 128
BF16_MAX = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def factors(amax: np.ndarray, power_of_two: bool) -> np.ndarray:
    """amax f32 [...], finite -> the f32 by which Transformer Engine multiplies: 448 / amax, rounded
    to nearest; bfloat16's largest number in place of infinity; 1 for zeros; for powers of two, with
    its mantissa cleared.
    """
    with np.errstate(divide="ignore", over="ignore"):
        found = np.float32(448) / amax.astype(np.float32)
    found = np.where(np.isinf(found), BF16_MAX, found)
    if power_of_two:
        found = (found.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where(amax == 0, np.float32(1), found)


def encoded(
    x: Tensor, tile: tuple[int, int], power_of_two: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """x float[N, K] -> its codes, e4m3[N, K], and the scale f32[ceil(N/tile), ceil(K/tile)] of each
    tile: (1, 128), (128, 1) or (128, 128). Short last tiles.
    """
    n, k = x.shape
    (a, b), whole = tile, np.pad(x.float().numpy(), ((0, -n % tile[0]), (0, -k % tile[1])))
    tiles = whole.reshape(whole.shape[0] // a, a, whole.shape[1] // b, b)
    by = factors(np.abs(tiles).max((1, 3), initial=0), power_of_two)
    codes = (tiles * by[:, None, :, None]).clip(-448, 448).reshape(whole.shape)[:n, :k]
    return codes.astype(ml_dtypes.float8_e4m3fn), np.float32(1) / by


def rounded(x: Tensor, tile: tuple[int, int], power_of_two: bool = True) -> Tensor:
    """x float[N, K] as its copy has it -> f64[N, K]"""
    codes, scales = encoded(x, tile, power_of_two)
    each = scales.repeat(tile[0], 0).repeat(tile[1], 1)[: x.shape[0], : x.shape[1]]
    return torch.from_numpy(codes.astype(np.float32) * each).double()


def products(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    sizes: Sequence[int],
    wgrad: str = "fp8",
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [G, N, K], dy [M, N], rows of each group -> y, dx, dW in f64, zeros where
    there are no rows
    """
    y, dx = (torch.zeros(len(x), n, dtype=torch.float64) for n in weight.shape[1:])
    dw, end = torch.zeros(weight.shape, dtype=torch.float64), 0
    for g, size in enumerate(sizes):
        rows, end = slice(end, end + size), end + size
        w = rounded(weight[g], (BLOCK, BLOCK), power_of_two)
        y[rows] = rounded(x[rows], (1, BLOCK), power_of_two) @ w.T
        dx[rows] = rounded(dy[rows], (1, BLOCK), power_of_two) @ w
        columns = (
            rounded(t[rows], (BLOCK, 1), power_of_two) if wgrad == "fp8" else t[rows].double()
            for t in (dy, x)
        )
        dw[g] = next(columns).T @ next(columns)
    return y, dx, dw
