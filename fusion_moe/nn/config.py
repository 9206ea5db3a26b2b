"""How models are converted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

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

    Raises:
        OptionError: for any other activation_format or weights.
    """

    # by which transformers finds the quantizer for a quantization_config
    quant_method: ClassVar[str] = "fusion_moe"

    activation_format: str = "bf16"
    weights: str = "packed"

    def __post_init__(self) -> None:
        need_one_of(
            "activation_format", self.activation_format, ACTIVATION_FORMATS, where="NVFP4Config"
        )
        need_one_of("weights", self.weights, WEIGHTS, where="NVFP4Config")

    def to_dict(self) -> dict[str, Any]:
        """The entries for config.json."""
        return {"quant_method": self.quant_method, **asdict(self)}
