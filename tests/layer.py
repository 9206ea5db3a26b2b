"""A layer to be explained. Goldens name its lines."""

from __future__ import annotations

import torch
from experts import experts_of_ones
from torch import Tensor


class Layer(torch.nn.Module):
    """A layer of experts with a router and a residual sum, on the device in force."""

    def __init__(
        self, activation_format: str = "bf16", count: int = 4, hidden: int = 64, inner: int = 32
    ):
        super().__init__()
        self.router = torch.nn.Linear(hidden, count, dtype=torch.bfloat16)
        self.experts = experts_of_ones(count, hidden, inner, activation_format)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)
