"""Weights of our operations: tensors that are the parts of an encoding, as one value."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_moe.encodings import ENCODINGS, find
from fusion_moe.errors import Error, OptionError, ShapeError, need_one_of
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Value
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.types import FLOATS, TensorType
from fusion_moe.layouts import LAYOUTS

from .arguments import need_dtype, need_rank


def packed(
    fd: FusionDefinition,
    parts: Sequence[Value],
    weight_format: str,
    layout: str,
    k_major: bool = False,
    straight_through: str = "exact",
) -> Value:
    """The checked parts of a weight, and perhaps its master -> the weight; a plain weight in
    row-major order is its only part.
    """
    fd.mark_weight(*parts)
    if is_plain(weight_format, layout):
        return parts[0]
    parts, master = without_master(parts, weight_format)
    weight = fd.ops.pack(
        *parts, encoding=weight_format, layout=layout, **({"transposed": True} if k_major else {})
    )
    return (
        weight if master is None else fd.ops.straight_through(weight, master, how=straight_through)
    )


def without_master(
    tensors: Sequence[Value], weight_format: str
) -> tuple[Sequence[Value], Value | None]:
    """The parts of a weight, and the floats that they were rounded from, if those come last."""
    count = len(find(weight_format).parts)
    argument = len(tensors) == count + 1 and len(tensors[count].type.shape) == 3
    return (tensors[:count], tensors[count]) if argument else (tensors, None)


def weight_type(
    name: str, parts: Sequence[Value], weight_format: str, layout: str, transposed: bool = False
) -> TensorType:
    """The type of the weight [G, N, K] that tensors are the parts of, or [G, K, N] for a plain one
    that is transposed.

    OptionError, ShapeError or DtypeError if they are not its parts, in the caller's terms.
    """
    need_one_of("weight_layout", layout, LAYOUTS, todo="fusion_moe.layouts.register adds one")
    need_one_of(
        "weight_format",
        weight_format,
        (*ENCODINGS, "f64"),
        todo="fusion_moe.encodings.register adds one",
    )
    types = [part.type for part in parts]
    plain = is_plain(weight_format, layout)
    if transposed and not plain:
        raise OptionError(
            f"transposed = True with weight_format = {weight_format!r} and weight_layout = "
            f"{layout!r}",
            expected="weights of floats [G, K, N], in the linear layout",
        )
    if not parts or (plain and len(parts) != 1):
        raise ShapeError(
            f"{name} of {len(parts)} tensors",
            expected=f"the parts of {weight_format}",
            todo="weight_format says how weights are stored",
        )
    need_rank(name, types[0], "[G, N, K]")
    if plain:
        need_dtype(name, types[0], (weight_format,), "weight_format says so")
        return types[0]
    try:
        argument, master = without_master(parts, weight_format)
        (weight,) = KINDS["pack"].infer(
            *(part.type for part in argument), encoding=weight_format, layout=layout
        )
        if master is not None:
            KINDS["straight_through"].infer(weight, master.type, how="exact")
    except Error as error:
        raise error.at(name) from None
    return weight


def is_plain(weight_format: str, layout: str) -> bool:
    """Whether a weight is one tensor of floats in row-major order."""
    return weight_format in FLOATS and layout == "linear"
