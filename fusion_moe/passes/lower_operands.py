"""Operands that the program quantizes, as kernels read them: those of a recipe by their values in
bf16, or in float32 where scales are no powers of two; rows that are quantized by themselves by
their parts, codes and scales in memory.

If rows are picked by at least as many indices as there are rows, they are picked from these values
or parts, so that each row is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..ir import Fusion, FusionDefinition, Op, Value, exact_div, plain
from ..ir.kinds import eight_bits
from ..ir.kinds.quantized import format_of
from ..ir.kinds.runs import in_runs
from ..target import Target
from .rewrite import rewrite


def lower_operands(fusion: Fusion, target: Target) -> Fusion:
    """The Fusion with a `dequantize` before each product by a recipe, since products count such
    operands as these values anyway; and a `pack` of parts before each product of other rows, and
    of those that the target multiplies as codes.
    """
    some = any(map(_reads_quantized, fusion.ops))
    return rewrite(fusion, partial(_rule, target)) if some else fusion


def _reads_quantized(op: Op) -> bool:
    return op.kind.role == "grouped" and op.values[0].type.quantized


def _multiplied_as_codes(op: Op, target: Target) -> bool:
    """Whether a target has kernels that multiply the codes of a trained product."""
    a, w = (v.type for v in op.values[:2])
    return (
        op.kind.name in ("grouped_mm", "grouped_mm_t")
        and w.dtype in target.linear_weights.get(format_of(a), ())
        and eight_bits.by_codes(*w.shape[1:])
    )


def _by_columns(op: Op, target: Target) -> bool:
    """The same of a product over rows."""
    encodings = target.transposed_columns() if op.kind.name == "grouped_outer" else ()
    operands = [v.type for v in op.values[:2]]
    return all(t.dtype in encodings and eight_bits.by_codes(t.shape[1]) for t in operands)


def _rule(
    target: Target, fd: FusionDefinition, op: Op, inputs: Sequence[Any]
) -> Sequence[Value] | None:
    if not _reads_quantized(op):
        return None
    attrs = {name: attr for name, attr in op.attrs.items() if name != "wgrad"}
    if _multiplied_as_codes(op, target) and eight_bits.is_trained(op):
        # from one read of picked rows, beside their copy for wgrad
        a, w = (eight_bits.in_parts(fd, v) for v in inputs[:2])
        if op.kind.name == "grouped_mm_t":
            w = eight_bits.turned(fd, w)
        return [fd.ops.grouped_mm(a, w, inputs[2])]
    if _by_columns(op, target):
        a, b, ends = inputs
        left, right = (eight_bits.by_columns(fd, v, ends) for v in (a, b))
        return None if [left, right] == [a, b] else [fd.ops.grouped_outer(left, right, ends)]
    if not eight_bits.is_trained(op):
        lowered = [_in_memory(fd, v) for v in inputs]
        return None if lowered == list(inputs) else fd.append(op.kind, lowered, attrs)
    family = eight_bits.family_of(inputs[0].type)
    assert family is not None
    numbers = partial(_numbers, target, family.numbers, fd, ends=inputs[2])
    return fd.append(op.kind, [*map(numbers, inputs[:2]), inputs[2]], attrs)


def _in_memory(fd: FusionDefinition, v: Value) -> Value:
    producer = fd.producer(v, "quantize")
    if producer is None or len(producer.values) > 1:
        return v
    if (picked := _picked(fd, v)) is None:
        return eight_bits.in_parts(fd, v)
    rows, gather = picked
    parts = [_gathered(fd, part, gather) for part in fd.ops.unpack(rows)]
    return fd.ops.pack(*parts, encoding=v.type.dtype, layout="linear")


def _numbers(target: Target, dtype: str, fd: FusionDefinition, v: Value, ends: Value) -> Value:
    if (picked := _picked(fd, v)) is not None:
        rows, gather = picked
        return _gathered(fd, _numbers(target, dtype, fd, rows, ends), gather)
    of_runs = [ends] if in_runs(v.type.encoding, v.type.shape) else []
    # if quantized values never leave their kernel, neither must their parts
    read = v if "quantize" in target.unshared_roles else eight_bits.in_parts(fd, v)
    return fd.ops.dequantize(read, *of_runs, dtype=dtype)


def _gathered(fd: FusionDefinition, rows: Value, gather: Op) -> Value:
    """The rows that an `index_select` picks, of another value."""
    return fd.append(gather.kind, [rows, gather.values[1]], gather.attrs)[0]


def _picked(fd: FusionDefinition, v: Value) -> tuple[Value, Op] | None:
    """All rows, quantized, and the `index_select` of those that a `quantize` made v of, if each row
    is picked once or more on average.
    """
    quantize = fd.producer(v, "quantize")
    if quantize is None or len(quantize.values) > 1 or quantize.encoding.axis != -1:
        return None
    gather = fd.producer(quantize.values[0], "index_select")
    if gather is None or gather.attrs["dim"] != 0:
        return None
    x, index = gather.values
    often = exact_div(plain(index.type.shape[0]), plain(x.type.shape[0])) is not None
    return (fd.append(quantize.kind, [x], quantize.attrs)[0], gather) if often else None
