"""Pointwise operations: each element of the result from one element of each input. Sizes are equal
or 1; a number has the tensors' dtype.

Each result is rounded to its dtype as in torch: bf16 is computed in float32 and rounded, once for
each operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import DtypeError
from ..core import Op, OpKind, Value
from ..types import COMPUTED, DTYPES, FLOATS, INTS, STORED, TensorType, called_here, elements, plain
from .rules import (
    Types,
    joined_dtype,
    joined_shape,
    need_dtype,
    need_finite,
    need_float,
    need_tensor,
)

Grad = Callable[[Any, Op, Value], Sequence[Value | None]]


def _same(*types: Any) -> Types:
    return (TensorType(joined_shape(types), _computed_dtype(types)),)


def _computed_dtype(types: Sequence[Any]) -> str:
    """The common dtype of the tensors, in which torch computes."""
    dtype = joined_dtype(types)
    if dtype not in COMPUTED:
        raise DtypeError(
            f"the input is {dtype}",
            expected="a wider dtype",
            todo="cast with fd.ops.cast(x, dtype=...)",
        )
    return dtype


def _bounded(*types: Any) -> Types:
    """A number among the operands becomes a tensor, so its dtype must be able to hold it."""
    for t in types:
        if not isinstance(t, TensorType):
            need_finite("the number", t, _computed_dtype(types))
    return _same(*types)


def _sum(*types: Any) -> Types:
    """Masks may be added to and multiplied with each other, as `or` and `and`; with a number, torch
    would make them integers.
    """
    if joined_dtype(types) == "bool" and not all(isinstance(t, TensorType) for t in types):
        raise DtypeError(
            "a number beside bool", expected="two masks", todo="cast with fd.ops.cast(x, dtype=...)"
        )
    return _same(*types)


def _number(*types: Any) -> Types:
    for t in types:
        if isinstance(t, bool):
            raise DtypeError(f"the number {t}", expected="an int or a float")
        if isinstance(t, TensorType):
            need_dtype("the input", t, *FLOATS, *INTS, "u8")
    return _same(*types)


def _power(*types: Any) -> Types:
    _bounded(*types)
    return _float(*types)


def _float(*types: Any) -> Types:
    for t in types:
        if isinstance(t, TensorType):
            need_float("the input", t)
    return _same(*types)


def _compared(*types: Any) -> Types:
    _computed_dtype(types)
    return (TensorType(joined_shape(types), "bool"),)


def _logical(*types: Any) -> Types:
    for t in types:
        need_dtype("the input", t, "bool")
    return _same(*types)


def _cast_type(x: TensorType, dtype: str) -> Types:
    """x in another dtype, rounded once: bf16, f16, f32, f64, f8e4m3, i32, i64, u8, bool, ..."""
    if dtype not in DTYPES:
        raise DtypeError(
            f"dtype={dtype!r}",
            expected=f"one of {', '.join(DTYPES)}",
            todo=called_here(dtype),
        )
    need_dtype("x", x, *DTYPES)
    return (need_tensor("x", x).with_(dtype=dtype, ends=None),)


def _where_type(condition: TensorType, a: Any, b: Any) -> Types:
    """a where the mask condition is true, b elsewhere; sizes equal or 1. A number takes the dtype
    of the tensor beside it.
    """
    need_dtype("condition", condition, "bool")
    (result,) = _bounded(a, b)
    return (result.with_(shape=joined_shape((condition, a, b))),)


def _as_tensors(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands, one of which may be a number, as tensors, for torch functions that take only
    tensors.
    """
    like = a if isinstance(a, torch.Tensor) else b
    return torch.as_tensor(a, dtype=like.dtype, device=like.device), torch.as_tensor(
        b, dtype=like.dtype, device=like.device
    )


def _in_opmath(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The sum of 16-bit floats and a number that is not rounded to 16 bits: as in Inductor's
    kernels and torch's on CUDA, not on CPUs.
    """

    def evaluate(a: Any, b: Any) -> torch.Tensor:
        dtypes = [v.dtype for v in (a, b) if isinstance(v, torch.Tensor)]
        if len(dtypes) == 1 and dtypes[0] in (torch.bfloat16, torch.float16):
            return function(*(v.float() if isinstance(v, torch.Tensor) else v for v in (a, b))).to(
                dtypes[0]
            )
        return function(a, b)

    return evaluate


def unbroadcast(fd: Any, grad: Value, x: Any) -> Value | None:
    """The gradient of an input whose dimensions of size 1 were repeated: summed over them."""
    if not isinstance(x, Value):
        return None
    dims = tuple(
        i
        for i, (a, b) in enumerate(zip(x.type.shape, grad.type.shape, strict=True))
        if plain(a) == 1 and plain(b) != 1
    )
    return fd.ops.sum(grad, dims=dims, keepdim=True) if dims else grad


def _binary_grad(rule: Callable[[Any, Any, Any, Value, Value], Sequence[Value | None]]) -> Grad:
    """rule(ops, a, b, y, dy) -> (da, db), before gradients of broadcast operands are summed."""

    def grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
        a, b = op.inputs
        grads = rule(fd.ops, a, b, op.outputs[0], dy)
        return [
            None if g is None else unbroadcast(fd, g, x) for g, x in zip(grads, (a, b), strict=True)
        ]

    return grad


def _passes_at_bound() -> bool:
    """Whether the installed torch's clamp passes the gradient of an element that equals a bound:
    yes up to 2.13, no from 2.14 on.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros((), device="cpu", requires_grad=True).clamp(min=0.0).grad_fn
        # called directly: once autograd's threads have started, forking is impossible
        return bool(node(torch.ones((), device="cpu")))


_LESS, _GREATER = ("le", "ge") if _passes_at_bound() else ("lt", "gt")


def _extreme_grad(inside: str, lost: str) -> Grad:
    """minimum and maximum pass the gradient to the tensor that was kept: with a number at the bound
    too if torch.clamp does, and half of it to each of two tensors where they are equal.
    """

    def share(ops: Any, x: Value, other: Value, g: Value) -> Value:
        kept = ops.where(ops.eq(x, other), g * 0.5, g)
        return ops.where(getattr(ops, lost)(x, other), 0.0, kept)

    of_two = _binary_grad(lambda o, a, b, y, g: (share(o, a, b, g), share(o, b, a, g)))

    def grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
        a, b = op.inputs
        if isinstance(a, Value) and isinstance(b, Value):
            return of_two(fd, op, dy)
        x, bound = (a, b) if isinstance(a, Value) else (b, a)
        dx = fd.ops.where(getattr(fd.ops, inside)(x, bound), dy, 0.0)
        return [dx if v is x else None for v in (a, b)]

    return grad


def _cast_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    x = op.inputs[0]
    assert isinstance(x, Value)
    if x.type.dtype in STORED:
        raise NotImplementedError(
            f"the derivative of a cast from {x.type.dtype}, which has no room for gradients"
        )
    return [fd.ops.cast(dy, dtype=x.type.dtype) if x.type.dtype in FLOATS else None]


def _where_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    condition, a, b = op.inputs
    return [
        None,
        unbroadcast(fd, fd.ops.where(condition, dy, 0.0), a),
        unbroadcast(fd, fd.ops.where(condition, 0.0, dy), b),
    ]


def _silu_grad(ops: Any, x: Value, y: Value, dy: Value) -> Value:
    s = ops.sigmoid(x)
    return dy * (s * (x * (1.0 - s) + 1.0))


def _erf_grad(ops: Any, x: Value, y: Value, dy: Value) -> Value:
    return dy * (ops.exp(-(x * x)) * (2 / math.sqrt(math.pi)))


def _pow_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    x, exponent = op.inputs
    if not isinstance(exponent, Value):
        assert isinstance(x, Value)
        return [dy * (x ** (exponent - 1) * exponent if exponent else 0.0), None]
    if not isinstance(x, Value):
        return [None, dy * op.outputs[0] * math.log(x)] if x > 0 else [None, None]
    return _pow_grads(fd, op, dy)


def _pow_slopes(ops: Any, x: Value, exponent: Value, y: Value, g: Value) -> Sequence[Value]:
    """Those of a power of two tensors: 0 where torch's are, not NaN."""
    of_x = ops.where(ops.eq(exponent, 0.0), 0.0, exponent * x ** (exponent - 1.0))
    of_exponent = ops.where(ops.eq(x, 0.0) & (exponent >= 0.0), 0.0, y * ops.log(x))
    return g * of_x, g * of_exponent


_pow_grads = _binary_grad(_pow_slopes)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) in float32 (float64 in float64), rounded once: bit for bit the result of
    its decomposition.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide / (1 + (-wide).exp())).to(x.dtype)


def _unary(
    name: str,
    infer: Callable[..., Types],
    function: Callable[..., torch.Tensor],
    grad: Callable[[Any, Value, Value, Value], Value] | None = None,
) -> OpKind:
    """grad(ops, x, y, dy) -> dx."""

    def rule(x: TensorType) -> Types:
        return infer(x)

    def of_op(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
        assert grad is not None
        return [grad(fd.ops, op.values[0], op.outputs[0], dy)]

    rule.__doc__ = f"{name} of each element of x, in its dtype."
    return OpKind(name, rule, lambda x: (function(x),), grad and of_op, flops=_elements)


def _binary(
    name: str,
    infer: Callable[..., Types],
    function: Callable[..., torch.Tensor],
    grad: Grad | None = None,
) -> OpKind:
    def rule(a: Any, b: Any) -> Types:
        return infer(a, b)

    result = "a mask" if infer is _compared else "in their one dtype"
    rule.__doc__ = (
        f"{name} of each element of a and b, {result}; sizes equal or 1. A number "
        "takes the dtype of the tensor beside it."
    )
    return OpKind(name, rule, lambda a, b: (function(a, b),), grad, flops=_elements)


def _elements(op: Op) -> Any:
    """One operation for each element of the result."""
    return elements(op.outputs[0].type.shape)


TABLE = (
    OpKind("cast", _cast_type, lambda x, dtype: (x.to(DTYPES[dtype]),), _cast_grad),
    OpKind(
        "where",
        _where_type,
        lambda condition, a, b: (torch.where(condition, *_as_tensors(a, b)),),
        _where_grad,
        flops=_elements,
    ),
    _unary("neg", _number, torch.neg, lambda o, x, y, g: -g),
    _unary(
        "abs", _number, torch.abs, lambda o, x, y, g: o.where(x < 0.0, -g, o.where(x > 0.0, g, 0.0))
    ),
    _unary("exp", _float, torch.exp, lambda o, x, y, g: g * y),
    _unary("log", _float, torch.log, lambda o, x, y, g: g / x),
    _unary("expm1", _float, torch.expm1, lambda o, x, y, g: g * (y + 1.0)),
    _unary("log1p", _float, torch.log1p, lambda o, x, y, g: g / (x + 1.0)),
    _unary("sqrt", _float, torch.sqrt, lambda o, x, y, g: g / (y * 2.0)),
    _unary("rsqrt", _float, torch.rsqrt, lambda o, x, y, g: g * (y / x * -0.5)),
    _unary("reciprocal", _float, torch.reciprocal, lambda o, x, y, g: -(g * (y * y))),
    _unary("tanh", _float, torch.tanh, lambda o, x, y, g: g * (1.0 - y * y)),
    _unary("erf", _float, torch.erf, _erf_grad),
    _unary("erfc", _float, torch.erfc, lambda o, x, y, g: -_erf_grad(o, x, y, g)),
    _unary("sin", _float, torch.sin, lambda o, x, y, g: g * o.cos(x)),
    _unary("cos", _float, torch.cos, lambda o, x, y, g: -(g * o.sin(x))),
    _unary("atan", _float, torch.atan, lambda o, x, y, g: g / (x * x + 1.0)),
    _unary("floor", _float, torch.floor, lambda o, x, y, g: g * 0.0),
    _unary("round", _float, torch.round, lambda o, x, y, g: g * 0.0),
    _unary("relu", _number, torch.relu, lambda o, x, y, g: o.where(x > 0.0, g, 0.0)),
    _unary("sigmoid", _float, torch.sigmoid, lambda o, x, y, g: g * (y * (1.0 - y))),
    _unary("silu", _float, _silu, _silu_grad),
    _binary(
        "add", _sum, _in_opmath(lambda a, b: a + b), _binary_grad(lambda o, a, b, y, g: (g, g))
    ),
    _binary(
        "sub", _number, _in_opmath(lambda a, b: a - b), _binary_grad(lambda o, a, b, y, g: (g, -g))
    ),
    _binary("mul", _sum, lambda a, b: a * b, _binary_grad(lambda o, a, b, y, g: (g * b, g * a))),
    _binary(
        "div", _float, lambda a, b: a / b, _binary_grad(lambda o, a, b, y, g: (g / b, -(g * y / b)))
    ),
    _binary(
        "minimum",
        _bounded,
        lambda a, b: torch.minimum(*_as_tensors(a, b)),
        _extreme_grad(_LESS, "gt"),
    ),
    _binary(
        "maximum",
        _bounded,
        lambda a, b: torch.maximum(*_as_tensors(a, b)),
        _extreme_grad(_GREATER, "lt"),
    ),
    _binary("pow", _power, torch.pow, _pow_grad),
    _binary("lt", _compared, lambda a, b: a < b),
    _binary("le", _compared, lambda a, b: a <= b),
    _binary("gt", _compared, lambda a, b: a > b),
    _binary("ge", _compared, lambda a, b: a >= b),
    _binary("eq", _compared, lambda a, b: a == b),
    _binary("ne", _compared, lambda a, b: a != b),
    _binary("logical_and", _logical, lambda a, b: a & b),
    _binary("logical_or", _logical, lambda a, b: a | b),
    _unary("logical_not", _logical, torch.logical_not),
)
