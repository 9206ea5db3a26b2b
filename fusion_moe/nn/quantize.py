"""quantize_: the experts of a model, in place, from floating point to NVFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..errors import DeviceError, Error, UnsupportedError
from ..formats import check_finite
from ..progress import progress
from .experts import NVFP4Experts

Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class NVFP4Config:
    """How experts are quantized and computed. activation_format: "bf16" or "nvfp4" (compute capability 10.0 only)."""

    activation_format: str = "bf16"


def _qwen3_moe(experts: nn.Module, config: NVFP4Config) -> NVFP4Experts:
    """transformers' Qwen3MoeExperts: gate_up_proj [E, 2I, H], gate above up; down_proj [E, H, I]"""
    gate_up, down = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
    name = type(experts.act_fn).__name__
    if name not in ("SiLU", "SiLUActivation"):
        raise UnsupportedError(f"activation {name}", expected="SiLU", todo="only SwiGLU experts are quantized")
    return NVFP4Experts.from_float(gate_up.detach(), down.detach(), config.activation_format)


# Class names and not classes: transformers is not imported to look at a model that may not be its own.
CONVERTERS: dict[str, Callable[[nn.Module, NVFP4Config], NVFP4Experts]] = {
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts": _qwen3_moe,
}


def quantize_(model: nn.Module, config: NVFP4Config | None = None, filter_fn: Filter | None = None) -> None:
    """Replaces the experts of a model by NVFP4Experts, in place. Everything else stays as it is.

    filter_fn(module, name) says which experts; all without it. Fails before it changes anything: UnsupportedError if the model has no
    experts it knows, NonFiniteError for NaN or infinite weights, ShapeError for sizes that are no multiple of 16, each with the
    module's name. While it runs, the weights stand in memory in both forms.
    """
    config = config or NVFP4Config()
    found = {name: m for name, m in model.named_modules() if _converter(m) and (filter_fn is None or filter_fn(m, name))}
    if not found:
        _check_why_none(model, filter_fn)
    made = {name: _convert(name, m, config) for name, m in progress(found.items(), "quantizing experts", len(found))}
    for name, experts in made.items():
        model.set_submodule(name, experts)


def _convert(name: str, experts: nn.Module, config: NVFP4Config) -> NVFP4Experts:
    converter = _converter(experts)
    assert converter is not None
    for key, parameter in experts.named_parameters():
        if parameter.is_meta:
            raise DeviceError(f"{name}.{key} is on the meta device", expected="weights", todo="load the model before quantizing it")
        check_finite(parameter.detach(), f"{name}.{key}")
    try:
        return converter(experts, config).train(experts.training)
    except Error as error:
        raise error.at(name) from None


def _converter(module: nn.Module) -> Callable[[nn.Module, NVFP4Config], NVFP4Experts] | None:
    names = (f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__)
    return next((CONVERTERS[name] for name in names if name in CONVERTERS), None)


def _check_why_none(model: nn.Module, filter_fn: Filter | None) -> None:
    """Nothing to do is right for a model that is quantized already, and an error that says why for any other."""
    if any(isinstance(m, NVFP4Experts) for m in model.modules()):
        return
    others = {f"{name} ({type(m).__name__})" for name, m in model.named_modules() if any(p.dim() == 3 for p in m.parameters(recurse=False))}
    if filter_fn is not None and any(_converter(m) for m in model.modules()):
        raise UnsupportedError("filter_fn took none of the model's experts", expected="True for at least one", where=type(model).__name__)
    raise UnsupportedError(
        f"no experts that can be quantized; modules with 3-D weights: {', '.join(sorted(others)) or 'none'}",
        expected=f"one of {', '.join(name.rsplit('.', 1)[1] for name in CONVERTERS)}",
        todo="other architectures are not supported yet; NVFP4Experts.from_float makes the module from [E, 2I, H] and [E, H, I] weights",
        where=type(model).__name__,
    )
