"""Frozen quantized layers over groups of rows, and `quantize_`, which converts models to them.
Adapters beside their weights are of ../lora, float layers to train of ../training.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..ir.activation import swiglu
from .config import FP8Config, INT4Config, MXFP4Config, NVFP4Config, QuantizationConfig
from .conversion.contract import ExpertsContract, contract_of, experts_from
from .conversion.converters import convert
from .conversion.qat import qat_
from .conversion.quantize import quantize_
from .conversion.register import register_converter, unregister_converter
from .conversion.traced_activation import activation
from .frozen import (
    CustomExperts,
    Experts,
    GroupedSwiGLU,
    Llama4MoE,
    NVFP4Experts,
    NVFP4GroupedLinear,
    QuantizedLinear,
    prepare_,
    update_weights_,
)
from .gate_up import deinterleave, interleave

__all__ = [
    "GEGLU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "Adapter",
    "AddExtraInput",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "CustomExperts",
    "Experts",
    "ExpertsContract",
    "FP8Config",
    "GroupedLinear",
    "GroupedSwiGLU",
    "INT4Config",
    "Llama4MoE",
    "MXFP4Config",
    "MakeExtraOutput",
    "NVFP4Config",
    "NVFP4Experts",
    "NVFP4GroupedLinear",
    "QuantizationConfig",
    "QuantizedLinear",
    "ReGLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiTUGLU",
    "SwiGLU",
    "activation",
    "add_lora_",
    "contract_of",
    "convert",
    "deinterleave",
    "experts_from",
    "interleave",
    "merge_lora_",
    "prepare_",
    "qat_",
    "quantize_",
    "register_converter",
    "register_fusion",
    "remove_lora_",
    "swiglu",
    "unregister_converter",
    "unregister_fusion",
    "update_weights_",
]

_OF_LORA = ("Adapter", "add_lora_", "merge_lora_", "remove_lora_")

if TYPE_CHECKING:
    from ..lora import Adapter, add_lora_, merge_lora_, remove_lora_
    from ..training import (
        GEGLU,
        GLU,
        QGEGLU,
        QGELU,
        Activation,
        AddExtraInput,
        Bias,
        ClampedSwiGLU,
        ConstantScale,
        GroupedLinear,
        MakeExtraOutput,
        ReGLU,
        Reshape,
        ScaledClampedQGeGLU,
        ScaledSiTUGLU,
        ScaledSReLU,
        ScaledSwiGLU,
        Sequential,
        SiTUGLU,
        SReGLU,
        SReLU,
        SwiGLU,
        register_fusion,
        unregister_fusion,
    )
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            room = "..lora" if name in _OF_LORA else "..training"
            return getattr(importlib.import_module(room, __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
