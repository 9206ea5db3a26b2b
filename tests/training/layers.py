"""Layers over groups of rows as loops of autograd in float64, and calls of ours to compare with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_moe.nn import Activation, GroupedLinear, Sequential

G, K, N = 4, 24, 40
SIZES = (5, 0, 7, 3)
ROWS = 17  # two past the last group
COUNTS = torch.tensor(SIZES)
BOTH = [False, True]
# relative and absolute, of elements of order one: what a rounding to the dtype takes them off
NEAR = {torch.float32: (1.3e-6, 1e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (1.6e-2, 1e-2)}


def uniform(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    low: float = -0.5,
    high: float = 0.5,
) -> Tensor:
    return (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * (high - low) + low
    ).to(dtype)


def layer(*sizes: int, seed: int = 1, **how: Any) -> GroupedLinear:
    """A GroupedLinear of G, K, N, its biases not zero."""
    made = GroupedLinear(*sizes, **how)
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(uniform(*p.shape, seed=seed + i))
    return made


def one_by_one(model: Sequential, x: Tensor, *extra: Tensor) -> Tensor:
    """What a Sequential means: its modules called in order, ours with what they take beside x."""
    rest = list(extra)
    for module in model:
        count = 0
        if isinstance(module, GroupedLinear):
            count = 1 + module.scale_bias
        elif isinstance(module, Activation):
            count = int(module.scaled)
        x, rest = module(x, *rest[:count]), rest[count:]
    assert not rest
    return x


def wide(t: Tensor) -> Tensor:
    return t.detach().double().requires_grad_()


def stacked(module: GroupedLinear, name: str) -> Tensor:
    """f64 leaf [G, ...] of the parameters of a module."""
    return wide(torch.stack([t.detach() for t in module.each(name)]))


def gradients(module: GroupedLinear, name: str) -> list[Tensor | None]:
    """Of each group."""
    found = [getattr(module, key).grad for key in module.keys(name)]
    return (
        found
        if not module.single[name]
        else [None] * module.num_groups
        if found[0] is None
        else list(found[0])
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sequence[int],
    scales: Tensor | None = None,
) -> Tensor:
    """x f64[M, K], weight [G, N, K], bias [G, N], scales [M] -> [M, N], zeros past the last
    group.
    """
    parts, row = [], 0
    for g, size in enumerate(sizes):
        y = x[row : row + size] @ weight[g].T
        if bias is not None:
            y = y + (bias[g] if scales is None else scales[row : row + size, None] * bias[g])
        parts.append(y)
        row += size
    return torch.cat([*parts, x.new_zeros(len(x) - row, weight.shape[1])])


def glu(
    x: Tensor,
    scales: Tensor,
    interleave: int = 0,
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
) -> Tensor:
    """x [..., 2H], scales [...] -> [..., H]"""
    if interleave:
        x = x.unflatten(-1, (-1, 2, interleave)).transpose(-3, -2).flatten(-3)
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset) * scales[..., None]


def assert_near(
    found: Tensor | None, want: Tensor | None, dtype: torch.dtype, scale: float = 1.0
) -> None:
    """Nothing where nothing is wanted; else within the tolerance of the dtype, for elements of
    order `scale`.
    """
    assert (found is None) == (want is None)
    if found is not None and want is not None:
        rtol, atol = NEAR[dtype]
        torch.testing.assert_close(found.double(), want.double(), rtol=rtol, atol=atol * scale)
