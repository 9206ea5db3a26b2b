"""Puts quantized activations into the layout in which the target's products read their block
scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir import Fusion, FusionDefinition, Op, Value
from ..target import Target
from .rewrite import rewrite


def assign_layouts(fusion: Fusion, target: Target) -> Fusion:
    """The Fusion with a relayout before each product that needs another layout than its activation
    has.
    """

    def rule(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
        if op.kind.name != "grouped_mm":
            return None
        a, w, ends = inputs
        layout = target.operand_layouts.get(a.type.dtype, a.type.layout)
        if layout == a.type.layout:
            return None
        return fd.append(
            op.kind,
            [fd.ops.relayout(a, ends, layout=layout), w, ends],
            {**op.attrs, "a_layout": layout},
        )

    return rewrite(fusion, rule)
