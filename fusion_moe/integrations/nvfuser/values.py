"""Quantized values in nvFuser, which has no 8-bit integers: codes are int32 words of eight codes,
or e2m1 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# int32[G, N, K/8], the first code in the lowest bits; e2m1[G, K, N] with K fastest
WORDS, E2M1 = "words", "e2m1"


@dataclass(frozen=True)
class Codes:
    """Packed codes from outside the definition. form(WORDS) or form(E2M1) is the definition's
    tensor that holds them.
    """

    form: Callable[[str], Any]


@dataclass(frozen=True)
class Packed:
    """A weight nvfp4[G, N, K]: codes, block_scale f8e4m3[G, N, K/16] in a layout, decode_scale
    f32[G], or f32[G, runs] if runs > 0.
    """

    codes: Codes
    block_scale: Any
    decode_scale: Any
    layout: str
    runs: int


@dataclass(frozen=True)
class Encoded:
    """Rows nvfp4[M/g, K] quantized inside: codes e2m1[M, K], block_scale f8e4m3[M, K/16] in a
    layout, decode_scale f32[].
    """

    codes: Any
    block_scale: Any
    decode_scale: Any


@dataclass(frozen=True)
class EightBits:
    """A value mxfp8[..., N, K] or mxfp8_columns: codes f8e4m3[..., N, K]; block_scale f32, or
    f8e8m0 if it comes from outside.
    """

    codes: Any
    block_scale: Any


def form_of(codes: Tensor, form: str, transposed: bool) -> Tensor:
    """codes u8[..., N, K/2], or [..., K/2, N] if transposed -> int32 words [..., N, K/8], or
    e2m1[..., K/2, N] with K fastest.

    A view, unless the rows are not contiguous or the words are not aligned. fp4 tensors count as
    the bytes in which they are stored.
    """
    rows = (codes.view(torch.uint8).mT if transposed else codes.view(torch.uint8)).contiguous()
    if form == E2M1:
        return rows.view(torch.float4_e2m1fn_x2).mT
    return (rows if rows.storage_offset() % 4 == 0 else rows.clone()).view(torch.int32)
