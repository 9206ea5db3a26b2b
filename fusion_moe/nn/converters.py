"""Other libraries' modules with expert weights in floating point, and what each becomes in NVFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..encodings import check_finite
from ..errors import Error, UnsupportedError
from .experts import NVFP4Experts
from .grouped import GroupedLinear, GroupedSwiGLU
from .llama4 import Llama4MoE


@dataclass(frozen=True)
class NVFP4Config:
    """How experts are quantized and computed. activation_format: "bf16" or "nvfp4" (compute capability 10.0 only)."""

    activation_format: str = "bf16"


Converter = Callable[[nn.Module, NVFP4Config], nn.Module]


def _qwen3_moe(experts: nn.Module, config: NVFP4Config) -> nn.Module:
    """transformers' Qwen3MoeExperts: gate_up_proj [E, 2I, H], gate above up; down_proj [E, H, I]"""
    _need_silu(experts.act_fn)
    return NVFP4Experts.from_float(_weight(experts, "gate_up_proj"), _weight(experts, "down_proj"), config.activation_format)


def _llama4_text_moe(moe: nn.Module, config: NVFP4Config) -> nn.Module:
    """transformers' Llama4TextMoe: gate_up_proj [E, H, 2I], gate before up, and down_proj [E, I, H], as x @ weight takes them"""
    _need_silu(moe.get_submodule("experts").act_fn)
    gate_up, down = (_weight(moe, f"experts.{name}").mT for name in ("gate_up_proj", "down_proj"))
    experts = NVFP4Experts.from_float(gate_up, down, config.activation_format, scale_on="input")
    return Llama4MoE(moe.get_submodule("router"), experts, moe.get_submodule("shared_expert"), int(moe.top_k))  # type: ignore[arg-type]


def _grouped_linear(linear: nn.Module, config: NVFP4Config) -> nn.Module:
    """thunder's GroupedLinear: weight [G, N, K]"""
    return GroupedLinear.from_float(_weight(linear, "weight"), None, config.activation_format)


def _grouped_swiglu(swiglu: nn.Module, config: NVFP4Config) -> nn.Module:
    """thunder's GroupedSwiGLU: three GroupedLinear, gate_proj and up_proj [G, I, H], down_proj [G, H, I]"""
    return GroupedSwiGLU.from_float(*_projections(swiglu), config.activation_format)


def _llama4_moe(moe: nn.Module, config: NVFP4Config) -> nn.Module:
    """thunder's Llama4MoE: gate, a linear layer; routed_experts, a GroupedSwiGLU; shared_experts, one layer for all of them"""
    gate, up, down = _projections(moe.get_submodule("routed_experts"))
    experts = NVFP4Experts.from_float(torch.cat([gate, up], 1), down, config.activation_format, scale_on="input")
    return Llama4MoE(moe.get_submodule("gate"), experts, moe.get_submodule("shared_experts"))


def _projections(swiglu: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (_weight(swiglu, f"{name}_proj.weight") for name in ("gate", "up", "down"))
    return gate, up, down


def _weight(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name).detach()


def _need_silu(act_fn: object) -> None:
    name = type(act_fn).__name__
    if name not in ("SiLU", "SiLUActivation"):
        raise UnsupportedError(f"activation {name}", expected="SiLU", todo="only SwiGLU experts are quantized")


# Class names and not classes: nothing is imported to look at a model that may not be its own.
CONVERTERS: dict[str, Converter] = {
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts": _qwen3_moe,
    "transformers.models.llama4.modeling_llama4.Llama4TextMoe": _llama4_text_moe,
    "thunder.benchmarks.layers_for_inference_benchmark.GroupedLinear": _grouped_linear,
    "thunder.benchmarks.layers_for_inference_benchmark.GroupedSwiGLU": _grouped_swiglu,
    "thunder.benchmarks.layers_for_inference_benchmark.Llama4MoE": _llama4_moe,
}


def converter_of(module: nn.Module) -> Converter | None:
    """What converts a module of this class, or of one that derives from it; None for any other."""
    names = (f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__)
    return next((CONVERTERS[name] for name in names if name in CONVERTERS), None)


def convert(module: nn.Module, config: NVFP4Config | None = None, name: str = "") -> nn.Module:
    """The module of fusion_moe.nn that takes the place of another library's. `name` is the module's, for messages.

    What is not quantized (a router, a shared expert) is taken over, not copied. Of weights on the meta device or fake ones come such,
    for `fusion_moe.explain`. UnsupportedError for a class that is not known,
    NonFiniteError for NaN or infinite weights, ShapeError for sizes that are no multiple of 16.
    """
    converter, where = converter_of(module), name or type(module).__name__
    if converter is None:
        known = ", ".join(known_names())
        raise UnsupportedError(f"no converter for {type(module).__name__}", expected=f"one of {known}", where=where)
    for key, parameter in module.named_parameters():
        has_values = not parameter.is_meta and not isinstance(parameter.data, FakeTensor)
        if parameter.dim() == 3 and has_values:  # what is quantized
            check_finite(parameter.detach(), f"{where}.{key}")
    try:
        return converter(module, config or NVFP4Config()).train(module.training)
    except Error as error:
        raise error.at(where) from None


def known_names() -> tuple[str, ...]:
    """The names of the classes that are converted."""
    return tuple(name.rsplit(".", 1)[1] for name in CONVERTERS)
