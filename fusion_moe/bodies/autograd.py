"""Derivatives: when gradients are needed, a call runs the forward of its Fusion's derivative, which
also returns what the backward reads.

The forward is the operation itself if only inputs are saved; otherwise it is `fusion_moe::run` of a
program with more outputs. The backward is a `run` too. So a tracer sees only calls that return new
tensors, and every saved tensor is an input or a result of one of them. `run` is an operation like
any other: its Fusion is the program that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_autograd_keyset,
    _any_requires_grad,
    _AutoDispatchBelowAutograd,
)
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from .. import options
from ..backends import find
from ..definitions.operations import (
    LIBRARY,
    SPECS,
    Call,
    Spec,
    Types,
    bind,
    eager_types,
    flat,
    fp4_as_bytes,
    fusion_of,
    restored,
    traced_types,
)
from ..definitions.run import RUN, RUN_INTO, named_sizes
from ..definitions.tensor_lists import Input, PartCounts, flat as in_parts, grouped
from ..definitions.traced import Sizes
from ..errors import Error, UnsupportedError
from ..ir import Fusion, one_line, parse
from ..ir.derivative import Derivative, differentiate
from ..runtime import native
from ..runtime.remembered import Remembered
from .eager import BODIES

_BACKENDS = frozenset(DispatchKeySet(key).raw_repr() for key in (DispatchKey.CPU, DispatchKey.CUDA))
# by the text of the backward
_derivatives: WeakValueDictionary[str, Derivative] = WeakValueDictionary()


@dataclass(frozen=True)
class Programs:
    """The two programs of a derivative with respect to the inputs `wanted`, and their texts.

    results: how many of the forward's outputs are the Fusion's own.
    """

    derivative: Derivative
    wanted: tuple[int, ...]
    results: int
    forward: str
    backward: str

    @property
    def saves(self) -> bool:
        """Whether the forward returns more than the Fusion does."""
        return len(self.derivative.forward.outputs) > self.results

    def seeds(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The last inputs of the backward, made from the gradients of the outputs."""
        types = [v.type for v in self.derivative.backward.inputs[len(self.derivative.reads) :]]
        return [
            flat(grads[i], len(type.shape) - 1)
            for i, type in zip(self.derivative.seeds, types, strict=True)
        ]


@lru_cache(maxsize=512)
def _programs(
    program: str,
    wanted: tuple[int, ...],
    names: tuple[str, ...],
    router_gradient: bool,
    by_columns: bool,
) -> Programs:
    fusion = parse(program)
    derivative = differentiate(fusion, wanted, router_gradient, names, by_columns)
    texts = one_line(derivative.forward), one_line(derivative.backward)
    _derivatives[texts[1]] = derivative
    return Programs(derivative, wanted, len(fusion.outputs), *texts)


def programs_of(
    program: str, wanted: tuple[int, ...], device: torch.device, names: Sequence[str] = ()
) -> Programs:
    """The programs of the derivative of a program on a device, under the options in force. names:
    what error messages call its inputs.
    """
    with_ = options.current()
    by_columns = _by_columns(with_, device)
    return _programs(program, wanted, tuple(names), with_.router_gradient, by_columns)


@lru_cache(maxsize=64)
def _by_columns(with_: options.Options, device: torch.device) -> bool:
    """Whether products over rows read codes by columns there."""
    to = find(with_.target, device)
    with options.using(with_):
        return device.type == "cuda" and bool(to.transposed_columns())


def run(
    text: str, program: Fusion, inputs: Sequence[Input], sizes: Mapping[str, Any], with_: str | None
) -> list[Tensor]:
    """`fusion_moe::run` of `program`, whose text is `text`. Each input is one tensor or several."""
    tensors, parts = in_parts(inputs)
    return torch.ops.fusion_moe.run(
        text, tensors, [sizes[s] for s in program.symbols], with_, parts
    )


def derivative_of(backward: str) -> Derivative | None:
    """The derivative that has this program as its backward, if a call in this process needs it."""
    return _derivatives.get(backward)


@dataclass(frozen=True)
class Step:
    """One call with gradients, without its tensors. parts: how many tensors make up each input.

    programs: or the error that is raised when a gradient is computed. sizes: the sizes of both
    programs. given: the options that the call names; options: the call's options, or those in force
    then, for the backward, which may run in one of autograd's threads.
    """

    programs: Programs | Error
    parts: PartCounts | None
    sizes: Mapping[str, Any]
    options: str = ""
    given: str | None = None

    @classmethod
    def of_call(cls, call: Call) -> Step:
        """The step of a call of an operation. While tracing, its sizes are the tracer's."""
        tensors = list(call.tensors.values())
        wants = wanted(tensors)
        tracing = any(
            type(t) is not Tensor and not isinstance(t, torch.nn.Parameter) for t in tensors
        )
        if tracing:
            return cls._of_types(call, wants, *traced_types(call))
        key = call.spec.name, call.forms, call.others, wants, options.current(), tensors[0].device
        entry = _steps.get(key)
        if entry is None:
            entry = cls._of_types(call, wants, eager_types(call))
            if not isinstance(entry.programs, Error):
                _steps[key] = entry
        return entry

    @classmethod
    def _of_types(
        cls, call: Call, wants: tuple[int, ...], types: Types, sizes: Sizes | None = None
    ) -> Step:
        tensors = list(map(fp4_as_bytes, call.tensors.values()))
        program = one_line(fusion_of(call.spec.name, types, call.others))
        env = sizes.values() if sizes else parse(program).bind(tensors)
        return cls._of(
            call.spec.name, program, wants, tensors[0].device, env, names=list(call.tensors)
        )

    @classmethod
    def of_run(
        cls,
        program: str,
        inputs: Sequence[Tensor],
        sizes: Sequence[Any],
        with_: str | None = None,
        parts: PartCounts | None = None,
    ) -> Step:
        """The step of a call of `run`."""
        wants, env = wanted(grouped(inputs, parts)), named_sizes(parse(program), sizes)
        return cls._of("run", program, wants, inputs[0].device, env, with_, parts)

    @classmethod
    def _of(
        cls,
        where: str,
        program: str,
        wants: tuple[int, ...],
        device: torch.device,
        sizes: Mapping[str, Any],
        with_: str | None = None,
        parts: PartCounts | None = None,
        names: Sequence[str] = (),
    ) -> Step:
        try:
            programs = programs_of(program, wants, device, names)
        except UnsupportedError as error:
            of = ", ".join(names[i] if names else f"input {i}" for i in wants)
            return cls(error.at(f"{where}, derivative with respect to {of}"), parts, {})
        return cls(programs, parts, sizes, with_ or options.current().key(), with_)

    def forward(
        self, operation: Callable[[], Any], tensors: Sequence[Tensor]
    ) -> tuple[Any, list[Input]]:
        """What the call returns, in the shape of the operation's output or the program's, and what
        its backward reads.
        """
        if isinstance(self.programs, Error):
            return operation(), []
        derivative = self.programs.derivative
        count = self.programs.results
        inputs = grouped(tensors, self.parts)
        if not self.programs.saves:
            result = operation()
            output = zip(
                result if isinstance(result, tuple) else (result,),
                derivative.forward.outputs,
                strict=True,
            )
            return result, derivative.read(
                inputs, [flat(t, len(v.type.shape) - 1) for t, v in output]
            )
        outputs = run(self.programs.forward, derivative.forward, inputs, self.sizes, self.given)
        return outputs[0] if count == 1 else tuple(outputs[:count]), derivative.read(
            inputs, outputs
        )

    def backward(self, saved: Sequence[Input], grads: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients of the inputs that want one, by position."""
        if isinstance(self.programs, Error):
            raise self.programs
        if torch.is_grad_enabled():  # the forward saved values without their graph
            raise UnsupportedError(
                "create_graph=True",
                expected="first derivatives: a backward without a graph",
                where="backward",
            )
        inputs = [*saved, *self.programs.seeds(grads)]
        outputs = run(
            self.programs.backward,
            self.programs.derivative.backward,
            inputs,
            self.sizes,
            self.options,
        )
        return dict(zip(self.programs.wanted, outputs, strict=True))


_steps = Remembered[Hashable, Step](1024)  # of calls of operations, by their keys


def wanted(inputs: Sequence[Input]) -> tuple[int, ...]:
    """The positions of the inputs of which at least one part requires a gradient."""
    return tuple(
        i
        for i, t in enumerate(inputs)
        if any(p.requires_grad for p in (t if isinstance(t, tuple) else (t,)))
    )


def split(gradients: Mapping[int, Any], parts: PartCounts | None, count: int) -> list[Any]:
    """Gradients of inputs, by position, as gradients of the tensors that make up the inputs: a
    part's gradient is a slice.
    """
    if parts is None:
        return [gradients.get(i) for i in range(count)]
    each = (
        [gradients.get(i)] if n == 0 else gradients[i].unbind() if i in gradients else [None] * n
        for i, n in enumerate(parts)
    )
    return list(chain.from_iterable(each))


class Differentiated(torch.autograd.Function):
    """(step, operation, the call's tensors...) -> the results. Only the step, a `Step` or what has
    its methods, and the saved tensors live until the backward.
    """

    @staticmethod
    def forward(ctx: Any, step: Any, operation: Callable[[], Any], *tensors: Tensor) -> Any:
        """The call."""
        with _AutoDispatchBelowAutograd():
            result, saved = step.forward(operation, tensors)
        ctx.step, ctx.count = step, len(tensors)
        flattened, ctx.parts = in_parts(saved)
        ctx.save_for_backward(*flattened)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of the call's tensors."""
        gradients = ctx.step.backward(grouped(ctx.saved_tensors, ctx.parts), grads)
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(
                g if need else None
                for g, need in zip(split(gradients, ctx.step.parts, ctx.count), needed, strict=True)
            ),
        )


def _below(name: str, keyset: Any) -> Callable[..., Any]:
    """An operation below autograd: its body if only a backend is left to dispatch to, since
    dispatching the arguments again is slow.
    """
    keys = keyset & _after_autograd_keyset
    if keys.raw_repr() in _BACKENDS:
        return BODIES[name]
    return partial(getattr(torch.ops.fusion_moe, name).default.redispatch, keys)


def _refuse_tangents(name: str, *args: Any) -> None:
    """UnsupportedError for a call under forward-mode differentiation, whose tangents would be
    lost.
    """
    if forward_ad._current_level < 0:
        return
    tensors = (t for t in tree_leaves(args) if isinstance(t, Tensor))
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(
            "an argument with a tangent",
            expected="none: derivatives are of reverse mode",
            where=name,
        )


def refuse_transforms(name: str) -> None:
    """UnsupportedError for a call whose derivative `torch.func` is to find: what a forward saves is
    not for its transforms.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "a derivative by torch.func (grad, vjp, jacrev, hessian)",
            expected="one by autograd",
            todo="call backward() or torch.autograd.grad, outside of torch.func's transforms",
            where=name,
        )


def _called(spec: Spec, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation as called through autograd. The results of one that is not differentiable are
    constants.
    """
    if spec.differentiable:
        _refuse_tangents(spec.name, args, kwargs)
    operation = _below(spec.name, keyset)
    if spec.differentiable and torch.is_grad_enabled() and _any_requires_grad(*args):
        refuse_transforms(spec.name)
        call = bind(spec, args, kwargs)
        outputs = Differentiated.apply(
            Step.of_call(call), partial(operation, *args, **kwargs), *call.tensors.values()
        )
        return outputs if isinstance(outputs, tuple) else restored(outputs, call.lead)
    with _AutoDispatchBelowAutograd():
        return operation(*args, **kwargs)


def _called_run(
    name: str, keyset: Any, program: str, inputs: Sequence[Tensor], sizes: Sequence[Any], *rest: Any
) -> list[Tensor]:
    """`run` as called through autograd. rest: options and parts, if they are given."""
    _refuse_tangents(name, inputs)
    operation = _below(name, keyset)
    if torch.is_grad_enabled() and _any_requires_grad(inputs):
        refuse_transforms(name)
        step = Step.of_run(program, inputs, sizes, *rest)
        outputs = Differentiated.apply(
            step, lambda: tuple(operation(program, inputs, sizes, *rest)), *inputs
        )
        return list(outputs) if isinstance(outputs, tuple) else [outputs]
    with _AutoDispatchBelowAutograd():
        return operation(program, inputs, sizes, *rest)


def _never_tracked(name: str, keyset: Any, *args: Any, **kwargs: Any) -> None:
    """An operation that writes into its arguments, as called through autograd."""
    _refuse_tangents(name, args, kwargs)
    if torch.is_grad_enabled() and _any_requires_grad(*args):
        raise UnsupportedError(
            "tensors that require a gradient", todo="call it under torch.no_grad()", where=name
        )
    with _AutoDispatchBelowAutograd():
        _below(name, keyset)(*args, **kwargs)


def _register() -> None:
    for spec in SPECS.values():
        native.implement(LIBRARY, spec.name, partial(_called, spec), "Autograd", with_keyset=True)
    for name in RUN:
        native.implement(LIBRARY, name, partial(_called_run, name), "Autograd", with_keyset=True)
    for name in RUN_INTO:
        LIBRARY.impl(name, partial(_never_tracked, name), "Autograd", with_keyset=True)


_register()
