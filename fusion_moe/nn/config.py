"""How models are converted."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OptionError
from ..target import ACTIVATION_FORMATS


@dataclass(frozen=True)
class NVFP4Config:
    """How experts are quantized and computed. activation_format: "bf16" or "nvfp4" (compute capability 10.0 only), else OptionError."""

    activation_format: str = "bf16"

    def __post_init__(self) -> None:
        if self.activation_format not in ACTIVATION_FORMATS:
            raise OptionError(
                f"activation_format = {self.activation_format!r}", expected=f"one of {', '.join(map(repr, ACTIVATION_FORMATS))}",
                where="NVFP4Config",
            )  # fmt: skip
