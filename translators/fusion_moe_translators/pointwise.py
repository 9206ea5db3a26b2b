"""Translators of aten's and prims' pointwise operations, in the forms that a decomposed graph
has.
"""

from __future__ import annotations

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
    "pow": (".Tensor_Tensor",),
}
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


@translator("aten::where.self")
def where(fd: FusionDefinition, condition: Value, a: Any, b: Any) -> Value:
    """condition ? a : b"""
    a, b = together(fd, a, b)
    rank = max(len(v.type.shape) for v in (condition, a, b) if isinstance(v, Value))
    condition, a, b = (
        _ranked(fd, v, rank) if isinstance(v, Value) else v for v in (condition, a, b)
    )
    return fd.ops.where(condition, a, b)


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
