"""Modules whose weights are NVFP4, what converts others to them, and `quantize_`, which does so all over a model."""

from .converters import NVFP4Config, convert
from .experts import Experts, NVFP4Experts
from .grouped import GroupedLinear, GroupedSwiGLU
from .llama4 import Llama4MoE
from .prepare import prepare_
from .quantize import quantize_

__all__ = ["Experts", "GroupedLinear", "GroupedSwiGLU", "Llama4MoE", "NVFP4Config", "NVFP4Experts", "convert", "prepare_", "quantize_"]
