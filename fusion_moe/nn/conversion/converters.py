"""Converters to NVFP4: what the float expert modules of other libraries become."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import nn

from ... import plugins
from ...encodings import NVFP4, Quantized, check_finite
from ...encodings.search import has_values
from ...errors import Error, UnsupportedError
from ..config import NVFP4Config
from ..frozen.base import quantized, rounded
from ..frozen.projections import Projections
from .contract import contract_of, experts_from, need_contract
from .register import Converter, registered_converter


def by_contract(
    experts: nn.Module, config: NVFP4Config, weights: Sequence[Quantized] | None = None
) -> Projections:
    """Modules that `use_experts_implementation` of transformers describes. weights: those of both
    projections; None: in NVFP4.
    """
    contract = need_contract(experts)
    up, down, *biases = (experts.get_parameter(name).detach() for name in contract.names)
    up_bias, down_bias = biases or (None, None)
    of_up, of_down = weights or (
        rounded(contract.up(up), NVFP4, 1 + contract.has_gate, scales=config.scales),
        quantized(contract.down(down), scales=config.scales),
    )
    made = experts_from(
        experts,
        of_up,
        of_down,
        None if up_bias is None else contract.up_rows(up_bias),
        down_bias,
        config,
    )
    made.scales = config.scales
    return made


DECORATED = "experts that use_experts_implementation decorates"


def converter_of(module: nn.Module) -> Converter | None:
    """The converter for a module's class or one of its base classes; None for any other module.
    Users' converters take precedence.
    """
    if own := getattr(type(module), "as_quantized", None):
        return own
    named = _named(module)
    if own := registered_converter(module):
        return own
    if callable(named):
        return named
    return by_contract if contract_of(module) else None


def why_refused(module: nn.Module) -> str:
    """Why experts of this class are not converted; "" for a class that is unknown or is
    converted.
    """
    named = _named(module)
    return named if isinstance(named, str) else ""


def _named(module: nn.Module) -> Converter | str | None:
    """What packages say of a module's class or one of its base classes: a converter, or why there
    is none.
    """
    table, names = _by_name(), (f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__)
    return next((table[name] for name in names if name in table), None)


@cache
def _by_name() -> Mapping[str, Converter | str]:
    """By names of classes: other libraries need not be imported to look at a model."""
    return {name: found for ask in plugins.converters for name, found in ask().items()}


def convert(module: nn.Module, config: NVFP4Config | None = None, name: str = "") -> nn.Module:
    """The module of fusion_moe.nn that replaces another library's module.

    Parts that are not quantized (a router, a shared expert, a norm) are reused, not copied. Weights
    that are fake or on the meta device give weights of the same kind, for `fusion_moe.explain`.

    Args:
        module: the module to replace, which stays as it is.
        config: how experts are quantized and computed; None: `NVFP4Config()`.
        name: the module's name, for messages.

    Raises:
        UnsupportedError: for an unknown class, or for experts that a parallel plan divides.
        NonFiniteError: for NaN or infinite weights.
        ShapeError: for sizes that are not multiples of 16.
    """
    check(module, config, name)
    return converted(module, config, name)


def check(module: nn.Module, config: NVFP4Config | None = None, name: str = "") -> None:
    """Raises the errors that `convert` would: converts a copy on the meta device, then checks the
    values.
    """
    converted(without_memory(module), config, name)
    for key, parameter in module.named_parameters():
        if parameter.dim() == 3 and has_values(parameter.data):  # the weights that are quantized
            check_finite(parameter.detach(), NVFP4, f"{name or type(module).__name__}.{key}")


def converted(module: nn.Module, config: NVFP4Config | None = None, name: str = "") -> nn.Module:
    """`convert` for weights whose values are already checked."""
    converter, kind = converter_of(module), type(module).__name__
    if converter is None:
        why = why_refused(module)
        raise UnsupportedError(
            f"{kind}: {why}" if why else f"no converter for {kind}",
            expected=f"{DECORATED}, or {known_names()}",
            todo="fusion_moe.register_converter adds a class",
            where=name or kind,
        )
    try:
        return converter(module, config or NVFP4Config()).train(module.training)
    except Error as error:
        raise error.at(name or kind) from None


def without_memory(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device. Everything else is shared."""
    made = copy.copy(module)
    made._parameters = {
        name: None if p is None else nn.Parameter(torch.empty_like(p, device="meta"), False)
        for name, p in module._parameters.items()
    }
    made._modules = {
        name: None if m is None else without_memory(m) for name, m in module._modules.items()
    }
    return made


def known_names() -> str:
    """The names of the classes that are converted by name."""
    found = (name for name, converter in _by_name().items() if not isinstance(converter, str))
    return ", ".join(sorted(name.rsplit(".", 1)[1] for name in found))
