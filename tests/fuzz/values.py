"""Tensors for random graphs: small integers and powers of two, whose sums and products float32
holds exactly; or hostile ones.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from fusion_moe.encodings import NVFP4, Quantized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
_EXACT = torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0])
_SPECIAL = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan")])


def generator(rng: Random) -> torch.Generator:
    """A generator of torch's that goes on from one of Python's."""
    return torch.Generator().manual_seed(rng.getrandbits(48))


def exact(rng: Random, shape: tuple[int, ...], dtype: torch.dtype, special: bool = False) -> Tensor:
    """Small numbers of a dtype. special: with -0.0, infinities and NaN among them."""
    g = generator(rng)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype == torch.uint8 else -3, 7, shape, generator=g).to(dtype)
    x = _EXACT[torch.randint(0, len(_EXACT), shape, generator=g)]
    if special:
        x = torch.where(
            torch.rand(shape, generator=g) < 0.1,
            _SPECIAL[torch.randint(0, len(_SPECIAL), shape, generator=g)],
            x,
        )
    return x.to(dtype)


def group_ends(rng: Random, groups: int, rows: int) -> Tensor:
    """i32[groups]: ends of groups among so many rows; some are empty, some rows may be past the
    last.
    """
    last = rows if rng.random() < 0.5 else rng.randint(0, rows)
    ends = sorted(rng.choice((0, last, rng.randint(0, last))) for _ in range(groups - 1))
    return torch.tensor([*ends, last], dtype=torch.int32)


def weight(rng: Random, groups: int, n: int, k: int) -> Quantized:
    """NVFP4 weights that are small multiples of a quarter; one decode scale for a matrix, or for
    each half of one.
    """
    g = generator(rng)
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(0, 2, (groups, n, k // 16), generator=g)
    runs = (2,) if n % 2 == 0 and rng.random() < 0.2 else ()
    decode = 2.0 ** torch.randint(-1, 1, (groups, *runs), generator=g)
    return Quantized(codes, scales.to(torch.float8_e4m3fn), decode, encoding=NVFP4)


def is_fine(t: Tensor) -> bool:
    """Whether sums of these numbers, each times an element of a weight, are exact in float32 in any
    order.
    """
    if not t.is_floating_point():
        return True
    x = t.double()
    x = x[x.isfinite()]
    return bool(((x * 8 == (x * 8).round()) & (x.abs() <= 256)).all())


def hostile(rng: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, or small integers, or zeros: what ends and indices must never be trusted to be."""
    g, how = generator(rng), rng.random()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if how < 0.2:
        return torch.zeros(shape).to(dtype)
    if how < 0.85:
        return torch.randint(
            -1 if how > 0.7 and dtype != torch.uint8 else 0,
            rng.choice((1, 2, 4, 8)),
            shape,
            generator=g,
        ).to(dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    return (
        torch.randint(0, 256, (*shape, size), generator=g, dtype=torch.uint8)
        .view(dtype)
        .view(shape)
    )
