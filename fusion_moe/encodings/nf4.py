"""NF4: sixteen numbers, the quantiles of a normal distribution, times the largest magnitude of each
64; bitsandbytes, QLoRA.

    codes        uint8   [..., N, K/2]    two codes a byte, the low nibble is the even k (in
                                          bitsandbytes the high one)
    block_scale  float32 [..., N, K/64]   the largest magnitude, 0 for zeros

Source: bitsandbytes' `get_4bit_type` and `quantize_4bit`, compared byte by byte.
"""

from __future__ import annotations

import torch

from .encoding import Element, Encoding, Scale, register

NF4 = register(
    Encoding(
        "nf4",
        Element.look_up(
            "nf4",
            (
                -1.0,
                -0.6961928009986877,
                -0.5250730514526367,
                -0.39491748809814453,
                -0.28444138169288635,
                -0.18477343022823334,
                -0.09105003625154495,
                0.0,
                0.07958029955625534,
                0.16093020141124725,
                0.24611230194568634,
                0.33791524171829224,
                0.44070982933044434,
                0.5626170039176941,
                0.7229568362236023,
                1.0,
            ),
        ),
        (Scale("block_scale", torch.float32, 64, signed=False),),
    )
)
