"""Pointwise kinds. nvFuser computes bf16 and f16 in float32 and keeps float32 results: they are
rounded as the program says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir import Op, Value
from .writer import Writer

_NAMES = (
    "where",
    "neg",
    "abs",
    "exp",
    "log",
    "expm1",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "tanh",
    "erf",
    "erfc",
    "sin",
    "cos",
    "atan",
    "floor",
    "round",
    "relu",
    "sigmoid",
    "silu",
    "add",
    "sub",
    "mul",
    "div",
    "minimum",
    "maximum",
    "pow",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "logical_and",
    "logical_or",
    "logical_not",
)


def _computed(w: Writer, op: Op, *inputs: Any) -> Any:
    wide = [
        w.to(x, "f32") if isinstance(v, Value) and v.type.dtype in ("bf16", "f16") else x
        for v, x in zip(op.inputs, inputs, strict=True)
    ]
    result = op.outputs[0].type.dtype
    name = "logical_and" if (op.kind.name, result) == ("mul", "bool") else op.kind.name
    return w.to(getattr(w, name)(*wide), result)


def _cast(w: Writer, op: Op, x: Any) -> Any:
    return w.to(x, op.attrs["dtype"])


RULES: dict[str, Callable[..., Any]] = {"cast": _cast, **dict.fromkeys(_NAMES, _computed)}
