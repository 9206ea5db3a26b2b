"""Names under which transformers finds our quantizer."""

from __future__ import annotations

import warnings

from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin


def register(method: str, config: type[QuantizationConfigMixin], quantizer: type[HfQuantizer]) -> None:
    """Makes our quantizer load directories with this `quant_method`. A name that another package has taken stays its, with a warning."""
    taken = auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(method) or auto.AUTO_QUANTIZER_MAPPING.get(method)
    if taken is None:
        auto.register_quantization_config(method)(config)
        auto.register_quantizer(method)(quantizer)
    elif taken.__module__.partition(".")[0] != "fusion_moe":
        warnings.warn(
            f"transformers has a quantizer for {method!r} already, {taken.__module__}.{taken.__qualname__}, and goes on using it; "
            "fusion_moe.transformers.from_pretrained loads into modules of fusion_moe",
            stacklevel=3,
        )  # fmt: skip
