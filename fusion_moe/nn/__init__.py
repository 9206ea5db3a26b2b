"""Modules whose weights are NVFP4, and `quantize_`, which puts them into a model."""

from .experts import NVFP4Experts
from .quantize import NVFP4Config, quantize_

__all__ = ["NVFP4Config", "NVFP4Experts", "quantize_"]
