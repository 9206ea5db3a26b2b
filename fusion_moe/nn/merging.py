"""merge_lora_: adapters as part of the weights that they stand beside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..encodings import Quantized, check_finite, dequantize, matrix_scale_of, quantize
from ..errors import UnsupportedError
from .adaptable import AdaptableModule
from .lora import Adapter, adaptable, adapters_of
from .packed import relayout_


def merge_lora_(model: nn.Module, *, requantize: bool = False) -> list[str]:
    """Adds the adapters of a model to its weights, in place, and removes them. Returns what was merged.

    Float weights become W + alpha / rank * B @ A, in float32 and rounded once to their dtype. Weights of few bits would lose most of what
    was learned: UnsupportedError, unless requantize says to dequantize them, add, and quantize again with new scales. What trains stays as
    it is. UnsupportedError too for a model without adapters, NonFiniteError for NaN or infinity that would be quantized; a module is merged
    as a whole or not at all.
    """
    adapted = {name: module for name, module in adaptable(model, "merge_lora_").items() if module.adapted}
    if not adapted:
        raise UnsupportedError("no adapters", expected="a model that add_lora_ or load_lora_ gave some", where="merge_lora_")
    for name, module in adapted.items():
        if not module.encoding.plain and not requantize:
            raise UnsupportedError(
                f"adapters of {module.encoding.name} weights", expected="float weights: rounding to few bits loses what was learned",
                todo="merge_lora_(model, requantize=True) does it nevertheless; save_lora keeps adapters as they are", where=name,
            )  # fmt: skip
    return [full for name, module in adapted.items() for full in _merged(name, module)]


def _merged(name: str, module: AdaptableModule) -> list[str]:
    """Merges the adapters of one module; their projections' names."""
    layout, found = module.weight_layout, dict(adapters_of(module))
    relayout_(module, "linear")
    try:
        made = {projection: _sum(module.weight_of(projection), adapter, f"{name}.{projection}") for projection, adapter in found.items()}
        for projection, weight in made.items():
            for key, part in zip(module.part_names[projection], weight, strict=True):
                getattr(module, key).data.copy_(part)
            delattr(module, f"{projection}_lora")
    finally:
        relayout_(module, layout)
    return [f"{name}.{projection}" if name else projection for projection in found]


@torch.no_grad()
def _sum(weight: Quantized, adapter: Adapter, name: str) -> Quantized:
    """A weight [E, N, K] with its adapter, an expert at a time."""
    made = weight.of(torch.empty_like(part) for part in weight)
    for e in range(weight.shape[0]):
        expert = weight.of(part[e] for part in weight)
        new = _encoded(dequantize(expert) + adapter.delta(e), expert, name)
        for part, tensor in zip(made, new, strict=True):
            part[e] = tensor
    return made


def _encoded(x: Tensor, like: Quantized, name: str) -> Quantized:
    """x f32 [N, K] in the encoding of a matrix, with a scale for each of its runs of rows."""
    if like.encoding.plain:
        return quantize(x, encoding=like.encoding)
    check_finite(x, name)
    scales = [part for of, part in like.named() if of.of_matrix]
    if not scales:
        return quantize(x, encoding=like.encoding)
    runs = x.view(*scales[0].shape, -1, x.shape[-1])  # of a scale [], x itself
    return quantize(x, matrix_scale_of(runs, like.encoding), like.encoding)
