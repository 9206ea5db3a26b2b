"""Splits a program: one part for the outputs that are needed now, and a program for each output
that waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .builder import FusionDefinition
from .core import Fusion, Op, Value
from .saved import made_again
from .text import one_line, parse
from .types import Groups, TensorType, plain

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
    early = made_again(fusion.ops, wanted, ())
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


def _ends(fusion: Fusion) -> Mapping[Groups, Value]:
    return {v.type.ends: v for op in fusion.ops for v in op.outputs if v.type.ends}


def _late(fusion: Fusion, output: Value, made: set[Value]) -> tuple[Op, ...]:
    """The operations that make an output from inputs and from values already made, with the ends
    that partition these values' rows.
    """
    ops, ends = made_again(fusion.ops, [output], made), _ends(fusion)
    by = (ends[g] for v in _read(ops, output) for g in v.type.partitions())
    return made_again(fusion.ops, [output, *by], made)


def _later(fusion: Fusion, ops: Sequence[Op], output: Value, there: Sequence[Value]) -> Later:
    fd, read, ends = FusionDefinition(), _read(ops, output), _ends(fusion)
    inputs = {v: fd.define_like(_stored(v.type), fusion.role(v)) for v in read}
    copies: dict[Value, Value] = {}

    def of(v: Any) -> Any:
        """The copy of a value; rows are partitioned again when they are read, since ends are made
        first.
        """
        if not isinstance(v, Value):
            return v
        if v not in copies:
            by = next(v.type.partitions(), None)
            copies[v] = inputs[v] if by is None else fd.ops.partition(inputs[v], copies[ends[by]])
        return copies[v]

    for op in ops:
        with fd.at(op.source, op.translator):
            copies.update(
                zip(
                    op.outputs,
                    fd.append(op.kind, [of(v) for v in op.inputs], op.attrs),
                    strict=True,
                )
            )
    fd.add_output(of(output))
    return Later(one_line(fd.fusion()), tuple(there.index(v) for v in read))


def _stored(type: TensorType) -> TensorType:
    """The type of a tensor that is passed on, without its partition."""
    return type.with_(shape=tuple(map(plain, type.shape)))
