"""The derivative of a Fusion, as a Fusion: reverse mode over the `grad` rules of the kinds.

It takes the inputs of the Fusion and the gradients of its float outputs, computes again what the rules need of the forward
pass (nothing but inputs is saved), and gives the gradients of the inputs asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedError
from .builder import FusionDefinition
from .core import Fusion, Op, Value
from .types import FLOATS, plain


def differentiable_outputs(fusion: Fusion) -> tuple[int, ...]:
    """The outputs that have a gradient: the floats."""
    return tuple(i for i, v in enumerate(fusion.outputs) if v.type.dtype in FLOATS)


def differentiate(fusion: Fusion, wrt: Sequence[int]) -> Fusion:
    """(inputs..., gradients of the float outputs...) -> the gradients of inputs `wrt`, each in its input's dtype.

    UnsupportedError where no derivative reaches an input: quantized weights are frozen.
    """
    fd = FusionDefinition()
    made: dict[Any, Any] = {v: fd.define_like(v.type, fusion.role(v)) for v in fusion.inputs}
    outputs = [fusion.outputs[i] for i in differentiable_outputs(fusion)]
    seeds = [(v, fd.define_like(v.type.with_(shape=tuple(map(plain, v.type.shape))))) for v in outputs]
    ops: list[Op] = []
    for op in fusion.ops:
        with fd.at(op.source):
            inputs = tuple(made.get(v, v) if isinstance(v, Value) else v for v in op.inputs)
            made.update(zip(op.outputs, fd.append(op.kind, inputs, op.attrs), strict=True))
        ops.append(Op(op.kind, inputs, op.attrs, tuple(made[v] for v in op.outputs), op.source))

    grads: dict[Value, Value] = {}
    for value, seed in seeds:
        _add(fd, grads, made[value], seed)
    for op in reversed(ops):
        if any(v in grads for v in op.outputs):
            with fd.at(op.source):
                _backward(fd, op, grads)
    for i in wrt:
        value = made[fusion.inputs[i]]
        if value not in grads:
            raise UnsupportedError(
                f"no derivative with respect to input {i}, {value.type}",
                expected="activations, router weights or biases",
                todo="quantized weights and their scales are frozen: call requires_grad_(False) on them",
            )
        fd.add_output(fd.ops.reshape(grads[value], new_shape=tuple(map(plain, value.type.shape))))
    return _needed(fd.fusion())


def _needed(fusion: Fusion) -> Fusion:
    """The Fusion without the operations that no gradient needs."""
    needed, ops = set(fusion.outputs), []
    for op in reversed(fusion.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.values)
            ops.append(op)
    return replace(fusion, ops=tuple(reversed(ops)))


def _backward(fd: FusionDefinition, op: Op, grads: dict[Value, Value]) -> None:
    if op.kind.grad is None:
        if any(v.type.dtype in FLOATS for v in op.values) and op.kind.role != "view":
            raise UnsupportedError(f"{op.kind.name} has no derivative", todo="compute it under torch.no_grad()", where=op.source)
        return
    try:
        (output,) = op.outputs  # what has several outputs has no derivative
        found = op.kind.grad(fd, op, _like(fd, grads[output], output))
    except NotImplementedError as error:
        raise UnsupportedError(f"not supported: {error}", todo="compute it under torch.no_grad()", where=op.source) from None
    for v, grad in zip(op.inputs, found, strict=True):
        if isinstance(v, Value) and grad is not None:
            _add(fd, grads, v, grad)


def _like(fd: FusionDefinition, grad: Value, v: Value) -> Value:
    """The gradient of v with the cut of v's rows."""
    if grad.type.shape == v.type.shape:
        return grad
    return fd.ops.reshape(grad, new_shape=v.type.shape)


def _add(fd: FusionDefinition, grads: dict[Value, Value], v: Value, grad: Value) -> None:
    grads[v] = fd.ops.add(grads[v], grad) if v in grads else grad
