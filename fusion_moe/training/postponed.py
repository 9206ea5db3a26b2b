"""Splits a program: one part for the outputs that are needed now, and a program for each output
that waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..ir import Fusion, Op, Value, made_again, one_line, parse, part

_AGAIN = ("ends", "partition", "reshape")  # repeated rather than passed on: they cost nothing


@dataclass(frozen=True)
class Later:
    """A program for one output. reads: its inputs, as positions among the inputs of the program
    that runs now followed by its outputs.
    """

    program: str
    reads: tuple[int, ...]


@lru_cache(maxsize=256)
def postponed(program: str, places: tuple[int, ...]) -> tuple[str, tuple[Later, ...]]:
    """The program without the outputs at these positions, and a program for each of them. No work
    that takes time is repeated.

    The first program returns the other outputs, then the values that the later programs read. Ends
    of groups are made from inputs.
    """
    fusion = parse(program)
    wanted = tuple(v for i, v in enumerate(fusion.outputs) if i not in places)
    early = made_again(fusion.ops, wanted)
    computed = {v for op in early if op.kind.name not in _AGAIN for v in op.outputs}
    late = [_late(fusion, fusion.outputs[i], computed) for i in places]
    read = dict.fromkeys(
        v for ops, i in zip(late, places, strict=True) for v in _read(ops, fusion.outputs[i])
    )
    now = replace(
        fusion,
        ops=early,
        outputs=(*wanted, *(v for v in read if v in computed and v not in wanted)),
    )
    there = (*now.inputs, *now.outputs)
    return one_line(now), tuple(
        _later(fusion, ops, fusion.outputs[i], there) for ops, i in zip(late, places, strict=True)
    )


def _read(ops: Sequence[Op], output: Value) -> tuple[Value, ...]:
    """The values that the operations of an output read from elsewhere, or the output itself."""
    own = {v for op in ops for v in op.outputs}
    return tuple(
        dict.fromkeys(v for v in (*(v for op in ops for v in op.values), output) if v not in own)
    )


def _late(fusion: Fusion, output: Value, result: set[Value]) -> tuple[Op, ...]:
    """The operations that make an output from inputs and from values already made, with the ends
    that partition these values' rows.
    """
    ops = made_again(fusion.ops, [output], result)
    by = (fusion.ends[g] for v in _read(ops, output) for g in v.type.partitions())
    return made_again(fusion.ops, [output, *by], result)


def _later(fusion: Fusion, ops: Sequence[Op], output: Value, there: Sequence[Value]) -> Later:
    read = _read(ops, output)
    return Later(one_line(part(fusion, ops, read, [output])), tuple(map(there.index, read)))
