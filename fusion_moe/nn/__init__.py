"""Layers over groups of rows: float layers to train and frozen quantized ones; `quantize_` and
LoRA, which convert models to the latter.
"""

from .activations import ScaledClampedQGeGLU, ScaledSwiGLU, deinterleave, interleave
from .config import NVFP4Config
from .contract import ExpertsContract, contract_of, experts_from
from .converters import convert
from .custom import CustomExperts
from .experts import Experts, NVFP4Experts
from .grouped import GroupedSwiGLU, NVFP4GroupedLinear
from .linear import GroupedLinear
from .llama4 import Llama4MoE
from .lora import Adapter, add_lora_
from .merging import merge_lora_, remove_lora_
from .prepare import prepare_
from .quantize import quantize_
from .quantized_linear import NVFP4Linear, QuantizedLinear
from .register import register_converter, unregister_converter
from .sequential import Sequential

__all__ = [
    "Adapter",
    "CustomExperts",
    "Experts",
    "ExpertsContract",
    "GroupedLinear",
    "GroupedSwiGLU",
    "Llama4MoE",
    "NVFP4Config",
    "NVFP4Experts",
    "NVFP4GroupedLinear",
    "NVFP4Linear",
    "QuantizedLinear",
    "ScaledClampedQGeGLU",
    "ScaledSwiGLU",
    "Sequential",
    "add_lora_",
    "contract_of",
    "convert",
    "deinterleave",
    "experts_from",
    "interleave",
    "merge_lora_",
    "prepare_",
    "quantize_",
    "register_converter",
    "remove_lora_",
    "unregister_converter",
]
