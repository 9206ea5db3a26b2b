"""Converters: what the float expert modules of other libraries become."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import nn

from ... import plugins
from ...encodings import Quantized, check_finite, has_values
from ...errors import Error, UnsupportedError
from ..config import NVFP4Config, QuantizationConfig
from ..frozen import PackedModule, Projections, QuantizedLinear, rounded
from .contract import contract_of, experts_from, need_contract
from .grouped import grouped_contract_of
from .register import Converter, registered_converter
from .traced_activation import is_that_of


def by_contract(
    experts: nn.Module, config: QuantizationConfig, weights: Sequence[Quantized] | None = None
) -> Projections:
    """Modules that `use_experts_implementation` of transformers describes. weights: those of both
    projections; None: in the format of the configuration, by its rule.
    """
    contract = need_contract(experts)
    up, down, *biases = (experts.get_parameter(name).detach() for name in contract.names)
    up_bias, down_bias = biases or (None, None)
    of_up, of_down = weights or (
        rounded(contract.up(up), config.encoding, 1 + contract.has_gate, scales=config.scales),
        rounded(contract.down(down), config.encoding, scales=config.scales),
    )
    result = experts_from(
        experts,
        of_up,
        of_down,
        None if up_bias is None else contract.up(up_bias),
        down_bias,
        config,
    )
    result.scales = config.scales
    return result


def linear_layer(linear: nn.Linear, config: QuantizationConfig) -> QuantizedLinear:
    """A linear layer of torch, weight [N, K]; activations stay in 16 bits."""
    weight = rounded(linear.weight[None], config.encoding, scales=config.scales)
    result = QuantizedLinear(weight.of(t[0] for t in weight), linear.bias)
    result.scales = config.scales
    return result


DECORATED = "experts that use_experts_implementation decorates, or grouped linear layers"


def converter_of(module: nn.Module) -> Converter | None:
    """The converter for a module's class or one of its base classes; None for any other module.
    Users' converters take precedence.
    """
    if own := getattr(type(module), "as_quantized", None):
        return own
    named = _named(module)
    if own := registered_converter(module):
        return own
    if held := next((c for find in plugins.by_contents if (c := find(module))), None):
        return held
    if callable(named):
        return named
    if type(module) is nn.Linear:  # a subclass may compute something else
        return linear_layer
    if contract_of(module):
        return by_contract
    contract = None if isinstance(named, str) else grouped_contract_of(module)
    return None if contract is None else contract.converted


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
    return {name: converter for ask in plugins.converters for name, converter in ask().items()}


def convert(
    module: nn.Module, config: QuantizationConfig | None = None, name: str = ""
) -> nn.Module:
    """The module of fusion_moe.nn that replaces another library's module.

    Parts that are not quantized (a router, a shared expert, a norm) are reused, not copied. Weights
    that are fake or on the meta device give weights of the same kind, for `fusion_moe.explain`.

    Args:
        module: the module to replace, which stays as it is.
        config: how experts are quantized and computed; None: `NVFP4Config()`.
        name: the module's name, for messages.

    Raises:
        UnsupportedError: for an unknown class, one that has no such format, or experts that a
            parallel plan divides.
        NonFiniteError: for NaN or infinite weights.
        ShapeError: for sizes that are not whole blocks of the format.
    """
    check(module, config, name)
    return converted(module, config, name)


def check(module: nn.Module, config: QuantizationConfig | None = None, name: str = "") -> None:
    """Raises the errors that `convert` would: converts a copy on the meta device, then checks the
    values.
    """
    copied = without_memory(module)
    _made(converter_of(module), copied, config, name)
    is_that_of(module, copied)
    dims = 2 if type(module) is nn.Linear else 3  # of the weights that are quantized
    for key, parameter in module.named_parameters():
        if parameter.dim() == dims and has_values(parameter.data):
            encoding = (config or NVFP4Config()).encoding
            check_finite(parameter.detach(), encoding, f"{name or type(module).__name__}.{key}")


def converted(
    module: nn.Module, config: QuantizationConfig | None = None, name: str = ""
) -> nn.Module:
    """The module that replaces one of known experts, as `convert` makes it, for a caller that has
    checked the weights' values. config: None is NVFP4; name: the module's, for messages.
    """
    return _made(converter_of(module), module, config, name)


def _made(
    converter: Converter | None, module: nn.Module, config: QuantizationConfig | None, name: str
) -> nn.Module:
    kind = type(module).__name__
    if converter is None:
        why = why_refused(module)
        raise UnsupportedError(
            f"{kind}: {why}" if why else f"no converter for {qualified(module)}",
            expected=DECORATED,
            todo=how_to_register(module),
            where=name or kind,
        )
    try:
        replacement = converter(module, config or NVFP4Config()).train(module.training)
    except Error as error:
        raise error.at(name or kind) from None
    encodings = [m.encoding for m in replacement.modules() if isinstance(m, PackedModule)]
    if config is not None and encodings != [config.encoding] * len(encodings):
        raise UnsupportedError(
            f"{kind}, which becomes {encodings[0].name}",
            expected=config.encoding.name,
            where=name or kind,
        )
    return replacement


def without_memory(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device. Everything else is shared."""
    result = copy.copy(module)
    result._parameters = {
        name: None if p is None else nn.Parameter(torch.empty_like(p, device="meta"), False)
        for name, p in module._parameters.items()
    }
    result._modules = {
        name: None if m is None else without_memory(m) for name, m in module._modules.items()
    }
    return result


def qualified(module: nn.Module) -> str:
    """The full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def how_to_register(module: nn.Module | None) -> str:
    """A converter of a module's class, or of some class, to be completed."""
    kind = "MyExperts" if module is None else type(module).__name__
    return (
        f"register one:\n    @fusion_moe.register_converter({kind})\n"
        "    def _(module, config):\n"
        "        return fusion_moe.NVFP4Experts.from_float(  # [E, 2I, H], gate above up; [E, H, I]"
        "\n            module.gate_up_proj, module.down_proj, config.activation_format\n        )"
    )
