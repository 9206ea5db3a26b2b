"""merge_lora_, remove_lora_: merge adapters into the weights that they belong to, or remove
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..encodings import check_finite, dequantize
from ..errors import UnsupportedError
from ..nn.frozen import AdaptableModule, PackedModule, Weight
from .adapter import adapted, adapters_of

Delta = Callable[[int], Tensor]


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
        NonFiniteError: for NaN or infinity.
    """
    modules = adapted(model, "merge_lora_")
    for name, module in modules.items():
        if not module.encoding.plain and not requantize:
            raise UnsupportedError(
                f"adapters of {module.encoding.name} weights",
                expected="float weights: rounding to few bits loses what was learned",
                todo="merge_lora_(model, requantize=True) does it nevertheless; save_lora keeps "
                "adapters as they are",
                where=name,
            )
    merged = []
    for name, module in modules.items():
        add_(module, {p: adapter.delta for p, adapter in adapters_of(module)}, name)
        merged += _removed(name, module)
    return merged


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
        for name, module in adapted(model, "remove_lora_").items()
        for full in _removed(name, module)
    ]


def _removed(name: str, module: AdaptableModule) -> list[str]:
    """Removes the adapters of one module; returns the names of their projections."""
    projections = [projection for projection, _ in adapters_of(module)]
    for projection in projections:
        delattr(module, f"{projection}_lora")
    return [f"{name}.{projection}" if name else projection for projection in projections]


@torch.no_grad()
def add_(module: PackedModule, deltas: Mapping[str, Delta], where: str) -> Tensor:
    """Adds delta(e), f32 [N, K], to each matrix e of some weights, in place, and rounds once to
    their encoding. All of them change, or none.

    Returns the squared norms of what rounding lost and of what was added: f32 [2].
    """
    sums = {name: _sum(module, name, delta, f"{where}.{name}") for name, delta in deltas.items()}
    write_(module, {name: merged for name, (merged, _) in sums.items()})
    return torch.stack([norms for _, norms in sums.values()]).sum(0)


def write_(module: PackedModule, weights: Mapping[str, Sequence[Tensor]]) -> None:
    """Gives weights the parts that they are stored as."""
    for name, parts in weights.items():
        for stored, part in zip(module.weight_of(name), parts, strict=True):
            stored.data.copy_(part)
    if isinstance(module, AdaptableModule):
        module.renew()


def _sum(
    module: PackedModule, name: str, delta: Delta, where: str
) -> tuple[Sequence[Tensor], Tensor]:
    """A weight plus delta, as the weight is stored, computed one matrix at a time; with the norms
    of `add_`.
    """
    weight = module.value_of(name)
    form = replace(weight.form, runs=module.rounded_runs(name))
    merged = Weight([torch.empty_like(t) for t in weight.natural], form)
    norms = torch.zeros(2, device=merged.parts[0].device)
    for e, (old, new) in enumerate(zip(weight.matrices(), merged.matrices(), strict=True)):
        added = delta(e).to(norms.device)
        total = dequantize(old.linear) + added
        check_finite(total, form.encoding, where)
        Weight.of_numbers(total).to(form, new.parts, scales=module.scales)
        error = dequantize(new.linear) - total
        norms += torch.stack([error.square().sum(), added.square().sum()])
    return merged.parts, norms
