"""merge_lora_, remove_lora_: merge adapters into the weights that they belong to, or remove
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...encodings import Quantized, check_finite, dequantize, matrix_scale_of, quantize
from ...errors import UnsupportedError
from ..frozen.adaptable import AdaptableModule
from ..frozen.packed import PackedModule, packing_of
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
    write_(module, {name: made for name, (made, _) in sums.items()})
    return torch.stack([norms for _, norms in sums.values()]).sum(0)


def write_(module: PackedModule, weights: Mapping[str, Sequence[Tensor]]) -> None:
    """Gives weights the parts that they are stored as."""
    for name, parts in weights.items():
        for stored, part in zip(module.weight_of(name), parts, strict=True):
            stored.data.copy_(part)
    if isinstance(module, AdaptableModule):
        module.renew()


def _sum(module: PackedModule, name: str, delta: Delta, where: str) -> tuple[Quantized, Tensor]:
    """A weight plus delta, as the weight is stored, computed one matrix at a time; with the norms
    of `add_`.
    """
    weight, packing = module.weight_of(name), packing_of(module, name)
    made = weight.of(torch.empty_like(part) for part in weight)
    stack = len(weight.shape) > 2
    norms = torch.zeros(2, device=made[0].device)
    for e in range(weight.shape[0] if stack else 1):
        parts, new = ([t[e] if stack else t for t in both] for both in (weight, made))
        old = weight.of(packing.unpack(parts, weight.encoding))
        added = delta(e).to(made[0].device)
        total = dequantize(old) + added
        rounded = _encoded(total, old, module.rounded_runs(name), module.scales, where)
        norms += torch.stack([(dequantize(rounded) - total).square().sum(), added.square().sum()])
        for t, part in zip(new, packing.pack(rounded, weight.encoding), strict=True):
            t.copy_(part)
    return made, norms


def _encoded(x: Tensor, like: Quantized, runs: int, rule: str, name: str) -> Quantized:
    """x f32 [N, K] in the encoding of a matrix of `like`, so many runs of its rows by themselves;
    rule: for the scales of blocks.
    """
    check_finite(x, like.encoding, name)
    scales = [part for of, part in like.named() if of.of_matrix]
    if not scales:
        made = quantize(x.unflatten(0, (runs, -1)), like.encoding, scales=rule)
        return made.of(t.flatten(0, 1) for t in made)
    by_scale = x.view(*scales[0].shape, -1, x.shape[-1])  # for a scale [], x itself
    return quantize(x, like.encoding, matrix_scale_of(by_scale, like.encoding), rule)
