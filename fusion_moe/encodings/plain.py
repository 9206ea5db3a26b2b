"""Plain numbers: one tensor `[..., N, K]` without scales, so that unquantized weights are one more
encoding.
"""

from __future__ import annotations

import torch

from .encoding import Element, Encoding, register

PLAIN = {
    dtype: register(
        Encoding(name, Element(name, 8 * dtype.itemsize, dtype, torch.finfo(dtype).max))
    )
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32))
}
BF16, F16, F32 = PLAIN.values()
