"""Translators of aten's and prims' pointwise operations, in the forms that a decomposed graph
has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusion_moe.definitions.translate import translator
from fusion_moe.errors import Untranslatable
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Value
from fusion_moe.ir.types import FLOATS, INTS

_UNARY = (
    "neg",
    "abs",
    "exp",
    "log",
    "expm1",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "tanh",
    "erf",
    "erfc",
    "sin",
    "cos",
    "atan",
    "floor",
    "round",
    "relu",
    "sigmoid",
    "silu",
    "logical_not",
)
_BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "minimum",
    "maximum",
    "pow",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "logical_and",
    "logical_or",
)
_OVERLOADS: dict[str, tuple[str, ...]] = {
    "minimum": ("",),
    "maximum": ("",),
    "logical_and": ("",),
    "logical_or": ("",),
    "pow": (".Tensor_Tensor", ".Scalar"),
}
# of which prims has an operation too, in traces that torch has decomposed
_ONLY_ATEN = ("relu", "sigmoid", "silu", "logical_not", "logical_and", "logical_or")
_WIDER = {frozenset(("bf16", "f16")): "f32"}


def together(fd: FusionDefinition, *operands: Any) -> list[Any]:
    """Operands in the form that a pointwise operation takes: one dtype as torch promotes floats,
    one rank, numbers unchanged.
    """
    tensors = [v for v in operands if isinstance(v, Value)]
    dtype = _promoted([v.type.dtype for v in tensors])
    rank = max(len(v.type.shape) for v in tensors)
    if (
        any(v.type.dtype != dtype for v in tensors)
        and any(not v.type.shape for v in tensors)
        and rank
    ):
        raise Untranslatable(
            f"a 0-d tensor among {', '.join(str(v.type) for v in tensors)}",
            expected="one dtype: it takes no part in promotion",
        )
    if any(isinstance(v, float) for v in operands) and dtype not in FLOATS:
        raise Untranslatable(f"a float with {dtype} tensors", expected="float tensors")
    return [
        _ranked(fd, v if v.type.dtype == dtype else fd.ops.cast(v, dtype=dtype), rank)
        if isinstance(v, Value)
        else v
        for v in operands
    ]


def _promoted(dtypes: list[str]) -> str:
    kinds = set(dtypes)
    if len(kinds) == 1:
        return dtypes[0]
    kinds -= {"bool"} if kinds & set(FLOATS) else set()
    if len(kinds) == 1:
        return kinds.pop()
    for family in (FLOATS, INTS):
        if kinds <= set(family):
            return _WIDER.get(frozenset(kinds), min(kinds, key=family.index))
    raise Untranslatable(
        f"dtypes {' and '.join(sorted(kinds))} in one operation",
        expected="floats only, or integers only",
    )


def _ranked(fd: FusionDefinition, v: Value, rank: int) -> Value:
    missing = rank - len(v.type.shape)
    return fd.ops.reshape(v, new_shape=(1,) * missing + v.type.shape) if missing else v


def _unary(name: str) -> Callable[..., Value]:
    def translate(fd: FusionDefinition, x: Value) -> Value:
        return getattr(fd.ops, name)(x)

    return translate


def _binary(name: str) -> Callable[..., Value]:
    def translate(
        fd: FusionDefinition, a: Any, b: Any, alpha: float = 1, *, rounding_mode: str | None = None
    ) -> Value:
        if rounding_mode is not None:
            raise Untranslatable(f"rounding_mode = {rounding_mode!r}", expected="a true division")
        if alpha != 1:
            raise Untranslatable(
                f"alpha = {alpha}", expected="1: torch multiplies and adds with one rounding"
            )
        return getattr(fd.ops, name)(*together(fd, a, b))

    return translate


for _name in _UNARY:
    translator(f"aten::{_name}")(_unary(_name))
for _name in _BINARY:
    for _overload in _OVERLOADS.get(_name, (".Tensor", ".Scalar")):
        translator(f"aten::{_name}{_overload}")(_binary(_name))
for _name in {*_UNARY, *_BINARY} - {*_ONLY_ATEN}:
    translator(f"prims::{_name}")((_unary if _name in _UNARY else _binary)(_name))
for _name, _of_masks in {"and": "logical_and", "or": "logical_or", "xor": "ne"}.items():
    for _op in f"aten::bitwise_{_name}.Tensor", f"prims::bitwise_{_name}":
        translator(_op)(_binary(_of_masks))
for _op in "aten::bitwise_not", "prims::bitwise_not":
    translator(_op)(_unary("logical_not"))


@translator("aten::pow.Tensor_Scalar")
def pow_(fd: FusionDefinition, x: Value, exponent: float) -> Value:
    """x to the power of a number; a square is a product, as in torch"""
    return x * x if exponent == 2 else _binary("pow")(fd, x, exponent)


@translator("prims::convert_element_type")
def convert_element_type(fd: FusionDefinition, x: Value, dtype: str) -> Value:
    """x -> dtype"""
    return fd.ops.cast(x, dtype=dtype)


@translator("aten::_to_copy")
def to_copy(fd: FusionDefinition, x: Value, *, dtype: str | None = None, **others: Any) -> Value:
    """x -> dtype, on the same device"""
    if any(v is not None and v is not False for v in others.values()):
        raise Untranslatable(f"a copy with {', '.join(others)}", expected="a change of dtype alone")
    return fd.ops.cast(x, dtype=dtype or x.type.dtype)


def where(fd: FusionDefinition, condition: Value, a: Any, b: Any) -> Value:
    """condition ? a : b"""
    if not isinstance(a, Value) and not isinstance(b, Value):
        dtype = "f32" if isinstance(a, float) or isinstance(b, float) else "i64"
        b = fd.ops.cast(condition, dtype=dtype) * 0 + b
    a, b = together(fd, a, b)
    rank = max(len(v.type.shape) for v in (condition, a, b) if isinstance(v, Value))
    condition, a, b = (
        _ranked(fd, v, rank) if isinstance(v, Value) else v for v in (condition, a, b)
    )
    return fd.ops.where(condition, a, b)


for _op in "aten::where.self", "prims::where":
    translator(_op)(where)


@translator("aten::masked_fill.Scalar")
def masked_fill(fd: FusionDefinition, x: Value, mask: Value, value: float) -> Value:
    """value where a mask is true, x elsewhere"""
    return where(fd, mask, value, x)


@translator("aten::threshold")
def threshold(fd: FusionDefinition, x: Value, threshold: float, value: float) -> Value:
    """x where it is above a threshold, value elsewhere; NaN remains"""
    return fd.ops.where(x <= threshold, value, x)


@translator("aten::lerp.Scalar")
def lerp(fd: FusionDefinition, a: Value, b: Value, weight: float) -> Value:
    """a + weight * (b - a), from the end that is nearer, as torch computes it"""
    narrow = together(fd, a, b)
    a, b = (in_f32(fd, v) for v in narrow)
    y = a + (b - a) * weight if abs(weight) < 0.5 else b - (b - a) * (1.0 - weight)
    return fd.ops.cast(y, dtype=narrow[0].type.dtype)


def in_f32(fd: FusionDefinition, x: Value) -> Value:
    """x as torch computes it, without rounding in between"""
    return fd.ops.cast(x, dtype="f32") if x.type.dtype in ("bf16", "f16") else x


@translator("aten::log_sigmoid_forward")
def log_sigmoid(fd: FusionDefinition, x: Value) -> tuple[Value, Value]:
    """log(sigmoid(x)), and what torch saves beside it, which nothing reads"""
    return fd.ops.cast(-softplus(fd.ops, -in_f32(fd, x)), dtype=x.type.dtype), x


def softplus(ops: Any, x: Value) -> Value:
    """log(1 + exp(x)), which from 20 on is x, as in torch. The bound lies beyond 20: what gradient
    an element has that equals it depends on torch's version.
    """
    return ops.where(x > 20.0, x, ops.log1p(ops.exp(ops.minimum(x, 21.0))))


def _sign(ops: Any, x: Value) -> Value:
    above, below = (ops.cast(mask, dtype=x.type.dtype) for mask in (x > 0.0, x < 0.0))
    return above - below


def _trunc(ops: Any, x: Value) -> Value:
    return ops.where(x < 0.0, -ops.floor(-x), ops.floor(x))


def _asinh(ops: Any, x: Value) -> Value:
    """Not by abs, whose derivative is 0 at 0."""
    square, below = x * x, x < 0.0
    y = ops.log1p(ops.where(below, -x, x) + square / (ops.sqrt(square + 1.0) + 1.0))
    return ops.where(below, -y, y)


def _asin(ops: Any, x: Value) -> Value:
    return 2.0 * ops.atan(x / (ops.sqrt(1.0 - x * x) + 1.0))


def _sinc(ops: Any, x: Value) -> Value:
    """Never by 0: the gradient of what `where` leaves out would be NaN, not 0."""
    zero = ops.eq(x, 0.0)
    angle = ops.where(zero, 1.0, x) * math.pi
    return ops.where(zero, 1.0, ops.sin(angle) / angle)


# of floats, computed in float32 and rounded once
_COMPOSED: dict[str, Callable[[Any, Value], Value]] = {
    "exp2": lambda ops, x: ops.pow(2.0, x),
    "log2": lambda ops, x: ops.log(x) * (1 / math.log(2)),
    "log10": lambda ops, x: ops.log(x) * (1 / math.log(10)),
    "tan": lambda ops, x: ops.sin(x) / ops.cos(x),
    "sinh": lambda ops, x: (ops.expm1(x) - ops.expm1(-x)) * 0.5,
    "cosh": lambda ops, x: (ops.exp(x) + ops.exp(-x)) * 0.5,
    "asinh": _asinh,
    "atanh": lambda ops, x: (ops.log1p(x) - ops.log1p(-x)) * 0.5,
    "asin": _asin,
    "acos": lambda ops, x: math.pi / 2 - _asin(ops, x),
    "sinc": _sinc,
    "sign": _sign,
    "ceil": lambda ops, x: -ops.floor(-x),
    "trunc": _trunc,
    "frac": lambda ops, x: x - _trunc(ops, x),
}


def _composed(name: str) -> Callable[..., Value]:
    def translate(fd: FusionDefinition, x: Value) -> Value:
        if x.type.dtype not in FLOATS:
            raise Untranslatable(f"{name} of {x.type}", expected="floats")
        return fd.ops.cast(_COMPOSED[name](fd.ops, in_f32(fd, x)), dtype=x.type.dtype)

    return translate


for _name in _COMPOSED:
    translator(f"aten::{_name}")(_composed(_name))
    if _name not in ("frac", "sinc"):
        translator(f"prims::{_name}")(_composed(_name))


@translator("aten::isnan")
def isnan(fd: FusionDefinition, x: Value) -> Value:
    """a mask"""
    return fd.ops.ne(x, x)


def _of_numbers(name: str) -> Callable[..., Value]:
    def translate(fd: FusionDefinition, a: Value, b: Value) -> Value:
        a, b = together(fd, a, b)
        both = getattr(fd.ops, name)(a, b)
        return fd.ops.where(fd.ops.ne(a, a), b, fd.ops.where(fd.ops.ne(b, b), a, both))

    return translate


for _name, _other in {"fmax": "maximum", "fmin": "minimum"}.items():
    for _op in f"aten::{_name}", f"prims::{_name}":
        translator(_op)(_of_numbers(_other))


@translator("aten::clamp")
def clamp(
    fd: FusionDefinition, x: Value, min: float | None = None, max: float | None = None
) -> Value:
    """x kept between min and max"""
    if x.type.dtype == "bool":
        raise Untranslatable("a mask", expected="numbers: torch makes integers of it")
    x = x if min is None else fd.ops.maximum(x, min)
    return x if max is None else fd.ops.minimum(x, max)


translator("aten::clamp_min")(clamp)


@translator("aten::clamp_max")
def clamp_max(fd: FusionDefinition, x: Value, max: float) -> Value:
    """x, at most max"""
    return clamp(fd, x, max=max)
