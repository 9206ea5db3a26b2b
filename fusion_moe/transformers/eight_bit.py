"""Linear layers with weights stored in 8-bit floats: loaded as they are, then replaced by linear layers in the model's dtype."""

from __future__ import annotations

import torch
from torch import nn

from ..checkpoints import Entry
from ..checkpoints.fp8 import dequantize_fp8


class EightBitLinear(nn.Module):
    """Placeholder for a linear layer while its weight float8_e4m3fn [N, K] and the weight's scale are loaded. It is never called."""

    def __init__(self, shape: tuple[int, ...], scale: Entry, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(scale.shape, dtype=scale.dtype), requires_grad=False)
        self.bias, self.dtype = linear.bias, linear.weight.dtype

    def linear(self) -> nn.Linear:
        """The layer: its weight is values times scale in float32, rounded to the model's dtype."""
        made = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=False, device="meta")
        weight = dequantize_fp8(self.weight.detach(), self.weight_scale.detach()).to(self.dtype)
        made.weight = nn.Parameter(weight, requires_grad=False)
        made.bias = self.bias
        return made


def to_floats_(model: nn.Module) -> None:
    """Replaces all placeholders in a model, one after the other."""
    for name, module in list(model.named_modules()):
        if isinstance(module, EightBitLinear):
            model.set_submodule(name, module.linear())
