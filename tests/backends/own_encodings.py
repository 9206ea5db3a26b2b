"""Encodings that the library does not have, which backends read by their descriptors alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusion_moe import encodings
from fusion_moe.encodings import ROW, Element, Encoding, Scale

UINT4 = Element.integers("uint4", 4, 0)
TABLE = Element.look_up("table", [(i * i % 23 - 11) / 2 for i in range(16)])
TWOS = Element(
    "int8_twos",
    8,
    torch.uint8,
    127.0,
    lambda x: x.to(torch.int8).view(torch.uint8),
    lambda code: (code.int() - 256 * (code > 127).int()).float(),
)


def with_zeros(block: int, dtype: torch.dtype = torch.float16) -> Encoding:
    scales = (
        Scale("block_scale", dtype, block),
        Scale("zero_point", torch.uint8, block, zero_point=True),
    )
    return Encoding(f"zeros_{block}", UINT4, scales)


LEVELS = (
    Scale("block_scale", torch.float8_e4m3fn, 32),
    Scale("group_scale", torch.bfloat16, 64, divides=True),
    Scale("row", torch.float32, ROW),
    Scale("ends", torch.float32, 0),  # names that kernels use themselves
)
OWN = [
    *map(with_zeros, (16, 128, 256, ROW)),
    Encoding("levels", TABLE, LEVELS),
    Encoding("e8m0", UINT4, (Scale("block_scale", torch.float8_e8m0fnu, 64),)),
    Encoding(
        "two_bits",
        Element.look_up("two", [0.0, -1.0, 0.25, 1.0]),
        (Scale("block_scale", torch.float32, 64),),
    ),
    Encoding("one_bit", Element.integers("one", 1, 0), (Scale("block_scale", torch.bfloat16, 48),)),
    Encoding("twos", TWOS, (Scale("block_scale", torch.float16, 32),)),
    Encoding("unscaled", TABLE),
]


def registered() -> Iterator[None]:
    """A fixture for a module."""
    for encoding in OWN:
        encodings.register(encoding)
    yield
    for encoding in OWN:
        encodings.unregister(encoding.name)
