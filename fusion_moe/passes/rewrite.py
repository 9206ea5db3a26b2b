"""Rebuilding a Fusion one operation at a time: what all passes use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..ir import Fusion, FusionDefinition, Op, TensorType, Value

# rule(fd, op, its inputs in the new fusion) -> the replacements of its outputs, or None to copy it
Rule = Callable[[FusionDefinition, Op, Sequence[Any]], Sequence[Value] | None]


def rewrite(fusion: Fusion, rule: Rule, types: Mapping[Value, TensorType] | None = None) -> Fusion:
    """The Fusion with every operation copied, or replaced by the result of `rule`. Inputs and
    outputs stay in order. types: of inputs that are other tensors in the new fusion.
    """
    fd, types = FusionDefinition(), types or {}
    copies: dict[Any, Any] = {
        v: fd.define_like(types.get(v, v.type), fusion.role(v)) for v in fusion.inputs
    }
    for op in fusion.ops:
        with fd.at(op.source, op.translator):
            outputs = rule(fd, op, [copies.get(v, v) for v in op.inputs])
        copies.update(zip(op.outputs, outputs or fd.copy(op, copies), strict=True))
    for v in fusion.outputs:
        fd.add_output(copies[v])
    return fd.fusion()
