"""Experts: their weights as floats, and quantized as a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusion_moe import NVFP4Experts


def float_weights(count: int, hidden: int, inner: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random gate_up f32[count, 2 * inner, hidden] and down f32[count, hidden, inner], of a trained
    model's size.
    """
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2 * inner, hidden, generator=g) / 8, torch.randn(
        count, hidden, inner, generator=g
    ) / 8


def experts(count: int, hidden: int, inner: int, seed: int = 0) -> NVFP4Experts:
    """Experts with random weights."""
    return NVFP4Experts.from_float(*float_weights(count, hidden, inner, seed))


def experts_of_ones(
    count: int, hidden: int, inner: int, activation_format: str = "bf16"
) -> NVFP4Experts:
    """Experts on the device in force, which may have no values."""
    return NVFP4Experts.from_float(
        torch.ones(count, 2 * inner, hidden), torch.ones(count, hidden, inner), activation_format
    )


def routed(count: int, hidden: int, tokens: int = 7, slots: int = 2) -> tuple[Tensor, ...]:
    """Tokens bf16[tokens, hidden], ids of their experts, out of `count`, and the router's
    weights.
    """
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, count, generator=g).argsort(-1)[:, :slots]
    return (
        torch.randn(tokens, hidden, generator=g).bfloat16(),
        ids,
        torch.rand(tokens, slots, generator=g),
    )


def copied(module: nn.Module) -> dict[str, Tensor]:
    """A state dict that no longer shares memory with its module."""
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def same_state(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts have the same tensors, byte for byte."""
    return list(a) == list(b) and all(
        a[name].shape == t.shape and as_bytes(a[name]).equal(as_bytes(t)) for name, t in b.items()
    )


def as_bytes(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).view(torch.uint8)
