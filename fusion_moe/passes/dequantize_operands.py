"""Replaces the MXFP8 operands of products by their bf16 values, which the kernels read.

If rows are picked by at least as many indices as there are rows, they are picked from these values,
so that each row is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..encodings import find
from ..ir.builder import FusionDefinition
from ..ir.core import Fusion, Op, Value
from ..ir.kinds import eight_bits
from ..ir.kinds.runs import in_runs
from ..ir.sizes import exact_div
from ..ir.types import plain
from ..target import Target
from .rewrite import rewrite

ByWayOf = Callable[[FusionDefinition, Value], Value]


def dequantize_operands(fusion: Fusion, target: Target) -> Fusion:
    """The Fusion with a `dequantize` before each product of MXFP8 operands; products count such
    operands as these values anyway.
    """
    by_way_of = _itself if "quantize" in target.unshared_roles else eight_bits.in_parts
    return (
        rewrite(fusion, partial(_rule, by_way_of))
        if any(map(_reads_eight_bits, fusion.ops))
        else fusion
    )


def _itself(fd: FusionDefinition, v: Value) -> Value:
    """The value itself: if quantized values never leave their kernel, neither must their parts."""
    return v


def _reads_eight_bits(op: Op) -> bool:
    return op.kind.role == "grouped" and any(eight_bits.is_one(v.type) for v in op.values)


def _rule(
    by_way_of: ByWayOf, fd: FusionDefinition, op: Op, inputs: Sequence[Any]
) -> Sequence[Value] | None:
    if not _reads_eight_bits(op):
        return None
    attrs = {name: attr for name, attr in op.attrs.items() if name != "wgrad"}
    return fd.append(op.kind, [_numbers(by_way_of, fd, v, inputs[2]) for v in inputs], attrs)


def _numbers(by_way_of: ByWayOf, fd: FusionDefinition, v: Value, ends: Value) -> Value:
    if not eight_bits.is_one(v.type):
        return v
    if (picked := _picked(fd, v)) is not None:
        quantize, gather = picked
        rows = fd.append(quantize.kind, [gather.values[0]], quantize.attrs)[0]
        return fd.append(
            gather.kind, [_numbers(by_way_of, fd, rows, ends), gather.values[1]], gather.attrs
        )[0]
    of_runs = [ends] if in_runs(v.type.encoding, v.type.shape) else []
    return fd.ops.dequantize(by_way_of(fd, v), *of_runs, dtype="bf16")


def _picked(fd: FusionDefinition, v: Value) -> tuple[Op, Op] | None:
    """The `quantize` that made a value, and the `index_select` of its rows, if each row is picked
    once or more on average.
    """
    quantize = fd.producer(v)
    if (
        quantize is None
        or quantize.kind.name != "quantize"
        or len(quantize.values) > 1
        or find(quantize.attrs["encoding"]).axis != -1
    ):
        return None
    gather = fd.producer(quantize.values[0])
    if gather is None or gather.kind.name != "index_select" or gather.attrs["dim"] != 0:
        return None
    x, index = gather.values
    often = exact_div(plain(index.type.shape[0]), plain(x.type.shape[0])) is not None
    return (quantize, gather) if often else None
