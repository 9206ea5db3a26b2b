"""Gives products the bf16 numbers of their MXFP8 operands: kernels read these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.builder import FusionDefinition
from ..ir.core import Fusion, Op, Value
from ..ir.kinds import eight_bits
from ..ir.kinds.runs import in_runs
from ..target import Target
from .rewrite import rewrite


def dequantize_operands(fusion: Fusion, target: Target) -> Fusion:
    """The Fusion with a `dequantize` before each product of MXFP8 operands, which are what the product counts them as."""
    return rewrite(fusion, _rule) if any(map(_reads_eight_bits, fusion.ops)) else fusion


def _reads_eight_bits(op: Op) -> bool:
    return op.kind.role == "grouped" and any(eight_bits.is_one(v.type) for v in op.values)


def _rule(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
    if not _reads_eight_bits(op):
        return None
    attrs = {name: attr for name, attr in op.attrs.items() if name != "wgrad"}
    return fd.append(op.kind, [_numbers(fd, v, inputs[2]) for v in inputs], attrs)


def _numbers(fd: FusionDefinition, v: Value, ends: Value) -> Value:
    if not eight_bits.is_one(v.type):
        return v
    of_runs = [ends] if in_runs(v.type.encoding, v.type.shape) else []
    return fd.ops.dequantize(eight_bits.in_parts(fd, v), *of_runs, dtype="bf16")
