"""Experts: their weights as floats, and quantized as a module."""

from __future__ import annotations

import torch
from torch import Tensor

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
