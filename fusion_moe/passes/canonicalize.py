"""One form for each computation: undoes decompositions, drops casts and reshapes that do nothing.
Every rule keeps every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir import FLOATS, Fusion, FusionDefinition, Op, Value, plain
from ..target import Target
from .rewrite import rewrite

_EXACT_IN = {
    "f16": ("f32", "f64"),
    "bf16": ("f32", "f64"),
    "f8e4m3": ("f16", "bf16", "f32", "f64"),
    "f32": ("f64",),
}


def canonicalize(fusion: Fusion, target: Target) -> Fusion:
    """The same Fusion, bit for bit, with one operation for each silu, cast and reshape that a graph
    has in several. target: not used.
    """
    return rewrite(fusion, _rule)


def _rule(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    rule = _RULES.get(op.kind.name)
    return rule(fd, op, inputs) if rule else None


def _div(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    """x / (exp(-x) + 1) in float32 is silu(x)."""
    x, below = inputs
    total = fd.producer(below, "add")
    if (
        total is None
        or not isinstance(x, Value)
        or x.type.dtype != "f32"
        or 1 not in total.inputs[:2]
    ):
        return None
    exp = next((fd.producer(v, "exp") for v in total.inputs if v != 1), None)
    neg = fd.producer(exp.inputs[0], "neg") if exp else None
    return (fd.ops.silu(x),) if neg and neg.inputs[0] is x else None


def _cast(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    """A cast to the dtype that a value already has, or back to the dtype that it had before an
    exact cast.
    """
    (x,), dtype = inputs, op.attrs["dtype"]
    if x.type.dtype == dtype and x.type.ends is None:
        return (x,)
    before = fd.producer(x, "cast")
    if before is not None:
        (source,) = before.values
        if source.type.dtype == dtype and x.type.dtype in _EXACT_IN.get(dtype, ()):
            return (source,)
    return None


def _reshape(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    """A reshape to the shape that a value already has; two reshapes in a row become one."""
    (x,), shape = inputs, op.attrs["new_shape"]
    before = fd.producer(x, "reshape")
    source = before.values[0] if before else x
    if source.type.shape == shape:
        return (source,)
    return (fd.ops.reshape(source, new_shape=shape),) if before else None


def _partition(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    """A partition that the rows already have."""
    x = inputs[0]
    return (x,) if x.type == op.outputs[0].type else None


def _product(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    """Grouped products and sums read rows exactly, so an exact widening before them does nothing.
    (f64 would widen their sums.)
    """
    narrow = [_widened(fd, v) or v for v in inputs]
    return (
        None
        if narrow == list(inputs) or op.outputs[0].type.dtype == "f64"
        else fd.append(op.kind, narrow, op.attrs)
    )


def _quantize(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    """Scales depend on values, not on their dtype: an exact widening does nothing, as before
    products.
    """
    of_matrix = any(part.of_matrix for part in op.encoding.parts)
    return None if of_matrix else _product(fd, op, inputs)


def _gather(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    """Rows are gathered in their narrow dtype and widened afterwards, however they were
    partitioned.
    """
    x, index = inputs
    source, below = None, _gathered_before(fd, op, x)
    while below is not None:
        source, below = below, _gathered_before(fd, op, below)
    if source is None:
        return None
    (result,) = fd.append(op.kind, [source, index], op.attrs)
    return (
        result if source.type.dtype == x.type.dtype else fd.ops.cast(result, dtype=x.type.dtype),
    )


def _gathered_before(fd: FusionDefinition, op: Op, x: Value) -> Value | None:
    """What has the same rows as x, narrower or in another partition."""
    before = fd.producer(x, "reshape") if op.attrs["dim"] == 0 else None
    if before and [*map(plain, before.values[0].type.shape)] == [*map(plain, x.type.shape)]:
        return before.values[0]
    return _widened(fd, x)


def _widened(fd: FusionDefinition, v: Any) -> Value | None:
    """The narrower floats of which a value is the exact widening."""
    before = fd.producer(v, "cast")
    dtype = before.values[0].type.dtype if before else ""
    narrower = dtype in FLOATS and v.type.dtype in _EXACT_IN.get(dtype, ())
    return before.values[0] if before and narrower else None


PRODUCTS = ("grouped_mm", "grouped_mm_t", "grouped_outer", "group_sum")
_RULES = {
    "div": _div,
    "cast": _cast,
    "reshape": _reshape,
    "partition": _partition,
    "index_select": _gather,
    "quantize": _quantize,
    # the weight itself: its master matters to derivatives only
    "straight_through": lambda fd, op, inputs: inputs[:1],
    **dict.fromkeys(PRODUCTS, _product),
}
