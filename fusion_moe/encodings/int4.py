"""INT4: integers from -8 to 7, and a bfloat16 scale for every 32. The experts of Kimi-K2-Thinking;
compressed-tensors' `pack-quantized`.

    codes        uint8    [..., N, K/2]    integer + 8; two codes a byte, the low nibble is the even
                                           k
    block_scale  bfloat16 [..., N, K/32]

The int32 words of `weight_packed`, viewed as bytes, are the codes. The scale is bf16(amax / 7.5),
and 2^-7 for a block of zeros; 7.5 is half of the range that -8 to 7 spans, so the largest element
becomes 7 if it is positive, and -7 or -8 if it is negative. Source: compressed-tensors'
`calculate_qparams`, `quantize` and `pack_to_int32`, compared byte by byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .encoding import Element, Encoding, Scale, register

_LEAST, _LARGEST = -8, 7


def _block_scale(amax: Tensor, outer: Tensor | float) -> Tensor:
    # a tensor: CUDA would multiply by a reciprocal
    scale = (amax / torch.full_like(amax, (_LARGEST - _LEAST) / 2)).bfloat16()
    return torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale.float())


INT4 = register(
    Encoding(
        "int4",
        Element.integers("int4", 4, _LEAST),
        (Scale("block_scale", torch.bfloat16, 32, _block_scale),),
    )
)
