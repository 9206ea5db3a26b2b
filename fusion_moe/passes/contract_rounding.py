"""Keeps float32 where a kernel would round to a narrower type and back, or would round summands:
the only pass that changes bits.

It runs on each segment separately: a value that is stored between two kernels is rounded as the
program says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir import Fusion, FusionDefinition, Op, Value
from .rewrite import rewrite
from .simplify import simplify


def dropped_roundings(fusion: Fusion) -> tuple[Op, ...]:
    """The narrowing casts that `contract_rounding` bypasses: their results are widened again or
    added, and not stored.
    """
    dropped = {way[0] for way in _ways(fusion).values()} | {
        fusion.producers[v] for op in _sums(fusion) for v in op.values
    }
    return tuple(op for op in fusion.ops if op in dropped)


def contract_rounding(fusion: Fusion) -> Fusion:
    """The Fusion where cast(slice(cast(x: f32, bf16)), f32) is slice(x), and add(cast(x: f32,
    bf16), cast(y: f32, bf16)) is cast(add(x, y), bf16), unless a value on the way is an output. The
    Fusion itself if an output would become an input or another output: kernels store each.
    """
    ways, sums = _ways(fusion), _sums(fusion)
    results = {op.outputs[0]: way for op, way in ways.items()}

    def rule(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
        if op in sums:
            rounded = [fd.producer(v) for v in inputs]
            return (
                fd.ops.cast(
                    fd.ops.add(*(r.values[0] for r in rounded if r)), dtype=op.outputs[0].type.dtype
                ),
            )
        if op.outputs[0] not in results:
            return None
        contracted, way = inputs[0], results[op.outputs[0]]
        for _ in way:  # back to the value before rounding
            source = fd.producer(contracted)
            assert source is not None
            contracted = source.values[0]
        for move in way[1:]:
            (contracted,) = fd.append(move.kind, [contracted], move.attrs)
        return (contracted,)

    contracted = simplify(rewrite(fusion, rule)) if ways or sums else fusion
    apart = len({*contracted.inputs, *contracted.outputs}) == len(contracted.inputs) + len(
        contracted.outputs
    )
    return contracted if apart else fusion


def _sums(fusion: Fusion) -> tuple[Op, ...]:
    """Additions of two numbers that have just been rounded."""
    return tuple(
        op
        for op in fusion.ops
        if op.kind.name == "add"
        and len(op.values) == 2
        and all(len(_way(fusion, v)) == 1 for v in op.values)
    )


def _ways(fusion: Fusion) -> Mapping[Op, tuple[Op, ...]]:
    """For each cast back to f32: the narrowing cast that it undoes, and the operations in between,
    which move elements.
    """
    back = (op for op in fusion.ops if op.kind.name == "cast" and op.attrs["dtype"] == "f32")
    return {op: way for op in back if (way := _way(fusion, op.values[0]))}


def _way(fusion: Fusion, v: Value) -> tuple[Op, ...]:
    op = fusion.producer(v)
    if op is None or v in fusion.outputs:
        return ()
    if op.kind.name == "cast":
        return (
            (op,)
            if op.values[0].type.dtype == "f32" and op.attrs["dtype"] in ("bf16", "f16")
            else ()
        )
    before = _way(fusion, op.values[0]) if op.kind.role == "shape" and len(op.values) == 1 else ()
    return (*before, op) if before else ()
