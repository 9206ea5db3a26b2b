"""How models are converted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..encodings.search import RULES
from ..errors import need_one_of
from ..target import ACTIVATION_FORMATS

WEIGHTS = ("packed", "fp8", "both")


@dataclass(frozen=True)
class NVFP4Config:
    """How experts are quantized and computed.

    Args:
        activation_format: "bf16", "nvfp4" (compute capability 10.0 only), "int8" (CPUs only) or
            "fp8" (compute capability 9.0 only).
        weights: what kernels read: "packed", the weights as they are stored; "fp8", weights that
            are folded to FP8 once; or "both", as `prepare_` says.
        scales: how the scale of a block is chosen: "max", from its largest magnitude, the bytes of
            nvidia-modelopt; "four_over_six", that one or 6/4 of it; or "mse", that one or one of
            its neighbours in e4m3, from five below to six above. The last two take what has the
            least squared error. `update_weights_` rounds by the same rule.

    Raises:
        OptionError: for any other activation_format, weights or scales.
    """

    # by which transformers finds the quantizer for a quantization_config
    quant_method: ClassVar[str] = "fusion_moe"

    activation_format: str = "bf16"
    weights: str = "packed"
    scales: str = "max"

    def __post_init__(self) -> None:
        need_one_of(
            "activation_format", self.activation_format, ACTIVATION_FORMATS, where="NVFP4Config"
        )
        need_one_of("weights", self.weights, WEIGHTS, where="NVFP4Config")
        need_one_of("scales", self.scales, RULES, where="NVFP4Config")

    def to_dict(self) -> dict[str, Any]:
        """The entries for config.json."""
        return {"quant_method": self.quant_method, **asdict(self)}
