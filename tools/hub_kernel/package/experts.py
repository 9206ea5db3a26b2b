"""Experts of transformers' models with weights in 4 bits.

A module whose forward is called here keeps its floats, so that it can train and be saved as before;
rounded weights lie beside them, made at the first call and again when the floats change.
`quantize_` replaces modules, which frees the floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import options, plugins
from .encodings import Quantized, dequantize as _dequantize, find, quantize_weight
from .errors import UnsupportedError, need_one_of
from .nn import convert, quantize_
from .nn.config import CONFIGS
from .runtime.precompile import NOTED

__all__ = ["FORMATS", "dequantize", "experts_forward", "quantize", "quantize_", "register_experts"]

FORMATS = "nvfp4", "mxfp4", "int4"
_KEPT = "_rounded_experts"


def experts_forward(
    weight_format: str,
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The experts of a module with its weights rounded: hidden_states [T, H], top_k_index int[T,
    k], top_k_weights [T, k] -> [T, H].
    """
    if module.training and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{type(module).__name__} in training",
            expected="inference, since no gradient reaches rounded weights",
            todo="model.eval(), or train with transformers' own experts",
            where=weight_format,
        )
    rounded = getattr(module, _KEPT, (("",), None))
    if torch.compiler.is_compiling():
        if rounded[0][0] != weight_format:  # an error of ours cannot be traced
            raise RuntimeError("weights are not rounded: call the model once before compiling it")
    elif rounded[0] != _state(weight_format, module):
        rounded = _round(weight_format, module)
    return rounded[1](hidden_states, top_k_index, top_k_weights)


def _state(weight_format: str, module: nn.Module) -> tuple[Any, ...]:
    """What rounded weights are made of; writes through `.data` are not seen."""
    of_floats = (
        (p.data_ptr(), 0 if p.is_inference() else p._version)
        for p in module._parameters.values()
        if p is not None
    )
    return (weight_format, *of_floats)


def _round(weight_format: str, module: nn.Module) -> tuple[Any, nn.Module]:
    with torch.no_grad(), options.during(NOTED, None):  # not zeros where kernels are prepared
        experts = convert(module, CONFIGS[weight_format]()).eval()
    setattr(module, _KEPT, rounded := (_state(weight_format, module), experts))  # no submodule
    return rounded


def register_experts() -> tuple[str, ...]:
    """Gives transformers' experts interface a name for each format -> the names.
    `from_pretrained(..., experts_implementation=name)` and `set_experts_implementation(name)` take
    them.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    names = {f"fusion_moe_{name}": partial(experts_forward, name) for name in FORMATS}
    for name, function in names.items():
        ALL_EXPERTS_FUNCTIONS.register(name, function)
    return tuple(names)


def quantize(
    weight: Tensor, weight_format: str = "nvfp4", scales: str | None = None
) -> list[Tensor]:
    """weight float[G, N, K] -> its parts, as `grouped_mm` and `fused_experts` take them: codes and
    scales. scales: "max" or "mse", by the largest element or the least squared error of a block;
    None: as layers do.
    """
    need_one_of("weight_format", weight_format, FORMATS, where="quantize")
    rule = scales or CONFIGS[weight_format]().scales
    return list(quantize_weight(weight, find(weight_format), None, rule))


def dequantize(
    parts: Sequence[Tensor], weight_format: str = "nvfp4", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The parts of a weight -> dtype[G, N, K]."""
    need_one_of("weight_format", weight_format, FORMATS, where="dequantize")
    return _dequantize(Quantized(*parts, encoding=find(weight_format)), dtype)


@plugins.quantized
def _refuse_to_save(model: Any) -> None:
    """The parameters of quantized experts would be written under names that nothing reads."""

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"a {type(model).__name__} with experts in 4 bits",
            expected="experts in floating point",
            todo="the package fusion_moe writes checkpoints of quantized models",
            where="save_pretrained",
        )

    if hasattr(model, "save_pretrained"):
        model.save_pretrained = save_pretrained
