"""What changes elsewhere in PEFT for encoded weights: which layer it makes of a module, what
"all-linear" names, how adapters of add_lora_ become its own, what merging loses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import peft.tuners.lora.model
import peft.tuners.tuners_utils
import peft.utils.transformers_weight_conversion
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ...errors import UnsupportedError
from ...lora.adapter import adapters_of
from ...messages import log
from ...nn import QuantizedLinear
from ...nn.frozen import AdaptableModule, PackedModule
from ...options import during
from ...plugins import wrap
from .layers import Linear, ParamWrapper, losses

OLDEST = (0, 21)


def install() -> None:
    """Changes the functions of PEFT that this file wraps. UnsupportedError for older versions than
    the oldest that has them.
    """
    if tuple(map(int, peft.__version__.split(".")[:2])) < OLDEST:
        raise UnsupportedError(f"PEFT {peft.__version__}", expected="0.21 or newer")
    for owner, name, around in _CHANGED:
        wrap(owner, name, around)


def _dispatch(
    theirs: Callable[..., Any],
    target: nn.Module,
    adapter_name: str,
    config: Any,
    parameter_name: str | None = None,
    **kwargs: Any,
) -> Any:
    """PEFT's layer around a module, ours around one of fusion_moe.nn."""
    base = _base(target)
    kwargs |= {"config": config}
    if isinstance(base, AdaptableModule) and base.fixed and base.adapters_on is None:
        raise UnsupportedError(
            f"adapters for {kwargs.get('target_name')}",
            expected=base.fixed,
            where="get_peft_model",
        )
    if isinstance(base, AdaptableModule) and parameter_name is not None:
        return ParamWrapper(target, adapter_name, parameter_name=parameter_name, **kwargs)
    if isinstance(base, QuantizedLinear) and parameter_name is None:
        return Linear(target, adapter_name, **kwargs)
    if not isinstance(base, PackedModule):
        return theirs(target, adapter_name, parameter_name=parameter_name, **kwargs)
    raise UnsupportedError(
        f"{kwargs.get('target_name')} in "
        f"{'target_modules' if parameter_name is None else 'target_parameters'}",
        expected="linear layers in target_modules, weights of experts in target_parameters",
        where=type(base).__name__,
    )


def _all_linear(theirs: Callable[..., Any], config: Any, model: nn.Module) -> Any:
    """Makes "all-linear" of a LoRA include encoded linear layers but the head, and all experts'
    weights.
    """
    before = getattr(config, "target_modules", None)
    config = theirs(config, model)
    if not isinstance(before, str) or config.target_modules is before or config.peft_type != "LORA":
        return config
    head = getattr(model, "get_output_embeddings", lambda: None)()
    named = [(name, module) for name, module in model.named_modules() if module is not head]
    config.target_modules |= {name for name, m in named if isinstance(m, QuantizedLinear)}
    experts = [
        f"{name.replace('.base_layer', '')}.{parts[0]}"
        for name, m in named
        if isinstance(m, AdaptableModule) and not any(adapters_of(m))
        for parts in m.part_names.values()
    ]
    config.target_parameters = sorted({*(config.target_parameters or ()), *experts}) or None
    return config


# Adapters of add_lora_ ----------------------------------------------------------------------------


def add(
    model: nn.Module,
    places: Sequence[tuple[str, str]],
    rank: int,
    alpha: float,
    dtype: torch.dtype,
) -> list[ParamWrapper] | None:
    """Adds weights of experts to the adapter of a model that PEFT has adapted; None for any other
    model. UnsupportedError for an adapter that is not LoRA, or has dropout.
    """
    roots = [(name, m) for name, m in model.named_modules() if "peft_config" in vars(m)]
    if not roots:
        return None
    name, root = roots[-1]  # PeftModel and the tuner are around the model
    layers = (m for m in root.modules() if isinstance(m, BaseTunerLayer))
    active = next((m.active_adapters[0] for m in layers if m.active_adapters), "default")
    within = f"{name}." if name else ""
    return [
        _wrap(root, active, place.removeprefix(within), projection, rank, alpha, dtype)
        for place, projection in places
    ]


def _wrap(
    root: nn.Module,
    adapter_name: str,
    place: str,
    projection: str,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
) -> ParamWrapper:
    """Puts one more layer of PEFT around a module, and into the configuration."""
    configs: Any = root.peft_config
    config = configs[adapter_name]
    _need_exact(config)
    target = root.get_submodule(place)
    parameter = _base(target).part_names[projection][0]
    key = f"{place}.{parameter}"
    alpha = alpha / math.sqrt(rank) if config.use_rslora else alpha
    alpha = int(alpha) if alpha.is_integer() else alpha
    wrapper = ParamWrapper(
        target,
        adapter_name,
        parameter_name=parameter,
        config=config,
        r=rank,
        lora_alpha=alpha,
        target_name=key,
    )
    for factors in (wrapper.lora_A, wrapper.lora_B):
        factors.to(dtype)
    root.set_submodule(place, wrapper)
    config.target_parameters = [*(config.target_parameters or ()), key]
    for patterns, value, usual in (
        (config.rank_pattern, rank, config.r),
        (config.alpha_pattern, alpha, config.lora_alpha),
    ):
        if value != usual:
            patterns[re.escape(key)] = value
    return wrapper


def _base(module: nn.Module) -> Any:
    """The module inside of PEFT's layers."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _need_exact(config: Any) -> None:
    if config.peft_type != "LORA" or config.lora_dropout:
        raise UnsupportedError(
            f"{config.peft_type}, lora_dropout = {getattr(config, 'lora_dropout', None)} beside "
            "adapters of experts",
            expected="LORA with lora_dropout = 0",
            where="LoraConfig",
        )


def _inject(
    theirs: Callable[..., None],
    self: Any,
    model: nn.Module,
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Makes adapters that add_lora_ added a part of the adapter that PEFT adds. Scales are again
    what they were before `prepare_model_for_kbit_training`, which casts all floats of 16 bits.
    """
    own = [
        (name, projection, adapter)
        for name, module in model.named_modules()
        if isinstance(module, AdaptableModule)
        for projection, adapter in adapters_of(module)
    ]
    if own:
        _need_exact(self.peft_config[adapter_name])
    theirs(self, model, adapter_name, *args, **kwargs)
    if own:
        model.peft_config = self.peft_config  # which PEFT sets next
    for name, projection, adapter in own:
        delattr(_base(model.get_submodule(name)), f"{projection}_lora")
        a, b = adapter.A.detach(), adapter.B.detach()
        how = adapter.rank, adapter.alpha, a.dtype
        _wrap(model, adapter_name, name, projection, *how).fill_(a, b)


# Merging ------------------------------------------------------------------------------------------


def _merge(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Logs what merging into encoded weights loses."""
    lossy: dict[str, torch.Tensor] = {}
    try:
        with during(losses, lossy):
            return theirs(*args, **kwargs)
    finally:
        if lossy:
            lost, added = torch.stack([t.cpu() for t in lossy.values()]).sqrt().T.tolist()
            log.warning(
                "merged into encoded weights: rounding them again changes them by %.2f of what "
                "the adapters add (norms; %.2f for the worst of them). Adapters that are merged "
                "into the model in floats lose nothing",
                math.hypot(*lost) / (math.hypot(*added) or 1.0),
                max(x / (y or 1.0) for x, y in zip(lost, added, strict=True)),
            )


_model: Any = peft.tuners.lora.model
_CHANGED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (_model, "dispatch_default", _dispatch),
    (peft.tuners.tuners_utils, "_maybe_include_all_linear_layers", _all_linear),
    (peft.utils.transformers_weight_conversion, "_maybe_include_all_linear_layers", _all_linear),
    (_model.LoraModel, "inject_adapter", _inject),
    (_model.LoraModel, "merge_adapter", _merge),
    (_model.LoraModel, "_unload_and_optionally_merge", _merge),
)
