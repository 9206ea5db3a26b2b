"""Rows that several products read are gathered by each product while it loads them, and never
copied in memory for all of them.

The same holds for the number of rows if all are in one group.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import Fusion, Op, Value
from ..target import Target


def gather_for_each(fusion: Fusion, target: Target) -> Fusion:
    """The Fusion with a separate `index_select` of rows, or view of an input, for each product that
    reads it, and a separate `full` for each `ends`.
    """
    copies: dict[Op, list[Op]] = {}
    ops = [_with_own_gathers(fusion, op, copies) for op in fusion.ops]
    if not copies:
        return fusion
    results = [
        each for old, op in zip(fusion.ops, ops, strict=True) for each in (op, *copies.get(old, ()))
    ]
    return replace(fusion, ops=tuple(results)).verify()


def _with_own_gathers(fusion: Fusion, op: Op, copies: dict[Op, list[Op]]) -> Op:
    """A product, or `ends`, with copies of the operations before it that others read too; any other
    operation unchanged.
    """
    if op.kind.role != "grouped" and op.kind.name != "ends":
        return op
    inputs = list(op.inputs)
    for i, v in enumerate(op.inputs):
        gather = fusion.producer(v)
        if gather is None or not _picks(fusion, gather):
            continue
        (output,) = gather.outputs
        if fusion.readers[output][0] is not op:
            gathers = copies.setdefault(gather, [])
            own = Value(f"{output.name}_{len(gathers) + 1}", output.type)
            gathers.append(replace(gather, outputs=(own,)))
            inputs[i] = own
    return op if inputs == list(op.inputs) else op.with_inputs(tuple(inputs))


def _picks(fusion: Fusion, op: Op) -> bool:
    """Whether an operation computes nothing: it picks rows by an index, views an input, or makes a
    number.
    """
    seen = op.kind.name in ("reshape", "partition") and op.values[0] in fusion.inputs
    return (
        seen or op.kind.name == "full" or (op.kind.name == "index_select" and op.attrs["dim"] == 0)
    )
