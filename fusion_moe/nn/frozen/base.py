"""Common base of modules with quantized weights: parameters that are not trained, whose bytes
survive a cast of the model.

On the CPU they lie on large pages (runtime/host_memory/pages.py). Quantizing
writes directly there; a tensor from elsewhere is copied there by itself, so that a module made of
several tensors never holds a second copy of all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...encodings import NVFP4, Quantized
from ...errors import UnsupportedError
from ...runtime.host_memory import pages

_PANEL = 2**24  # how many elements are quantized at once


def frozen(t: Tensor) -> nn.Parameter:
    """t as a parameter without a gradient."""
    return nn.Parameter(pages.on_large_pages(t.detach()), requires_grad=False)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """As `parameters(recurse=False)`, but not what a wrapper does first
    (`PackedModule.named_parameters`).
    """
    return [p for p in module._parameters.values() if p is not None]


def place_(module: nn.Module) -> None:
    """Puts the parameters of a module where `frozen` would have put them. Those already there, or
    in shared memory, stay.
    """
    for p in own_parameters(module):
        if pages.takes(p) and not p.is_shared():
            with torch.inference_mode(p.is_inference()):
                p.data = pages.on_large_pages(p.data)


def quantized(x: Tensor) -> Quantized:
    """x float[G, ..., N, K] -> nvfp4[G, ..., N, K] with a decode scale for each matrix: by the
    operation, which has CPU kernels.

    On the CPU a few of the G groups are quantized at a time, so that quantizing needs little memory
    besides the result.
    """
    x, quantize = x.detach(), torch.ops.fusion_moe.nvfp4_quantize
    if x.dim() < 3 or not pages.takes(x) or x.numel() // 2 < pages.PAGE:
        return Quantized(*quantize(x), encoding=NVFP4)
    *lead, n, k = x.shape
    weight = Quantized(
        *(pages.empty(NVFP4.part_shape(part, lead, n, k), part.dtype) for part in NVFP4.parts),
        encoding=NVFP4,
    )
    step = max(1, _PANEL * len(x) // x.numel())
    for start in range(0, len(x), step):
        some = slice(start, start + step)
        for part, panel in zip(weight, quantize(x[some]), strict=True):
            part[some] = panel
    return weight


class FrozenModule(nn.Module):
    """A module whose own tensors move but are never cast: a cast would change what their bytes
    mean. `castable` names exceptions.
    """

    castable: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: codes and scales."""
        return sum(t.nbytes for t in (*own_parameters(self), *self.buffers(recurse=False)))

    def requires_grad_(self, requires_grad: bool = True) -> FrozenModule:
        """As torch's; UnsupportedError for a request to train codes."""
        if requires_grad and not all(p.is_floating_point() for p in own_parameters(self)):
            todo = "train weights in floating point, and quantize them then: docs/training.md"
            raise UnsupportedError(
                "quantized weights do not train",
                expected="requires_grad_(False)",
                todo=todo,
                where=type(self).__name__,
            )
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenModule:
        fixed = [
            t
            for name, t in (*self._parameters.items(), *self._buffers.items())
            if name not in self.castable
        ]

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            if not any(t is p for p in fixed):
                return moved
            kept = t.to(moved.device) if moved.dtype != t.dtype else moved
            return pages.on_large_pages(kept) if kept.device != t.device else kept

        return super()._apply(keep_dtype, recurse)
