"""Layers over groups of rows that are trained in floating point; `fusion_moe.nn` has these names
too.

linear.py, activations.py, sequential.py, fusions.py
                 the layers, made of stages.py: what a layer adds to a program
grouped_parameters.py, splits.py, channels.py, checks.py
                 weights of all groups, rows of groups, results beside the first one; what they
                 refuse
tracked.py, main_grad.py, delayed.py, held.py
                 backwards that write; copies in 8 bits that microbatches keep
postponed.py     outputs that are computed later
"""

from .activations import (
    GEGLU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    ReGLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from .channels import AddExtraInput, Bias, ConstantScale, MakeExtraOutput, Reshape
from .fusions import register_fusion, unregister_fusion
from .linear import GroupedLinear
from .sequential import Sequential

__all__ = [
    "GEGLU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "GroupedLinear",
    "MakeExtraOutput",
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
    "register_fusion",
    "unregister_fusion",
]
