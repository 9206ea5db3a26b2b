"""Names under which transformers finds our quantizer, and accelerate our backend of torch.compile;
and the methods of transformers' models that are changed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...nn.frozen import PackedModule
from ...plugins import wrap
from .adapters import save_pretrained
from .quantizer import FusionMoeQuantizer
from .resizing import resized


def register(
    method: str, config: type[QuantizationConfigMixin], quantizer: type[HfQuantizer]
) -> None:
    """Makes our quantizer load directories with this `quant_method`. A name that another package
    has taken stays its, with a warning.
    """
    taken = auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(method) or auto.AUTO_QUANTIZER_MAPPING.get(
        method
    )
    if taken is None:
        auto.register_quantization_config(method)(config)
        auto.register_quantizer(method)(quantizer)
    elif taken.__module__.partition(".")[0] != "fusion_moe":
        warnings.warn(
            f"transformers has a quantizer for {method!r} already, "
            f"{taken.__module__}.{taken.__qualname__}, and goes on using it; "
            "fusion_moe.transformers.from_pretrained loads into modules of fusion_moe",
            stacklevel=3,
        )


def change_models() -> None:
    """Wraps methods of all models."""
    for name, around in _CHANGED.items():
        wrap(PreTrainedModel, name, around)


def _cast(cast: Callable[..., Any], refuse: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Casts the floats of a model with encoded weights of ours, as `bfloat16` and `to` do.
    transformers refuses it for every quantized model.
    """
    ours = isinstance(getattr(self, "hf_quantizer", None), FusionMoeQuantizer)
    return (cast if ours else refuse)(self, *args)


def _num_parameters(
    count: Any, self: Any, only_trainable: bool = False, *args: Any, **kwargs: Any
) -> int:
    """Counts an encoded weight as its numbers, N x K, not as codes and scales."""
    value = int(count(self, only_trainable, *args, **kwargs))
    encoded = [m for m in self.modules() if isinstance(m, PackedModule) and not m.encoding.plain]
    return value + (0 if only_trainable else sum(map(_beyond_parts, encoded)))


def _beyond_parts(module: PackedModule) -> int:
    """How many numbers a module's weights have more than their parts have elements."""
    shapes = (
        (*module.weight_of(weight).shape[:-2], *module.matrix_shape(weight))
        for weight in module.part_names
    )
    own = (module._parameters.get(name) for name in module._parts_by_name())
    return sum(map(prod, shapes)) - sum(p.numel() for p in own if p is not None)


_CHANGED: dict[str, Callable[..., Any]] = {
    "save_pretrained": save_pretrained,
    "num_parameters": _num_parameters,
    "half": partial(_cast, nn.Module.half),
    "float": partial(_cast, nn.Module.float),
    "_get_resized_lm_head": resized,
}


def register_backend() -> None:
    """Adds "fusion_moe" to the backends that accelerate, if it is installed, lets `torch.compile`
    have: for TrainingArguments.
    """
    plugins: Any = sys.modules.get("accelerate.utils.dataclasses")  # transformers has imported it
    if plugins is None or "FUSION_MOE" in plugins.DynamoBackend:
        return

    def missing(cls: Any, value: object) -> Any:
        if value != "FUSION_MOE":
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member

    plugins.DynamoBackend._missing_ = classmethod(missing)
