"""NVFP4 by the book: bytes decoded rule by rule, products as loops over groups in float64. Nothing
of the library is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e4m3(byte: int) -> float:
    """Sign, four bits of exponent with bias 7, three bits of mantissa; no infinities, all ones is
    NaN.
    """
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (
        2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    )


_E2M1, _E4M3 = np.array(E2M1), np.array([e4m3(byte) for byte in range(256)])


def decoded(codes: Tensor, block_scale: Tensor, decode_scale: Tensor) -> Tensor:
    """codes [G, N, K/2], block_scale [G, N, K/16] in linear order, decode_scale [G] or [G, S] ->
    f64[G, N, K]

    The product of block and decode scale, and its product with the code, are rounded to float32
    each, as the format says.
    """
    packed = codes.contiguous().view(torch.uint8).numpy()
    groups, n, half = packed.shape
    code = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], -1).reshape(groups, n, 2 * half)
    decode = decode_scale.numpy().reshape(groups, -1)
    step = (
        _E4M3[block_scale.view(torch.uint8).numpy()].astype(np.float32)
        * decode.repeat(n // decode.shape[1], 1)[..., None]
    )
    return torch.from_numpy((code.astype(np.float32) * step.repeat(16, -1)).astype(np.float64))


def swizzled(block_scale: Tensor, padding: int = 0) -> Tensor:
    """[G, N, C] bytes -> [G, ceil128(N), ceil4(C)]: each element where the 128x4 order stores it;
    the rest is `padding`.
    """
    groups, n, c = block_scale.shape
    rows, cols = -(-n // 128) * 128, -(-c // 4) * 4
    r, j = np.arange(n)[:, None], np.arange(c)[None, :]
    place = r // 128 * 128 * cols + j // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + j % 4
    stored = np.full((groups, rows * cols), padding, np.uint8)
    stored[:, place.ravel()] = block_scale.view(torch.uint8).numpy().reshape(groups, -1)
    return torch.from_numpy(stored).view(block_scale.dtype).view(groups, rows, cols)


def product(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    """x f64[M, K], w f64[G, N, K] -> f64[M, N]: rows of group after group; zeros for the rest."""
    out, row = x.new_zeros(len(x), w.shape[1]), 0
    for matrix, size in zip(w, sizes, strict=True):
        out[row : row + size] = x[row : row + size] @ matrix.T
        row += size
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I], gate before up -> [..., I]"""
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up
