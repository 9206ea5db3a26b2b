"""The derivatives of the operations: under grad a call runs the forward of its Fusion's derivative, which gives what the backward reads.

The forward is the operation itself where inputs alone are saved, else `fusion_moe::run` with the program that gives more; the backward is
`run` too. So a tracer sees calls that return new tensors, and what is saved is an input or the result of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _after_autograd_keyset, _any_requires_grad, _AutoDispatchBelowAutograd

from . import options
from .errors import Error, UnsupportedError
from .ir.core import Fusion
from .ir.derivative import Derivative, differentiate
from .ir.text import one_line
from .ops import LIBRARY, SPECS, Call, Spec, Types, as_bytes, bind, eager_types, flat, fusion_of, traced_types
from .run_ops import NAMESPACE, RUN, RUN_INTO


@dataclass(frozen=True)
class _Programs:
    """The two programs of a derivative, and their texts. results: how many outputs of the forward are the operation's."""

    derivative: Derivative
    results: int
    forward: str
    backward: str

    @property
    def saves(self) -> bool:
        """Whether the forward gives more than the operation."""
        return len(self.derivative.forward.outputs) > self.results


@lru_cache(maxsize=256)
def _programs(name: str, types: Types, others: tuple[tuple[str, Any], ...], wanted: tuple[int, ...]) -> _Programs:
    fusion = fusion_of(name, types, others)
    made = differentiate(fusion, wanted)
    return _Programs(made, len(fusion.outputs), one_line(made.forward), one_line(made.backward))


@dataclass(frozen=True)
class _Step:
    """One call under grad, without its tensors. wanted: which of them get a gradient; sizes: the symbols of both programs.

    programs: or the error for whoever waits for a gradient. options: those of the forward; the backward may run in a thread of autograd's.
    """

    programs: _Programs | Error
    wanted: tuple[int, ...]
    sizes: Mapping[str, Any]
    options: str

    @classmethod
    def of(cls, call: Call) -> _Step:
        """The step of a call. Traced, its sizes are the tracer's."""
        tensors = list(call.tensors.values())
        wanted = tuple(i for i, t in enumerate(tensors) if t.requires_grad)
        tracing = any(type(t) is not Tensor and not isinstance(t, torch.nn.Parameter) for t in tensors)
        types, sizes = traced_types(call) if tracing else (eager_types(call), None)
        try:
            programs = _programs(call.spec.name, types, call.others, wanted)
        except UnsupportedError as error:
            names = list(call.tensors)
            what = f"{call.spec.name}, derivative with respect to {', '.join(names[i] for i in wanted)}"
            return cls(error.at(what), wanted, {}, "")
        env = sizes.values() if sizes else programs.derivative.forward.bind(list(map(as_bytes, tensors)))
        return cls(programs, wanted, env, options.current().key())

    def run(self, text: str, program: Fusion, tensors: Sequence[Tensor], with_: str | None) -> list[Tensor]:
        """The outputs of one of the programs, whose text this is."""
        return torch.ops.fusion_moe.run(text, tensors, [self.sizes[s] for s in program.symbols], with_)

    def forward(self, operation: Callable[[], Any], call: Call) -> tuple[Any, list[Tensor]]:
        """What the call returns, and what its backward reads."""
        tensors = list(call.tensors.values())
        if isinstance(self.programs, Error):
            return operation(), []
        derivative, count = self.programs.derivative, self.programs.results
        if not self.programs.saves:
            result = operation()
            return result, derivative.read(tensors, result if isinstance(result, tuple) else (result,))
        outputs = self.run(self.programs.forward, derivative.forward, tensors, None)
        return call.restore(outputs[0]) if count == 1 else tuple(outputs[:count]), derivative.read(tensors, outputs)

    def backward(self, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients of the tensors that want one, by their places."""
        if isinstance(self.programs, Error):
            raise self.programs
        derivative = self.programs.derivative
        types = [v.type for v in derivative.backward.inputs[len(derivative.reads) :]]
        seeds = [flat(grads[i], len(type.shape) - 1) for i, type in zip(derivative.seeds, types, strict=True)]
        outputs = self.run(self.programs.backward, derivative.backward, [*saved, *seeds], self.options)
        return dict(zip(self.wanted, outputs, strict=True))


class _Differentiated(torch.autograd.Function):
    """(step, operation, call, the tensors of the call...) -> the results. Only the step and what is saved live until the backward."""

    @staticmethod
    def forward(ctx: Any, step: _Step, operation: Callable[[], Any], call: Call, *tensors: Tensor) -> Any:
        with _AutoDispatchBelowAutograd():
            result, saved = step.forward(operation, call)
        ctx.step, ctx.count = step, len(tensors)
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = ctx.step.backward(ctx.saved_tensors, grads)
        return (None, None, None, *(found.get(i) for i in range(ctx.count)))


def _called(spec: Spec, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation as autograd calls it."""
    op = getattr(torch.ops.fusion_moe, spec.name).default
    operation = partial(op.redispatch, keyset & _after_autograd_keyset, *args, **kwargs)
    if torch.is_grad_enabled() and _any_requires_grad(*args):
        call = bind(spec, args, kwargs)
        return _Differentiated.apply(_Step.of(call), operation, call, *call.tensors.values())
    with _AutoDispatchBelowAutograd():
        return operation()


def _mark_non_differentiable(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def _no_derivative(name: str, why: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(why, todo="compute it under torch.no_grad(), or detach its result", where=name)

    return backward


def _never_tracked(name: str, keyset: Any, *args: Any, **kwargs: Any) -> None:
    """An operation that writes into its arguments, as autograd calls it."""
    if torch.is_grad_enabled() and _any_requires_grad(*args):
        raise UnsupportedError("tensors that require a gradient", todo="call it under torch.no_grad()", where=name)
    with _AutoDispatchBelowAutograd():
        getattr(torch.ops.fusion_moe, name).default.redispatch(keyset & _after_autograd_keyset, *args, **kwargs)


def _register() -> None:
    for spec in SPECS.values():
        if spec.differentiable:
            LIBRARY.impl(spec.name, partial(_called, spec), "Autograd", with_keyset=True)
        else:
            never = _no_derivative(spec.name, "it has no derivative")
            torch.library.register_autograd(f"{NAMESPACE}::{spec.name}", never, setup_context=_mark_non_differentiable, lib=LIBRARY)
    for name in RUN:
        never = _no_derivative(name, "second-order derivatives are not supported")
        torch.library.register_autograd(f"{NAMESPACE}::{name}", never, lib=LIBRARY)
    for name in RUN_INTO:
        LIBRARY.impl(name, partial(_never_tracked, name), "Autograd", with_keyset=True)


_register()
