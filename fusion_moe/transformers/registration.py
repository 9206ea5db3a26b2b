"""Names under which transformers finds our quantizer, and accelerate our backend of torch.compile;
and how transformers counts parameters.
"""

from __future__ import annotations

import sys
import warnings
from math import prod
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..nn.frozen.packed import PackedModule
from ..plugins import wrap


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


def register_counting() -> None:
    """Makes `num_parameters` count an encoded weight as its numbers, N x K, not as codes and
    scales.
    """
    wrap(PreTrainedModel, "num_parameters", _num_parameters)


def _num_parameters(
    count: Any, self: Any, only_trainable: bool = False, *args: Any, **kwargs: Any
) -> int:
    found = int(count(self, only_trainable, *args, **kwargs))
    encoded = [m for m in self.modules() if isinstance(m, PackedModule) and not m.encoding.plain]
    return found + (0 if only_trainable else sum(map(_beyond_parts, encoded)))


def _beyond_parts(module: PackedModule) -> int:
    """How many numbers a module's weights have more than their parts have elements."""
    more = 0
    for names in module.part_names.values():
        parts = [p.numel() for name in names if (p := module._parameters.get(name)) is not None]
        lead = getattr(module, names[0]).shape[:-2]
        more += prod((*lead, *module.matrix_shape(names[0]))) - sum(parts)
    return more


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
