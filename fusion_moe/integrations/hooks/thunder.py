"""thunder: the layers of its benchmarks, and what `explain` shows of `thunder.jit`'s results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ... import plugins
from ...messages import install
from ...nn import (
    GroupedSwiGLU,
    Llama4MoE,
    NVFP4Experts,
    NVFP4GroupedLinear,
    QuantizationConfig,
)
from ..thunder.packed_grouped import packed_converter, packed_gate_up, packed_weight

_LAYERS = "thunder.benchmarks.layers_for_inference_benchmark"


@plugins.converters
def converters() -> Mapping[str, Any]:
    """Converters of thunder's modules, by class names: thunder need not be imported to look at a
    model.
    """
    return {
        f"{_LAYERS}.GroupedLinear": _grouped_linear,
        f"{_LAYERS}.GroupedSwiGLU": _grouped_swiglu,
        f"{_LAYERS}.Llama4MoE": _llama4_moe,
    }


plugins.by_contents(packed_converter)


@plugins.compiled_by
def compiled_by(function: Callable[..., Any]) -> plugins.CompiledBy | None:
    """How `explain` looks into a function that thunder.jit returned: the function before, and what
    finds the regions that our executor fuses. None for any other function.
    """
    thunder: Any = sys.modules.get("thunder")  # imported already if it made anything
    compiled = thunder.compile_data(function) if thunder is not None else None
    if compiled is None:
        return None

    def look(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
        from ..thunder import found_in

        return found_in(function, args, kwargs, compiled.executors_list)

    return plugins.CompiledBy("thunder.jit", compiled.fn, look)


@plugins.packages
def packages() -> tuple[plugins.Package, ...]:
    """The packages that this integration needs: thunder itself."""
    why = "" if find_spec("thunder") else f"not installed; {install('thunder')} (torch before 2.13)"
    return (plugins.Package("thunder", "lightning-thunder", why),)


def _grouped_linear(linear: nn.Module, config: QuantizationConfig) -> nn.Module:
    """GroupedLinear: weight [G, N, K]"""
    weight = linear.get_parameter("weight").detach()
    return NVFP4GroupedLinear.from_float(weight, None, config.activation_format, config.scales)


def _grouped_swiglu(swiglu: nn.Module, config: QuantizationConfig) -> nn.Module:
    """GroupedSwiGLU: three GroupedLinear, gate_proj and up_proj [G, I, H], down_proj [G, H, I]"""
    return GroupedSwiGLU.from_float(*_projections(swiglu), config.activation_format, config.scales)


def _llama4_moe(moe: nn.Module, config: QuantizationConfig) -> nn.Module:
    """Llama4MoE: gate, a linear layer; routed_experts, a GroupedSwiGLU; shared_experts, one layer
    for all of them
    """
    routed = moe.get_submodule("routed_experts")
    if packed_converter(routed):  # what thunder quantized
        gate_up = packed_gate_up(*(routed.get_submodule(name) for name in ("gate_proj", "up_proj")))
        weights = gate_up, packed_weight(routed.get_submodule("down_proj"))
        experts = NVFP4Experts(*weights, config.activation_format, "input")
    else:
        gate, up, down = _projections(routed)
        experts = NVFP4Experts.from_float(
            torch.cat([gate, up], 1), down, config.activation_format, "input", config.scales
        )
    return Llama4MoE(moe.get_submodule("gate"), experts, moe.get_submodule("shared_experts"))


def _projections(swiglu: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (
        swiglu.get_parameter(f"{name}_proj.weight").detach() for name in ("gate", "up", "down")
    )
    return gate, up, down
