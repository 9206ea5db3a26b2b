"""FP8: E4M3 codes and scales of amax / 448, in files of DeepSeek-V3, compressed-tensors, ModelOpt.

    codes        float8_e4m3fn  [..., N, K]
    block_scale  float32        [..., N, K/128]  fp8: one for 128 rows and 128 columns
                 float8_e8m0fnu [..., N, K/128]  fp8_e8m0: the same, a power of two (DeepSeek-V4)
                 float32        [..., N, 1]      fp8_channel: one for each row
    decode_scale float32        [...] or [..., S]   fp8_tensor: one for the matrix, or for each of S
                                                 runs of its rows
    block_scale  float32        [..., M, K/128]  fp8_rows: one for 128 columns of a row, of
                                                 activations

A scale of 128 x 128 is stored for each of its rows, in 3 % of the weight's memory, so that rows of
several matrices may be joined, divided and reordered as all others; files have it once. The last of
them may cover fewer rows, or columns: K/128 is rounded up. Scales that are chosen here are
float32(amax / 448), e8m0 rounded up as in MXFP8, and 1 for zeros. NaN is a code (0x7F, 0xFF) and
stays NaN.

In `fp8_rows` a scale is the least power of two with amax <= 448 scale, but 2^-127 at least, as in
Transformer Engine and DeepGEMM: its numbers are exact in bfloat16, and dividing by a scale rounds
nothing. A block with infinity or NaN has the scale NaN, so that all of it is NaN.

>>> import torch
>>> from fusion_moe.encodings import dequantize, quantize
>>> x = torch.zeros(2, 128)
>>> x[0, 0], x[1, 127] = 896.0, 3.0
>>> q = quantize(x, FP8)
>>> q.block_scale.tolist(), dequantize(q)[1, 127].item()
([[2.0], [2.0]], 3.0)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .encoding import ROW, Encoding, Scale, register
from .mxfp8 import E4M3, TO_448
from .power_of_two import PowerOfTwo

BLOCK = 128  # rows and columns of a block


def _scale(amax: Tensor, outer: Tensor | float) -> Tensor:
    # a tensor: CUDA would multiply by a reciprocal
    return torch.where(amax == 0, 1.0, amax / torch.full_like(amax, E4M3.maximum))


def _fp8(
    name: str, block: int, part: str = "block_scale", rows: int = 1, choose: Any = _scale
) -> Encoding:
    scale = Scale(part, torch.float32, block, choose, signed=False, rows=rows, short=block == BLOCK)
    return register(Encoding(name, E4M3, (scale,)))


FP8 = _fp8("fp8", BLOCK, rows=BLOCK)
FP8_CHANNEL = _fp8("fp8_channel", ROW)
FP8_TENSOR = _fp8("fp8_tensor", 0, "decode_scale")
FP8_ROWS = _fp8("fp8_rows", BLOCK, choose=PowerOfTwo.to_most(1.75, 8, zero=127))
FP8_E8M0 = register(
    Encoding(
        "fp8_e8m0",
        E4M3,
        (
            Scale(
                "block_scale",
                torch.float8_e8m0fnu,
                BLOCK,
                TO_448,
                minimum=2.0**-127,
                signed=False,
                rows=BLOCK,
                short=True,
            ),
        ),
    )
)
