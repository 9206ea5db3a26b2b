"""How models are converted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..errors import need_one_of
from ..target import ACTIVATION_FORMATS


@dataclass(frozen=True)
class NVFP4Config:
    """How experts are quantized and computed.

    Args:
        activation_format: "bf16", "nvfp4" (compute capability 10.0 only) or "int8" (CPUs only).

    Raises:
        OptionError: for any other activation_format.
    """

    # by which transformers finds the quantizer for a quantization_config
    quant_method: ClassVar[str] = "fusion_moe"

    activation_format: str = "bf16"

    def __post_init__(self) -> None:
        need_one_of(
            "activation_format", self.activation_format, ACTIVATION_FORMATS, where="NVFP4Config"
        )

    def to_dict(self) -> dict[str, Any]:
        """The entries for config.json."""
        return {"quant_method": self.quant_method, **asdict(self)}
