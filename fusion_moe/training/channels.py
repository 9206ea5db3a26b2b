"""What stands beside layers in a Sequential: tensors that leave it and come back, and small steps.

A channel is a name under which a Sequential keeps a tensor from one of its modules for a later one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MakeExtraOutput(nn.Module):
    """x -> x, which a Sequential also keeps in a channel or, without one, returns beside its
    result.
    """

    def __init__(self, channel: str | None = None):
        super().__init__()
        self.channel = channel

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> x"""
        return x

    def extra_repr(self) -> str:
        """For print(model)."""
        return self.channel or ""


class AddExtraInput(MakeExtraOutput):
    """x + extra, which a Sequential takes from a channel or, without one, from its arguments."""

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:  # type: ignore[override]
        """x [...], extra [...] -> their sum"""
        return x + extra


class ConstantScale(nn.Module):
    """x * scale, a number."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]"""
        return x * self.scale

    def extra_repr(self) -> str:
        """For print(model)."""
        return str(self.scale)


class Bias(nn.Module):
    """x [..., size] + bias [size], which begins as zeros."""

    def __init__(
        self,
        size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        return x + self.bias

    def extra_repr(self) -> str:
        """For print(model)."""
        return str(len(self.bias))


class Reshape(nn.Module):
    """x in another shape, of which one size may be -1."""

    def __init__(self, *shape: int):
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [*shape]"""
        return x.reshape(self.shape)

    def extra_repr(self) -> str:
        """For print(model)."""
        return ", ".join(map(str, self.shape))
