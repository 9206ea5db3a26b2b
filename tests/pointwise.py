"""Pointwise operations in float64, as torch and Python have them, for what the IR's kinds are
compared with.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "floor": torch.floor,
    "round": torch.round,
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "pow": torch.pow,
}
COMPARISONS = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
LOGICAL = ("logical_and", "logical_or", "logical_not")
# taken at numbers from 0.1 on
POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "div")


def sample(name: str) -> Tensor:
    """f64[7, 5]: numbers of both signs, or from 0.1 on where the operation wants that; zero is
    among them.
    """
    x = torch.linspace(-math.pi, math.pi, 35, dtype=torch.float64).reshape(7, 5)
    return x.abs() + 0.1 if name in POSITIVE else x
