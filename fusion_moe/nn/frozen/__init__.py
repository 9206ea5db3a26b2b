"""Layers with quantized weights that are not trained.

packed.py        layouts in memory; adaptable.py: adapters; projections.py, base.py: base classes
experts.py, custom.py, grouped.py, llama4.py, quantized_linear.py
                 the layers
requantized.py   weights read as FP8; prepare.py: `prepare_`; update.py: `update_weights_`
"""

from .adaptable import AdaptableModule
from .base import own_parameters, place_
from .custom import CustomExperts, in_steps
from .experts import Experts, NVFP4Experts
from .grouped import GroupedSwiGLU, NVFP4GroupedLinear
from .llama4 import Llama4MoE
from .packed import FROZEN, PackedModule
from .prepare import prepare_
from .projections import Projections
from .quantized_linear import QuantizedLinear
from .requantized import requantizing
from .update import update_weights_
from .weight import Form, View, Weight, rounded

__all__ = [
    "FROZEN",
    "AdaptableModule",
    "CustomExperts",
    "Experts",
    "Form",
    "GroupedSwiGLU",
    "Llama4MoE",
    "NVFP4Experts",
    "NVFP4GroupedLinear",
    "PackedModule",
    "Projections",
    "QuantizedLinear",
    "View",
    "Weight",
    "in_steps",
    "own_parameters",
    "place_",
    "prepare_",
    "requantizing",
    "rounded",
    "update_weights_",
]
