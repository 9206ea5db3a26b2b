"""How models are converted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NVFP4Config:
    """How experts are quantized and computed. activation_format: "bf16" or "nvfp4" (compute capability 10.0 only)."""

    activation_format: str = "bf16"
