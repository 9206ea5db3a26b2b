"""merge_lora_, remove_lora_: merge adapters into the weights that they belong to, or remove
them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...encodings import (
    Quantized,
    check_finite,
    dequantize,
    matrix_scale_of,
    quantize,
)
from ...errors import UnsupportedError
from ..frozen.adaptable import AdaptableModule
from ..frozen.packed import relayout_
from .adapter import Adapter, adaptable, adapters_of


def merge_lora_(model: nn.Module, *, requantize: bool = False) -> list[str]:
    """Adds the adapters of a model to its weights, in place, and removes them.

    Float weights become W + alpha / rank * B @ A, computed in float32 and rounded once to their
    dtype. `requires_grad` of other parameters does not change. A module is merged as a whole or not
    at all.

    Args:
        model: a model with adapters.
        requantize: quantized weights are dequantized, added to, and quantized again with new
            scales, which loses most of what was learned.

    Returns:
        The names of the modules that it merged.

    Raises:
        UnsupportedError: for a model without adapters, or with quantized weights unless
            `requantize` is True.
        NonFiniteError: for NaN or infinity that would be quantized.
    """
    adapted = _adapted(model, "merge_lora_")
    for name, module in adapted.items():
        if not module.encoding.plain and not requantize:
            raise UnsupportedError(
                f"adapters of {module.encoding.name} weights",
                expected="float weights: rounding to few bits loses what was learned",
                todo="merge_lora_(model, requantize=True) does it nevertheless; save_lora keeps "
                "adapters as they are",
                where=name,
            )
    return [full for name, module in adapted.items() for full in _merged(name, module)]


def remove_lora_(model: nn.Module) -> list[str]:
    """Removes the adapters of a model, in place: it then computes what it did before `add_lora_`.

    Weights do not change, nor does `requires_grad` of other parameters: after `add_lora_`, nothing
    trains.

    Returns:
        The names of the modules that had one.

    Raises:
        UnsupportedError: for a model without adapters.
    """
    return [
        full
        for name, module in _adapted(model, "remove_lora_").items()
        for full in _removed(name, module)
    ]


def _adapted(model: nn.Module, where: str) -> dict[str, AdaptableModule]:
    """The modules that have adapters, by name. UnsupportedError if there are none."""
    modules = {name: module for name, module in adaptable(model, where).items() if module.adapted}
    if not modules:
        raise UnsupportedError(
            "no adapters", expected="a model that add_lora_ or load_lora_ gave some", where=where
        )
    return modules


def _removed(name: str, module: AdaptableModule) -> list[str]:
    """Removes the adapters of one module; returns the names of their projections."""
    projections = [projection for projection, _ in adapters_of(module)]
    for projection in projections:
        delattr(module, f"{projection}_lora")
    return [f"{name}.{projection}" if name else projection for projection in projections]


def _merged(name: str, module: AdaptableModule) -> list[str]:
    """Merges the adapters of one module; returns the names of their projections."""
    layout = module.weight_layout
    relayout_(module, "linear")
    try:
        merged = {
            p: _sum(module.weight_of(p), adapter, f"{name}.{p}")
            for p, adapter in adapters_of(module)
        }
        for projection, weight in merged.items():
            for stored, part in zip(module.weight_of(projection), weight, strict=True):
                stored.data.copy_(part)
    finally:
        relayout_(module, layout)
    return _removed(name, module)


@torch.no_grad()
def _sum(weight: Quantized, adapter: Adapter, name: str) -> Quantized:
    """A weight [E, N, K] plus its adapter, computed one expert at a time."""
    merged = weight.of(torch.empty_like(part) for part in weight)
    for e in range(weight.shape[0]):
        expert = weight.of(part[e] for part in weight)
        new = _encoded(dequantize(expert) + adapter.delta(e), expert, name)
        for part, tensor in zip(merged, new, strict=True):
            part[e] = tensor
    return merged


def _encoded(x: Tensor, like: Quantized, name: str) -> Quantized:
    """x f32 [N, K] in the encoding of a matrix of `like`, with a scale for each of its runs of
    rows.
    """
    if like.encoding.plain:
        return quantize(x, like.encoding)
    check_finite(x, like.encoding, name)
    scales = [part for of, part in like.named() if of.of_matrix]
    if not scales:
        return quantize(x, like.encoding)
    runs = x.view(*scales[0].shape, -1, x.shape[-1])  # for a scale [], x itself
    return quantize(x, like.encoding, matrix_scale_of(runs, like.encoding))
