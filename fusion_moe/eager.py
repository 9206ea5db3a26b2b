"""The bodies of the operations: a call builds the Fusion it stands for, and runs its program.

Programs are shared between calls of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .compile import program_of
from .ir.effects import check_targets, write_over
from .ir.text import parse, text
from .op_definitions import LIBRARY, SPECS, Spec, as_bytes, bind, eager_types, fusion_of
from .options import Options, current, from_key
from .parts import Parts, grouped, joined
from .run_ops import RUN, RUN_INTO, all_inputs, named_sizes, need_pure, need_written
from .runtime.program import Program


@lru_cache(maxsize=1024)
def _program(name: str, types: Any, others: Any, device: torch.device, with_: Options) -> Program:
    return program_of(text(fusion_of(name, types, others)), device, with_)


def _body(spec: Spec, *args: Any, **kwargs: Any) -> Any:
    call = bind(spec, args, kwargs)
    tensors = [as_bytes(t) for t in call.tensors.values()]
    outputs = _program(spec.name, eager_types(call), call.others, tensors[0].device, current())(tensors)
    return call.restore(outputs[0]) if len(outputs) == 1 else tuple(outputs)


def _run(
    program: str, inputs: Sequence[Tensor], sizes: Sequence[int], options: str | None = None, parts: Parts | None = None
) -> list[Tensor]:  # fmt: skip
    device = inputs[0].device if inputs else torch.device("cpu")
    compiled = program_of(program, device, from_key(options) if options else None)
    fusion = need_pure(compiled.stages[0][1])
    return compiled(_whole(inputs, parts), named_sizes(fusion, sizes))


def _run_into(
    program: str, inputs: Sequence[Tensor], written: Sequence[Tensor], sizes: Sequence[int], options: str | None = None,
    parts: Parts | None = None,
) -> None:  # fmt: skip
    fusion = parse(program)
    tensors, env = all_inputs(fusion, _whole(inputs, parts), written), named_sizes(fusion, sizes)
    need_written(fusion, written, env)
    targets = dict(enumerate(written))
    check_targets(targets)
    device = tensors[0].device if tensors else torch.device("cpu")
    write_over(targets, program_of(_pure_text(program), device, from_key(options) if options else None)(tensors, env))


def _whole(tensors: Sequence[Tensor], parts: Parts | None) -> list[Tensor]:
    """The inputs of a program, each one tensor."""
    return [joined(t) if isinstance(t, tuple) else as_bytes(t) for t in grouped(tensors, parts)]


@lru_cache(maxsize=512)
def _pure_text(program: str) -> str:
    """The text of the program that computes the same and writes over no input."""
    return text(parse(program).pure)


def _register() -> None:
    for spec in SPECS.values():
        LIBRARY.impl(spec.name, partial(_body, spec), "CompositeExplicitAutograd")
    for names, body in ((RUN, _run), (RUN_INTO, _run_into)):
        for name in names:
            LIBRARY.impl(name, body, "CompositeExplicitAutograd")


_register()
