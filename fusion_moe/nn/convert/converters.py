"""Converters to NVFP4: what the float expert modules of other libraries become."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...encodings import NVFP4, check_finite
from ...errors import Error, UnsupportedError
from ..config import NVFP4Config
from ..frozen.base import quantized
from ..frozen.experts import NVFP4Experts, quantize_gate_up
from ..frozen.grouped import GroupedSwiGLU, NVFP4GroupedLinear
from ..frozen.llama4 import Llama4MoE
from .contract import contract_of, experts_from, need_contract
from .register import Converter, registered_converter

T = TypeVar("T")


def _by_contract(experts: nn.Module, config: NVFP4Config) -> nn.Module:
    """Modules that transformers' `use_experts_implementation` describes."""
    contract = need_contract(experts)
    up, down = (
        contract.up(_weight(experts, contract.up_name)),
        contract.down(_weight(experts, "down_proj")),
    )
    up_bias, down_bias = (
        (_weight(experts, name) for name in contract.names[2:])
        if contract.has_bias
        else (None, None)
    )
    if up_bias is not None:
        up_bias = contract.up_rows(up_bias)
    return experts_from(
        experts,
        quantize_gate_up(up) if contract.has_gate else quantized(up),
        quantized(down),
        up_bias,
        down_bias,
        config,
    )


def _llama4_text_moe(moe: nn.Module, config: NVFP4Config) -> nn.Module:
    """transformers' Llama4TextMoe: gate_up_proj [E, H, 2I], gate before up, and down_proj [E, I,
    H], as in x @ weight
    """
    _need_silu(moe.get_submodule("experts").act_fn)
    gate_up, down = (_weight(moe, f"experts.{name}").mT for name in ("gate_up_proj", "down_proj"))
    experts = NVFP4Experts.from_float(gate_up, down, config.activation_format, scale_on="input")
    router, shared_expert = moe.get_submodule("router"), moe.get_submodule("shared_expert")
    return Llama4MoE(router, experts, shared_expert, int(moe.top_k))  # type: ignore[arg-type]


def _grouped_linear(linear: nn.Module, config: NVFP4Config) -> nn.Module:
    """thunder's GroupedLinear: weight [G, N, K]"""
    return NVFP4GroupedLinear.from_float(_weight(linear, "weight"), None, config.activation_format)


def _grouped_swiglu(swiglu: nn.Module, config: NVFP4Config) -> nn.Module:
    """thunder's GroupedSwiGLU: three GroupedLinear, gate_proj and up_proj [G, I, H], down_proj [G,
    H, I]
    """
    return GroupedSwiGLU.from_float(*_projections(swiglu), config.activation_format)


def _llama4_moe(moe: nn.Module, config: NVFP4Config) -> nn.Module:
    """thunder's Llama4MoE: gate, a linear layer; routed_experts, a GroupedSwiGLU; shared_experts,
    one layer for all of them
    """
    gate, up, down = _projections(moe.get_submodule("routed_experts"))
    experts = NVFP4Experts.from_float(
        torch.cat([gate, up], 1), down, config.activation_format, scale_on="input"
    )
    return Llama4MoE(moe.get_submodule("gate"), experts, moe.get_submodule("shared_experts"))


def _projections(swiglu: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (_weight(swiglu, f"{name}_proj.weight") for name in ("gate", "up", "down"))
    return gate, up, down


def _weight(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name).detach()


def _need_silu(act_fn: object) -> None:
    name = type(act_fn).__name__
    if name not in ("SiLU", "SiLUActivation"):
        raise UnsupportedError(
            f"activation {name}", expected="SiLU", todo="only SwiGLU experts are quantized"
        )


# Class names instead of classes: other libraries need not be imported to look at a model.
CONVERTERS: dict[str, Converter] = {
    "transformers.models.llama4.modeling_llama4.Llama4TextMoe": _llama4_text_moe,
    "thunder.benchmarks.layers_for_inference_benchmark.GroupedLinear": _grouped_linear,
    "thunder.benchmarks.layers_for_inference_benchmark.GroupedSwiGLU": _grouped_swiglu,
    "thunder.benchmarks.layers_for_inference_benchmark.Llama4MoE": _llama4_moe,
}

# Experts that have no converter and do not follow the contract (contract.py), and the reasons.
REFUSED = {
    "transformers.models.dbrx.modeling_dbrx.DbrxExperts": "its weights are [E * I, H], and down "
    "is not the transpose of the others",
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": "attention has experts "
    "too, one product each",
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": "some experts "
    "have no weights and return what they get",
    "transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeExperts": "each expert is a module of "
    "its own, without a gate",
    "transformers.models.step3p7.modeling_step3p7.Step3p7Experts": "the gate is clamped after its "
    "activation",
    "transformers.models.switch_transformers.modeling_switch_transformers."
    "SwitchTransformersExperts": "each expert is a module of its own, without a gate",
}
DECORATED = "experts that transformers' use_experts_implementation decorates"


def converter_of(module: nn.Module) -> Converter | None:
    """The converter for a module's class or one of its base classes; None for any other module.
    Users' converters take precedence.
    """
    return (
        registered_converter(module)
        or _named(module, CONVERTERS)
        or (_by_contract if contract_of(module) else None)
    )


def why_refused(module: nn.Module) -> str:
    """Why experts of this class are not converted; "" for a class that is unknown or is
    converted.
    """
    return _named(module, REFUSED) or ""


def _named(module: nn.Module, table: Mapping[str, T]) -> T | None:
    """The entry of a table for a module's class or one of its base classes."""
    names = (f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__)
    return next((table[name] for name in names if name in table), None)


def convert(module: nn.Module, config: NVFP4Config | None = None, name: str = "") -> nn.Module:
    """The module of fusion_moe.nn that replaces another library's module. name: the module's name,
    for messages.

    Parts that are not quantized (a router, a shared expert, a norm) are reused, not copied. Weights
    that are fake or on the meta device give weights of the same kind, for `fusion_moe.explain`.
    UnsupportedError for an unknown class, or for experts that a parallel plan divides;
    NonFiniteError for NaN or infinite weights; ShapeError for sizes that are not multiples of 16.
    """
    _need_converter(module, name)
    _check_values(module, name)
    return converted(module, config, name)


def check(module: nn.Module, config: NVFP4Config | None = None, name: str = "") -> None:
    """Raises the errors that `convert` would: converts a copy on the meta device, then checks the
    values.
    """
    converted(_without_memory(module), config, name)
    _check_values(module, name)


def _check_values(module: nn.Module, name: str) -> None:
    for key, parameter in module.named_parameters():
        has_values = not parameter.is_meta and not isinstance(parameter.data, FakeTensor)
        if parameter.dim() == 3 and has_values:  # the weights that are quantized
            check_finite(parameter.detach(), NVFP4, f"{name or type(module).__name__}.{key}")


def converted(module: nn.Module, config: NVFP4Config | None = None, name: str = "") -> nn.Module:
    """`convert` for weights whose values are already checked."""
    converter = _need_converter(module, name)
    try:
        return converter(module, config or NVFP4Config()).train(module.training)
    except Error as error:
        raise error.at(name or type(module).__name__) from None


def _need_converter(module: nn.Module, name: str) -> Converter:
    converter = converter_of(module)
    if converter is None:
        todo = "fusion_moe.register_converter adds a class"
        raise UnsupportedError(
            _what(module),
            expected=f"{DECORATED}, or {known_names()}",
            todo=todo,
            where=name or type(module).__name__,
        )
    return converter


def _what(module: nn.Module) -> str:
    why = why_refused(module)
    return f"{type(module).__name__}: {why}" if why else f"no converter for {type(module).__name__}"


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device. Everything else is shared."""
    made = copy.copy(module)
    made._parameters = {
        name: None if p is None else _on_meta(p) for name, p in module._parameters.items()
    }
    made._modules = {
        name: None if m is None else _without_memory(m) for name, m in module._modules.items()
    }
    return made


def _on_meta(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p.detach(), device="meta"), requires_grad=False)


def known_names() -> str:
    """The names of the classes that are converted by name."""
    return ", ".join(name.rsplit(".", 1)[1] for name in CONVERTERS)
