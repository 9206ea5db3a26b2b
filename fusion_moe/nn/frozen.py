"""What modules with quantized weights share: parameters that are not trained, and whose bytes survive a cast of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..formats import Quantized


def frozen(t: Tensor) -> nn.Parameter:
    """t as a parameter without a gradient."""
    return nn.Parameter(t.detach().contiguous(), requires_grad=False)


def quantized(x: Tensor) -> Quantized:
    """x float[..., N, K] -> nvfp4[..., N, K] with a decode scale for each matrix: the operation, which has kernels on the CPU."""
    return Quantized(*torch.ops.fusion_moe.nvfp4_quantize(x.detach()))


class FrozenModule(nn.Module):
    """A module whose own parameters are moved and never cast: a cast would change what their bytes mean. `castable` names exceptions."""

    castable: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: codes and scales."""
        return sum(p.numel() * p.element_size() for p in self.parameters(recurse=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenModule:
        fixed = [p for name, p in self._parameters.items() if name not in self.castable]

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if moved.dtype != t.dtype and any(t is p for p in fixed) else moved

        return super()._apply(keep_dtype, recurse)
