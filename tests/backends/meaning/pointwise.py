"""Pointwise operations: one element of the result from one element of each input.

In a printed definition every promotion is a cast of its own: the tensors that an operation reads
have one dtype, scalars are of its kind. nvFuser's kernels have no arithmetic for 16 bits: such
tensors are cast to Float first, which is printed too, but for the operations of which nvFuser does
not know that they need it (relu, silu, rounding, comparing with NaN): these are refused here, as
the compiler would. Dividing integers truncates; minimum, maximum and clamp give NaN for NaN; the
arithmetic is torch's on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .values import (
    FLOATS,
    HALVES,
    INTS,
    Scalar,
    Value,
    constant,
    converted,
    described,
    need,
    scalar,
    tensor,
)

NUMBERS = (*FLOATS, *INTS)


@dataclass(frozen=True)
class Pointwise:
    """`function` of tensors (0-d for scalars) of one of `dtypes`; the result has that dtype, or
    `result`.
    """

    name: str
    operands: int
    function: Callable[..., torch.Tensor]
    dtypes: tuple[str, ...]
    result: str | None = None

    def __call__(self, *args: Any) -> Value | Scalar:
        need(
            len(args) == self.operands,
            f"{self.name} takes {self.operands} operands, found {len(args)}",
        )
        dtype, data = common(*args)
        need(
            dtype in self.dtypes,
            f"{self.name} of {dtype}: nvFuser computes it for {', '.join(self.dtypes)}; cast first",
        )
        return result_of(self.function(*data), self.result or dtype, args)


def common(*args: Any) -> tuple[str, list[torch.Tensor]]:
    """The one dtype of the operands, and their data, scalars as 0-d tensors. Refused: tensors of
    several dtypes or ranks.
    """
    tensors = [x for x in args if not _is_scalar(x)]
    dtypes = {tensor(x).dtype for x in tensors}
    need(
        len(dtypes) < 2,
        f"tensors of several dtypes: {'; '.join(map(described, tensors))}. "
        "nvFuser would have printed a cast",
    )
    ranks = {x.data.dim() for x in tensors}
    need(
        len(ranks) < 2,
        f"tensors of several ranks: {'; '.join(map(described, tensors))}. "
        "nvFuser would have printed a broadcast",
    )
    dtype = dtypes.pop() if dtypes else _scalar_dtype([scalar(x).dtype for x in args])
    for s in (scalar(x) for x in args if _is_scalar(x)):
        need(
            _kind(s.dtype) == _kind(dtype),
            f"{described(s)} with a {dtype} operand: nvFuser would have printed a cast",
        )
    return dtype, [constant(x, dtype) if _is_scalar(x) else x.data for x in args]


def result_of(data: torch.Tensor, dtype: str, args: tuple[Any, ...]) -> Value | Scalar:
    """A tensor, or a scalar when all operands were."""
    return Scalar(data.item(), dtype) if all(map(_is_scalar, args)) else Value(data, dtype)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, (Scalar, bool, int, float))


def _kind(dtype: str) -> str:
    return "integer" if dtype in INTS else "bool" if dtype == "Bool" else "float"


def _scalar_dtype(dtypes: list[str]) -> str:
    """Int and Index stand for the same; else the wider one."""
    order = ("Bool", "Int32", "Index", "Int", "Half", "BFloat16", "Float", "Double")
    return max(dtypes, key=order.index)


def cast(x: Any, *, dtype: str) -> Value | Scalar:
    if _is_scalar(x):
        s = scalar(x)
        data = torch.tensor(s.value, dtype=torch.float64 if _kind(s.dtype) == "float" else None)
        return Scalar(converted(data, s.dtype, dtype).item(), dtype)
    x = tensor(x)
    return Value(converted(x.data, x.dtype, dtype), dtype)


def where(condition: Any, x: Any, y: Any) -> Value | Scalar:
    """Of any dtype, also the 16-bit ones."""
    of, (picks,) = common(condition)
    need(of == "Bool", f"where of {described(condition)}, not Bool")
    dtype, chosen = common(x, y)
    ranks = {v.data.dim() for v in (condition, x, y) if isinstance(v, Value)}
    need(
        len(ranks) < 2, f"tensors of several ranks: {'; '.join(map(described, (condition, x, y)))}"
    )
    return result_of(torch.where(picks, chosen[0], chosen[1]), dtype, (condition, x, y))


def _unary(
    name: str,
    function: Callable[..., torch.Tensor],
    dtypes: tuple[str, ...] = FLOATS,
    result: str | None = None,
) -> Pointwise:
    return Pointwise(name, 1, function, dtypes, result)


def _binary(
    name: str,
    function: Callable[..., torch.Tensor],
    dtypes: tuple[str, ...] = NUMBERS,
    result: str | None = None,
) -> Pointwise:
    return Pointwise(name, 2, function, dtypes, result)


_NAMES = ["exp", "exp2", "expm1", "log", "log1p", "log2", "tanh", "erf", "sqrt", "rsqrt", "ceil"]
_NAMES += ["erfc", "sin", "cos", "atan", "floor", "round"]
TABLE = (
    *(_unary(name, getattr(torch, name)) for name in _NAMES),
    _unary("reciprocal", lambda x: 1 / x),
    _unary("sigmoid", lambda x: 1 / (1 + torch.exp(-x))),
    _unary("silu", lambda x: x * (1 / (1 + torch.exp(-x)))),
    _unary("relu", lambda x: torch.where(x <= 0, 0, x)),
    _unary("abs", torch.abs, (*NUMBERS, *HALVES)),
    _unary("neg", torch.neg, NUMBERS),
    _unary("logical_not", torch.logical_not, ("Bool",)),
    _binary("add", torch.add),
    _binary("sub", torch.sub),
    _binary("mul", torch.mul),
    _binary(
        "div",
        lambda a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    ),
    _binary("pow", torch.pow, FLOATS),
    _binary("maximum", lambda a, b: torch.where((a != a) | (a > b), a, b)),
    _binary("minimum", lambda a, b: torch.where((b != b) | (a > b), b, a)),
    *(_binary(name, getattr(torch, name), (*NUMBERS, "Bool"), "Bool") for name in ("eq", "ne")),
    *(_binary(name, getattr(torch, name), NUMBERS, "Bool") for name in ("lt", "le", "gt", "ge")),
    *(_binary(name, getattr(torch, name), ("Bool",)) for name in ("logical_and", "logical_or")),
    *(
        _binary(name, getattr(torch, name), INTS)
        for name in ("bitwise_and", "bitwise_left_shift", "bitwise_right_shift")
    ),
)
POINTWISE = {row.name: row for row in TABLE}
OPS: dict[str, Callable[..., Any]] = {
    **POINTWISE,
    "cast": cast,
    "set": lambda x: x,
    "where": where,
}
