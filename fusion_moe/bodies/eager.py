"""The bodies of the operations: a call builds the Fusion that it stands for and runs its program.

Calls of one kind share a program. The first call with a specialization key (the shapes, dtypes and
devices of its tensors, its other arguments, the options in force) checks the arguments and finds
what it needs. Later calls with that key only launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..compile import program_of
from ..definitions.operations import (
    LIBRARY,
    SPECS,
    Call,
    Spec,
    bind,
    eager_types,
    fp4_as_bytes,
    fusion_of,
    restored,
    signature,
)
from ..definitions.run import RUN, RUN_INTO, all_inputs, named_sizes, need_written
from ..definitions.tensor_lists import PartCounts, grouped, joined
from ..ir import Op, parse
from ..ir.effects import check_targets
from ..ir.text import text
from ..options import Options, current, from_key
from ..runtime import native
from ..runtime.program import Program, device_of
from ..runtime.remembered import Remembered
from .stored import kept, reading, to_reorder

_REMEMBERED = 1024  # how many specialization keys are kept


@dataclass(frozen=True)
class _Found:
    """What calls with one specialization key run. changed: by position, the shapes of tensors that
    the program takes in another shape than the caller's.

    lead: the leading dimensions of the operation's output, if they differ from the program's.
    """

    program: Program
    sizes: Mapping[str, int]
    changed: Mapping[int, Sequence[int]]
    lead: Sequence[int] | None = None

    @classmethod
    def of(
        cls,
        program: Program,
        tensors: Sequence[Tensor],
        taken: Sequence[Tensor],
        sizes: Mapping[str, int],
        lead: Sequence[int] | None = None,
    ) -> _Found:
        """For tensors that the caller gives as `tensors` and the program takes as `taken`. Raises
        if they do not fit the program.
        """
        changed = {i: t.shape for i, t in enumerate(taken) if t is not tensors[i]}
        return cls(program, program.sizes(taken, sizes), changed, lead)

    def taken(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the program takes for the caller's tensors."""
        tensors = list(inputs)
        for i, shape in self.changed.items():
            t = fp4_as_bytes(inputs[i])
            tensors[i] = t if t.shape == shape else t.reshape(shape)
        return tensors

    def with_kept(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """The outputs by weights that are kept in other layouts; None if not all are there."""
        if not self._to_keep:
            return None
        tensors, parts = self.taken(inputs), dict[Op, tuple[str, list[Tensor]]]()
        for pack, wanted, places in self._to_keep:
            parts[pack] = wanted, kept(pack, wanted, [tensors[i] for i in places])
        if not all(made for _, made in parts.values()):
            return None
        for pack, _, places in self._to_keep:
            for i, t in zip(places, parts[pack][1], strict=True):
                tensors[i] = t
        if not self._other:
            other = text(reading(self.program.stages[0][1], parts))
            self._other.append(program_of(other, tensors[0].device))
        return self._other[0].run(tensors, self.sizes)

    @cached_property
    def _to_keep(self) -> list[tuple[Op, str, list[int]]]:
        fusion = self.program.stages[0][1]
        packs = to_reorder(fusion, self.program.target)
        return [(p, w, [fusion.inputs.index(v) for v in p.values]) for p, w in packs]

    @cached_property
    def _other(self) -> list[Program]:
        """The program that reads kept weights, once it is needed."""
        return []

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the program."""
        outputs = self.program.run(self.taken(inputs), self.sizes)
        if native.wanted() and not current().keep_weights:
            native.offer(self.program.plan_for_native(inputs, self.sizes))
        return outputs


def _key_of(tensors: Sequence[Tensor]) -> Hashable:
    """Everything about tensors that programs and checks depend on, except their elements."""
    return tuple([(t.shape, t.dtype, t.device) for t in tensors])


@lru_cache(maxsize=1024)
def _program(name: str, types: Any, others: Any, device: torch.device, with_: Options) -> Program:
    return program_of(text(fusion_of(name, types, others)), device, with_)


class _Body:
    """The body of an operation."""

    def __init__(self, spec: Spec):
        self._spec, self._found = spec, Remembered[Hashable, _Found](_REMEMBERED)
        names = [name for name, _ in signature(spec.name)]
        self._k_major = [names.index(name) for name in spec.k_major]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors, others = list[Tensor](), list[Any]()
        for arg in args:
            if isinstance(arg, Tensor):
                tensors.append(arg)
                others.append(Tensor)
            elif isinstance(arg, (list, tuple)):
                tensors += arg
                others.append(len(arg))
            else:
                others.append(arg)
        named = list[Any]()
        for name, arg in kwargs.items():
            if isinstance(arg, Tensor):
                tensors.append(arg)
            named.append((name, Tensor if isinstance(arg, Tensor) else arg))
        strides = [args[i].stride() for i in self._k_major]  # the dispatcher passes these by place
        key = (_key_of(tensors), *strides, *others, *named, current())
        entry = self._found.get(key)
        if entry is None:
            entry = self._found[key] = self._find(tensors, bind(self._spec, args, kwargs))
        outputs = entry.with_kept(tensors) if current().keep_weights else None
        outputs = entry.run(tensors) if outputs is None else outputs
        return restored(outputs[0], entry.lead) if len(outputs) == 1 else tuple(outputs)

    def _find(self, tensors: Sequence[Tensor], call: Call) -> _Found:
        taken = [fp4_as_bytes(t) for t in call.tensors.values()]
        program = _program(
            self._spec.name, eager_types(call), call.others, taken[0].device, current()
        )
        return _Found.of(program, tensors, taken, {}, call.lead)


_runs = Remembered[Hashable, _Found](_REMEMBERED)


def _run(
    program: str,
    inputs: Sequence[Tensor],
    sizes: Sequence[int] | None,
    options: str | None = None,
    parts: PartCounts | None = None,
) -> list[Tensor]:
    sizes = sizes or ()  # AOTInductor passes None in place of an empty list
    tensors = _whole(inputs, parts)
    key = (_key_of(tensors), program, *sizes, options, current())
    entry = _runs.get(key)
    if entry is None:
        if options is not None:  # of a compiled graph
            native.use()
        compiled = program_of(program, device_of(tensors), from_key(options) if options else None)
        named = named_sizes(compiled.stages[0][1], sizes)
        entry = _runs[key] = _Found.of(compiled, tensors, [fp4_as_bytes(t) for t in tensors], named)
    return entry.run(tensors)


def _run_into(
    program: str,
    inputs: Sequence[Tensor],
    written: Sequence[Tensor],
    sizes: Sequence[int] | None,
    options: str | None = None,
    parts: PartCounts | None = None,
    read: Sequence[int] | None = None,
) -> None:
    fusion = parse(program)
    whole = [fp4_as_bytes(t) for t in _whole(inputs, parts)]
    tensors, env = all_inputs(fusion, whole, written, read), named_sizes(fusion, sizes or ())
    need_written(fusion, written, env)
    check_targets(written)
    compiled = program_of(program, device_of(tensors), from_key(options) if options else None)
    for t, result in zip(written, compiled(tensors, env), strict=True):
        t.copy_(result)


def _whole(tensors: Sequence[Tensor], parts: PartCounts | None) -> list[Tensor]:
    """The inputs of a program, each one tensor."""
    return [joined(t) if isinstance(t, tuple) else t for t in grouped(tensors, parts)]


BODIES: Mapping[str, Callable[..., Any]] = {
    **{name: _Body(spec) for name, spec in SPECS.items()},
    **dict.fromkeys(RUN, _run),
    **dict.fromkeys(RUN_INTO, _run_into),
}
for _name, _body in BODIES.items():
    if _name in RUN_INTO:
        LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    else:
        native.implement(LIBRARY, _name, _body, "CompositeExplicitAutograd")
