"""Passes Fusion -> Fusion, in this order. Each keeps the meaning exactly, except
`contract_rounding`, which runs on single segments.
"""

from .assign_layouts import assign_layouts
from .canonicalize import canonicalize
from .contract_rounding import contract_rounding, dropped_roundings
from .gather_for_each import gather_for_each
from .lower_operands import lower_operands
from .simplify import simplify
from .sink_quantize import sink_quantize

PASSES = (canonicalize, assign_layouts, sink_quantize, lower_operands, simplify, gather_for_each)

__all__ = [
    "PASSES",
    "assign_layouts",
    "canonicalize",
    "contract_rounding",
    "dropped_roundings",
    "gather_for_each",
    "lower_operands",
    "simplify",
    "sink_quantize",
]
