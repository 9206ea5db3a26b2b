"""Plain numbers: one tensor `[..., N, K]` without scales, so that unquantized weights are one more
encoding.
"""

from __future__ import annotations

import torch

from .encoding import Element, Encoding, register


def _plain(name: str, dtype: torch.dtype) -> Encoding:
    return register(
        Encoding(name, Element(name, 8 * dtype.itemsize, dtype, torch.finfo(dtype).max))
    )


BF16, F16, F32 = (
    _plain("bf16", torch.bfloat16),
    _plain("f16", torch.float16),
    _plain("f32", torch.float32),
)
