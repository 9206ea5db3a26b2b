"""Integers of 4 and 8 bits with a scale for 32, 64 or 128 of them or for a row: `pack-quantized` of
compressed-tensors, AWQ, GPTQ and AutoRound. `int4` is that of Kimi-K2-Thinking's experts.

    codes        uint8             [..., N, K/2]   int4, uint4: two codes a byte, the low nibble is
                                                   the even k
                                   [..., N, K]     int8
    block_scale  bfloat16, float16 [..., N, K/32]  int4 (the dtype of the others: `_f16` or none)
                                   [..., N, K/64], [..., N, K/128], [..., N, 1]   int4_64, int4_128,
                                                   int4_channel; uint4_32, ..., int8_32, ...
    zero_point   uint8             as block_scale, of uint4 alone: what is subtracted from codes

A code of int4 is its integer + 8, of int8 its integer + 128, so the int32 words of `weight_packed`,
viewed as bytes, are the codes. The scale is amax over half of the range of the integers (7.5,
127.5), or the distance from the least number to the largest, 0 among them, over 15 where there are
zero points; and the epsilon of its dtype for a block of zeros. So in int4 the largest element
becomes 7 if it is positive, and -7 or -8 if it is negative. Source: compressed-tensors'
`calculate_qparams`, `quantize` and `pack_to_int32`, compared byte by byte. A search (search.py)
tries 22/32 to 35/32 of int4's scale too.

>>> import torch
>>> from fusion_moe.encodings import dequantize, find, quantize
>>> q = quantize(torch.arange(-32.0, 96)[None].clamp(max=88), find("uint4_128"))
>>> q.zero_point.tolist(), q.block_scale.tolist(), dequantize(q)[0, [0, 32, 127]].tolist()
([[4]], [[8.0]], [-32.0, 0.0, 88.0])
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .encoding import ROW, Element, Encoding, Scale, register

GROUPS = (32, 64, 128, ROW)
_OTHERS = tuple((i / 32, 0) for i in range(22, 36) if i != 32)  # what a search tries
_ELEMENTS = {
    "int4": Element.integers("int4", 4, -8),
    "uint4": Element.integers("uint4", 4, 0),
    "int8": Element.integers("int8", 8, -128),
}


def _step(dtype: torch.dtype, size: float, amax: Tensor, outer: Tensor | float) -> Tensor:
    # a tensor: CUDA would multiply by a reciprocal
    scale = (amax / torch.full_like(amax, size)).to(dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale.float())


def _integers(element: Element, group: int, dtype: torch.dtype) -> Encoding:
    zeros = element.name == "uint4"
    size = (2**element.bits - 1) / (1 if zeros else 2)
    searched = element.name == "int4" and group != ROW
    scales = [
        Scale(
            "block_scale",
            dtype,
            group,
            partial(_step, dtype, size),
            others={"mse": _OTHERS} if searched else {},
            usual="mse" if searched else "max",
        )
    ]
    if zeros:
        scales.append(
            Scale("zero_point", torch.uint8, group, zero_point=True, maximum=element.maximum)
        )
    block = "channel" if group == ROW else str(group)
    name = f"{element.name}_{block}{'_f16' if dtype == torch.float16 else ''}"
    return register(Encoding("int4" if name == "int4_32" else name, element, tuple(scales)))


# by the name of the element, the group and the dtype of scales
INTEGERS: dict[tuple[str, int, torch.dtype], Encoding] = {
    (name, group, dtype): _integers(element, group, dtype)
    for name, element in _ELEMENTS.items()
    for group in GROUPS
    for dtype in (torch.bfloat16, torch.float16)
}
INT4 = INTEGERS["int4", 32, torch.bfloat16]
