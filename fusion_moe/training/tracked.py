"""Calls with side effects: writes into the caller's memory or main_grad, and delayed gradients.
`stages.Call.run` is the usual call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # does not import the tracer, which takes a second

from .. import options
from ..bodies.autograd import (
    Programs,
    programs_of,
    refuse_transforms,
    run,
    split,
    wanted,
)
from ..definitions.tensor_lists import PartCounts, flat, grouped
from ..errors import UnsupportedError
from ..ir import parse
from . import main_grad
from .delayed import Delayed, Waiting
from .postponed import postponed
from .stages import Call


class Effect(NamedTuple):
    """What the backward of a program does to a weight, which is one of its inputs.

    main: whether the gradient goes to the parameters' main_grad. delayed: where it waits, if it
    does.
    """

    params: main_grad.Params
    main: bool
    delayed: Delayed | None


Effects = Mapping[int, Effect]  # by position among the program's inputs


@dataclass(frozen=True)
class _Work:
    """One call, without its inputs. programs: of its derivative; wanted: the inputs that get a
    gradient, some of them later.
    """

    env: dict[str, Any]
    options: str
    parts: PartCounts | None
    effects: Effects
    out: Tensor | None
    grad_input: Tensor | None
    is_leaf: bool
    ends: Tensor
    programs: Programs
    wanted: tuple[int, ...]

    @property
    def later(self) -> list[int]:
        """The inputs whose gradient waits."""
        return [i for i in self.wanted if i in self.effects and self.effects[i].delayed]

    @property
    def now(self) -> list[int]:
        """The inputs that get their gradient in the backward."""
        return [i for i in self.wanted if i not in self.later]

    @property
    def mains(self) -> dict[int, main_grad.Params]:
        """The parameters whose main_grad the backward writes."""
        return {i: e.params for i, e in self.effects.items() if e.main and i in self.now}


@_disable_dynamo
def tracked(
    call: Call,
    effects: Effects,
    ends: Tensor,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    is_leaf: bool = False,
    where: str = "",
) -> Tensor:
    """call.run() with effects. out [M, N], grad_input [M, K]: buffers in which the rows before the
    last of `ends` are written.

    is_leaf: whether x is a leaf. Its `grad` is a tensor of its own, not grad_input, which the next
    backward writes.
    """
    for effect in effects.values():
        if effect.main:
            main_grad.check(effect.params, where)
    tensors, parts = flat(call.inputs)
    needed = wanted(call.inputs) if torch.is_grad_enabled() else ()
    if not needed:
        return _result(out, call.run(), ends)
    refuse_transforms(where or "GroupedLinear")
    env, key = dict.fromkeys(parse(call.text).symbols, call.rows), options.current().key()
    return _Tracked.apply(
        _Work(
            env,
            key,
            parts,
            effects,
            out,
            grad_input,
            is_leaf,
            ends,
            programs_of(call.text, needed, tensors[0].device),
            needed,
        ),
        *tensors,
    )


class _Tracked(torch.autograd.Function):
    """(work, the tensors of the call...) -> y [M, N]"""

    @staticmethod
    def forward(ctx: Any, work: _Work, *tensors: Tensor) -> Tensor:
        inputs, programs = grouped(tensors, work.parts), work.programs
        outputs = run(programs.forward, programs.derivative.forward, inputs, work.env, work.options)
        ctx.work = work
        saved, ctx.parts = flat(programs.derivative.read(inputs, outputs))
        ctx.save_for_backward(*saved)
        return _result(work.out, outputs[0], work.ends)

    @staticmethod
    @_disable_dynamo
    def backward(ctx: Any, dy: Tensor) -> Any:
        work: _Work = ctx.work
        if torch.is_grad_enabled() and any(effect.main for effect in work.effects.values()):
            raise UnsupportedError(
                "create_graph=True",
                expected="a backward without a graph, since gradients are written to main_grad",
                todo="leave it out, or leave out accumulate_into_main_grad",
                where="backward",
            )
        inputs = [*grouped(ctx.saved_tensors, ctx.parts), *work.programs.seeds([dy])]
        text, waiting = postponed(work.programs.backward, tuple(map(work.wanted.index, work.later)))
        mains = {work.now.index(i): params for i, params in work.mains.items()}
        gradients = (
            main_grad.run(text, inputs, work.env, work.options, mains)
            if parse(text).outputs
            else []
        )
        for place, later in zip(work.later, waiting, strict=True):
            params, main, queue = work.effects[place]
            assert queue is not None
            reads: list[Any] = [[*inputs, *gradients][i] for i in later.reads]
            queue.waiting.append(
                Waiting(later.program, reads, work.env, work.options, params, main)
            )
        # other outputs are read later
        by_input = {
            i: grad for i, grad in zip(work.now, gradients, strict=False) if grad is not None
        }
        if 0 in by_input and work.grad_input is not None:
            written = _write(work.grad_input, by_input[0], work.ends).detach()
            by_input[0] = by_input[0] if work.is_leaf else written
        return None, *_returned(work, by_input, ctx.needs_input_grad[1:])


def _returned(
    work: _Work, entries: Mapping[int, Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient that autograd gets for each tensor of the call."""
    grads = split(entries, work.parts, len(needed))
    first = 0
    for i, n in enumerate(work.parts or [0] * len(needed)):
        if params := work.mains.get(i):
            grads[first : first + len(params)] = [
                main_grad.written(p) if p.requires_grad else None for p in params
            ]
        first += n or 1
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]


def _result(out: Tensor | None, y: Tensor, ends: Tensor) -> Tensor:
    """y [M, N], in the caller's buffer if there is one."""
    return y if out is None else _write(out, y, ends).detach()


def _write(target: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    """Writes the rows of groups of `value` to target [M, N]; rows past the last end keep what they
    hold.
    """
    inside = torch.arange(target.shape[0], device=target.device) < ends[-1]
    return target.copy_(torch.where(inside[:, None], value, target))
