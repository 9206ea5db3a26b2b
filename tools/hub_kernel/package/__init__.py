"""fusion_moe's grouped experts with weights in 4 bits and activations in 16 (W4A16): NVFP4, MXFP4,
INT4, for GPUs of compute capability 8.0 and newer, and CPUs.

layers: for `kernelize`. register_experts(): names for transformers' experts interface. quantize_:
a model's experts to 4 bits, in place. fused_experts, grouped_mm, quantize, dequantize: functions of
tensors, with fakes for torch.compile and derivatives. preparing: compiles before the first call.
"""

import torch

if torch.__version__ < (2, 10):
    raise ImportError(f"torch {torch.__version__}; this kernel needs torch 2.10 or newer")

from . import layers, ops
from .bodies import (
    autocast as _autocast,
    autograd as _autograd,
    batched as _batched,
    eager as _eager,
)
from .experts import FORMATS, dequantize, quantize, quantize_, register_experts
from .ops import fused_experts, grouped_mm, route
from .runtime.faults import synchronize
from .runtime.precompile import preparing

__all__ = [
    "FORMATS",
    "dequantize",
    "fused_experts",
    "grouped_mm",
    "layers",
    "ops",
    "preparing",
    "quantize",
    "quantize_",
    "register_experts",
    "route",
    "synchronize",
]

del _autocast, _autograd, _batched, _eager
