"""Products of int8 operands: rows of floats and weights of E2M1 codes, both rounded to integers in
blocks of 256 columns.

    rows     step = amax / 127                           amax: of a block of a row
             codes = round(x * (127 / amax))             ties to even: -127 .. 127
    weights  step = S / 16                               S: the largest block scale, by its size, of
                                                         a block of a row of a matrix
             ratio = round(s * (2048 / S))               of each of its block scales s, ties to even
             codes = floor((2 c * ratio + 128) / 256)    c: the E2M1 number of a code; this is
                                                         c * s / S * 16, to nearest: -96 .. 96
    y        sum over blocks, in order, of (codes of the row . codes of the weight) * (step of the
             row * step of the weight): each product of codes an exact integer, each block added by
             one fused multiply-add; then times the scale of the matrix

Everything but the integers is in float32. A block whose amax or S is below 2^-100 counts as zeros.
NaN or infinity in a block of a row, or NaN among a weight row's scales, makes all results of that
row, or of that column, NaN. The last block of a row may be shorter.

Weights are rounded too, since integer tensors need one scale for all the columns that an
instruction contracts: 64 with AMX, while NVFP4 has a scale for every 16. Sixteen times the largest
E2M1 number fits into a byte. As a power of two, the factor keeps all values exact in a block with
the largest scale and, with MXFP4's power-of-two scales, in blocks down to an eighth of it.

Why 256 columns: once for each block, results must be converted to float32, scaled and added. By
instruction count this takes vector units half of the time in which tiles multiply 256 columns; with
128 columns it would take all of it. Sums of a block have 22 bits, which float32 holds exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...encodings import MXFP4, NVFP4, Quantized
from ...encodings.e2m1 import E2M1
from ...errors import DtypeError, OptionError
from ..types import TensorType
from .rules import need_dtype

NAME = "int8"
WEIGHTS = (NVFP4.name, MXFP4.name)
BLOCK = 256
_LEAST = 2.0**-100  # the smallest amax or S that does not count as zero
_CODES = 16  # at least this many share a scale


def need_operands(operands: str, a: TensorType, w: TensorType) -> None:
    """OptionError or DtypeError unless a product of rows of type a with a weight of type w can have
    such operands: "" or "int8".
    """
    if operands not in ("", NAME):
        raise OptionError(f"operands = {operands!r}", expected=f"'' or {NAME!r}")
    if operands == NAME:
        need_dtype("a", a, "f32", "bf16", "f16")
        if w.dtype not in WEIGHTS:
            raise DtypeError(
                f"w is {w}", expected=f"{' or '.join(WEIGHTS)} for operands = {NAME!r}"
            )


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float [M, K] -> codes f32 [M, blocks, 256], integers; steps f32 [M, blocks]"""
    blocks = _blocks(x.float(), BLOCK)
    amax = blocks.abs().amax(-1)
    some = amax.isfinite() & (amax >= _LEAST)
    factor = torch.where(some, _quotient(127.0, amax), 0.0)
    codes = torch.where(some[..., None], blocks * factor[..., None], 0.0).round()
    return codes, _steps(amax, some, amax / torch.full_like(amax, 127.0))


def matrices(w: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [G, N, K] -> codes f32 [G, N, blocks, 256], integers; steps f32 [G, N, blocks];
    matrix scales f32 [G, N]
    """
    *lead, n, _ = w.shape
    assert E2M1.decode is not None
    packed = w[0].view(torch.uint8)
    codes = (2 * E2M1.decode(torch.stack((packed & 15, packed >> 4), -1).flatten(-2))).int()
    each = w[1].float().repeat_interleave(w.encoding.block_scales[0].block // _CODES, -1)
    scales = _blocks(each, BLOCK // _CODES)
    largest = scales.abs().amax(-1)
    some = largest.isfinite() & (largest >= _LEAST)
    ratios = (
        torch.where(some[..., None], scales * _quotient(2048.0, largest)[..., None], 0.0)
        .round()
        .int()
    )
    wide = _blocks(codes, BLOCK).unflatten(-1, (-1, _CODES))
    scaled = (wide * ratios[..., None] + 128) >> 8
    of_matrix = w[2] if len(w) > 2 else torch.ones(lead, dtype=torch.float32, device=packed.device)
    runs = of_matrix.reshape(*lead, -1)
    factors = runs.repeat_interleave(n // runs.shape[-1], -1)
    return scaled.flatten(-2).float(), _steps(largest, some, largest / _CODES), factors


def product(a: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Rows [M, K] times one matrix [1, N, K] -> f32 [M, N]"""
    (codes, steps), (w_codes, w_steps, factors) = a, (t[0] for t in w)
    sums = codes.new_zeros(len(codes), len(w_codes))
    for block in range(codes.shape[1]):
        # exact in any order, since it is below 2^24
        integers = codes[:, block] @ w_codes[:, block].T
        step = steps[:, block, None] * w_steps[None, :, block]
        # float64 holds the product exactly
        sums = (integers.double() * step.double() + sums.double()).float()
    return sums * factors


def _quotient(number: float, by: Tensor) -> Tensor:
    """A quotient rounded once: torch divides a number by a tensor by multiplying with a
    reciprocal.
    """
    return torch.full_like(by, number) / by


def _blocks(x: Tensor, size: int) -> Tensor:
    """x [..., K] -> [..., blocks, size], zeros past the end"""
    return pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _steps(largest: Tensor, some: Tensor, steps: Tensor) -> Tensor:
    """The value of an integer of 1, from the largest element of each block."""
    return torch.where(some, steps, torch.where(largest < _LEAST, 0.0, torch.nan))


def attributes(activation_format: str) -> dict[str, Any]:
    """The attributes of a product for activations in this format."""
    return {"operands": NAME} if activation_format == NAME else {}
