"""A program in parts: what is wanted now, and outputs that wait for a program of their own."""

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

_AGAIN = ("ends", "partition", "reshape")  # done again rather than passed on: they cost nothing


@dataclass(frozen=True)
class Later:
    """A program for one output. reads: what it takes, by places among the inputs of the program now, followed by its outputs."""

    program: str
    reads: tuple[int, ...]


@lru_cache(maxsize=256)
def postponed(program: str, places: tuple[int, ...]) -> tuple[str, tuple[Later, ...]]:
    """The program without the outputs at these places, and one for each of them. Nothing is done twice that takes time.

    The first gives the other outputs, then what the later ones read of its values. Ends of groups come from inputs.
    """
    fusion = parse(program)
    wanted = tuple(v for i, v in enumerate(fusion.outputs) if i not in places)
    early = made_again(fusion.ops, wanted, ())
    made = {v for op in early if op.kind.name not in _AGAIN for v in op.outputs}
    late = [_late(fusion, fusion.outputs[i], made) for i in places]
    read = dict.fromkeys(v for ops, i in zip(late, places, strict=True) for v in _read(ops, fusion.outputs[i]))
    now = replace(fusion, ops=early, outputs=(*wanted, *(v for v in read if v in made and v not in wanted)))
    there = (*now.inputs, *now.outputs)
    return one_line(now), tuple(_later(fusion, ops, fusion.outputs[i], there) for ops, i in zip(late, places, strict=True))


def _read(ops: Sequence[Op], output: Value) -> tuple[Value, ...]:
    """What operations that make an output read of others, or the output itself."""
    own = {v for op in ops for v in op.outputs}
    return tuple(dict.fromkeys(v for v in (*(v for op in ops for v in op.values), output) if v not in own))


def _ends(fusion: Fusion) -> Mapping[Groups, Value]:
    return {v.type.ends: v for op in fusion.ops for v in op.outputs if v.type.ends}


def _late(fusion: Fusion, output: Value, made: set[Value]) -> tuple[Op, ...]:
    """The operations that make an output from inputs and from what was made, with the ends that partition the rows of these."""
    ops, ends = made_again(fusion.ops, [output], made), _ends(fusion)
    by = (ends[g] for v in _read(ops, output) for g in v.type.partitions())
    return made_again(fusion.ops, [output, *by], made)


def _later(fusion: Fusion, ops: Sequence[Op], output: Value, there: Sequence[Value]) -> Later:
    fd, read, ends = FusionDefinition(), _read(ops, output), _ends(fusion)
    given = {v: fd.define_like(_stored(v.type), fusion.role(v)) for v in read}
    made: dict[Value, Value] = {}

    def of(v: Any) -> Any:
        """What a value became; rows are partitioned again where they are read, since ends are made before."""
        if not isinstance(v, Value):
            return v
        if v not in made:
            by = next(v.type.partitions(), None)
            made[v] = given[v] if by is None else fd.ops.partition(given[v], made[ends[by]])
        return made[v]

    for op in ops:
        with fd.at(op.source, op.translator):
            made.update(zip(op.outputs, fd.append(op.kind, [of(v) for v in op.inputs], op.attrs), strict=True))
    fd.add_output(of(output))
    return Later(one_line(fd.fusion()), tuple(there.index(v) for v in read))


def _stored(type: TensorType) -> TensorType:
    """Of the tensor that is passed on, of whose partition nothing is said."""
    return type.with_(shape=tuple(map(plain, type.shape)))
