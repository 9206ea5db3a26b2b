"""Which values are computed from which, and the part of a program that computes some of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .builder import FusionDefinition
from .core import Fusion, Op, Value
from .types import Rows, TensorType, plain


def dependent(ops: Sequence[Op], values: Collection[Value]) -> set[Value]:
    """These values and all that the operations, in their order, compute from them."""
    reached = set(values)
    for op in ops:
        if not reached.isdisjoint(op.values):
            reached.update(op.outputs)
    return reached


def made_again(
    ops: Sequence[Op], needed: Iterable[Value], kept: Collection[Value] = ()
) -> tuple[Op, ...]:
    """The operations that make the needed values from the kept ones, in order."""
    missing, recomputed = set(needed) - set(kept), []
    for op in reversed(ops):
        if not missing.isdisjoint(op.outputs):
            missing |= set(op.values) - set(kept)
            recomputed.append(op)
    return tuple(reversed(recomputed))


def needed(ops: Sequence[Op], values: Collection[Value]) -> set[Value]:
    """These values and all from which the operations, in their order, compute them."""
    return {*values, *(v for op in made_again(ops, values) for v in op.values)}


def part(
    fusion: Fusion, ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value]
) -> Fusion:
    """The program of some operations of a Fusion, from values that are passed on to it. Results
    are passed on without the partition of their rows: it is made again where they are read.
    """
    fd = FusionDefinition()
    passed = {
        v: fd.define_like(v.type if v in fusion.inputs else _stored(v), fusion.role(v))
        for v in inputs
    }
    results: dict[Any, Any] = {}

    def of(v: Value) -> Value:
        if v in passed and v not in results:
            results[v] = as_it_was(passed[v], v.type)
        return results[v]

    def as_it_was(tensor: Value, type: TensorType) -> Value:
        if type.ends and tensor.type.ends is None:
            rows = fusion.partitions.rows(type.ends)
            assert rows is not None  # values that need these ends have rows partitioned by them
            return fd.ops.ends(tensor, rows=rows, groups=type.ends)
        if tensor.type == type:
            return tensor
        ends = [fusion.ends[g] for g in type.partitions() if g in fusion.ends]
        there = len(ends) == 1 and (ends[0] in passed or ends[0] in results)
        if there and isinstance(type.shape[0], Rows):
            return fd.ops.partition(tensor, of(ends[0]))
        return fd.ops.reshape(tensor, new_shape=type.shape)

    for op in ops:
        for v in op.values:
            of(v)
        fd.copy(op, results)
    for v in outputs:
        fd.add_output(of(v))
    return fd.fusion()


def _stored(v: Value) -> TensorType:
    """The type of a value that is passed on."""
    return TensorType(tuple(map(plain, v.type.shape)), v.type.dtype)
