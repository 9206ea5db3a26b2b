"""Checks of an operation's arguments, with messages in the caller's terms: torch's dtypes and
shapes, no types of the IR.

Each check gets an argument's name and type, and raises before anything is built. G groups or
experts, N out-features, K in-features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_moe.errors import DtypeError, ShapeError
from fusion_moe.ir.activation import Activation
from fusion_moe.ir.core import Value
from fusion_moe.ir.types import DTYPES, INTS, TensorType, accumulated, plain

FLOATS = ("bf16", "f16", "f32", "f64")
QUANTIZABLE = FLOATS[:3]


def need_dtype(name: str, type: TensorType, dtypes: Sequence[str], todo: str = "") -> None:
    """The dtype must be one of `dtypes`. todo: the remedy, if it is not a cast to the first one."""
    if type.dtype not in dtypes:
        raise DtypeError(
            f"{name} is {DTYPES[type.dtype]}",
            expected=_listed(dtypes),
            todo=todo or f"pass {name}.to({DTYPES[dtypes[0]]})",
        )


def need_float_dtype(name: str, dtype: str) -> None:
    """A requested dtype must be a float dtype."""
    if dtype not in FLOATS:
        raise DtypeError(f"{name} = {DTYPES[dtype]}", expected=_listed(FLOATS))


def need_rank(name: str, type: TensorType, form: str) -> None:
    """The number of dimensions must be that of `form`, such as "[T, k]"."""
    if len(type.shape) != form.count(",") + 1:
        raise ShapeError(f"{name} has rank {len(type.shape)}", expected=form)


def need_shape(name: str, type: TensorType, shape: Sequence[object], meaning: str) -> None:
    """The shape must be this one. meaning: what the tensor is, such as "the end of each group's
    rows".
    """
    if tuple(map(plain, type.shape)) != tuple(shape):
        raise ShapeError(
            f"{name} {shown(type)}", expected=f"[{', '.join(map(str, shape))}], {meaning}"
        )


def need_operand(name: str, x: TensorType, of: str, weight: TensorType, axis: int = 2) -> None:
    """x float[..., K] must have the K of a weight [G, N, K] and a dtype that the weight multiplies.
    axis: the weight's contracted axis.
    """
    need_dtype(name, x, FLOATS)
    have, want = plain(x.shape[-1]), plain(weight.shape[axis])
    if have != want:
        raise ShapeError(
            f"{name} has {have} features",
            expected=f"{want}, the in-features of {of} {shown(weight)}",
            todo=f"pass rows of {want} features, or a weight for {have}",
        )
    need_one_width(name, x, of, weight)


def need_one_width(name: str, x: TensorType, of: str, other: TensorType) -> None:
    """float64 is multiplied only with float64."""
    if accumulated(x.dtype) != accumulated(other.dtype):
        raise DtypeError(
            f"{name} is {_dtype(x)}, {of} {_dtype(other)}",
            expected="torch.float64 for both, or for neither",
            todo=f"pass {name}.to({DTYPES.get(other.dtype, torch.bfloat16)})",
        )


def _dtype(type: TensorType) -> object:
    """As torch names it; an encoding by its name."""
    return DTYPES.get(type.dtype, type.dtype)


def need_ends(name: str, offs: TensorType, groups: object) -> None:
    """i32[G]"""
    need_dtype(name, offs, ("i32",))
    need_shape(name, offs, (groups,), "where the rows of each group end")


def need_slots(name: str, slots: TensorType) -> None:
    """int[T, k], an expert or a row for each slot of a token"""
    todo = f"indices come as {name}, the router's weights as w" if slots.dtype in FLOATS else ""
    need_dtype(name, slots, INTS, todo)
    need_rank(name, slots, "[T, k]")


def need_slot_weights(w: TensorType, slots: TensorType) -> None:
    """w float[T, k], one for each slot. T is only compared if it is known."""
    need_dtype("w", w, FLOATS)
    need_rank("w", w, "[T, k]")
    weights, k = plain(w.shape[1]), plain(slots.shape[1])
    if weights != k:
        raise ShapeError(
            f"w [T, {weights}] and ids [T, {k}]",
            expected="one shape: a weight for each slot of a token",
        )


def need_bias(
    name: str, bias: Value | None, groups: object, width: object, rows: TensorType
) -> None:
    """[G, N], in the dtype of the rows that it is added to; or none"""
    if bias is not None:
        need_shape(name, bias.type, (groups, width), "a row for each group")
        need_dtype(name, bias.type, (rows.dtype,))


def need_parts(name: str, columns: object, activation: Activation) -> None:
    """Columns must be those of the activation's parts: gate and up, in halves or alternating
    blocks.
    """
    block = activation.parts * (activation.interleave or 1)
    if not isinstance(columns, int) or columns % block:
        turns = f" with interleave = {activation.interleave}" if activation.interleave else ""
        raise ShapeError(
            f"{name} of {columns} columns, gate and up,{turns}".rstrip(","),
            expected=f"a multiple of {block}",
        )


def need_parameters(
    value: Value | None, activation: Activation, experts: object, features: object
) -> None:
    """float [E, P, I] or [E, P, 1] for the P parameters of an activation; none if it has none"""
    shape = None if value is None else tuple(map(plain, value.type.shape))
    wanted = [(experts, activation.parameters, n) for n in (features, 1)]
    if shape not in (wanted if activation.parameters else [None]):
        raise ShapeError(
            f"activation_parameters {'None' if value is None else shown(value.type)}",
            expected=" or ".join(str([*s]) for s in wanted) if activation.parameters else "None",
            todo="" if activation.parameters else "the activation reads no parameters",
        )
    if value is not None:
        need_dtype("activation_parameters", value.type, FLOATS)


def _listed(dtypes: Sequence[str]) -> str:
    *first, last = (str(DTYPES[dtype]) for dtype in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


def shown(type: TensorType) -> str:
    """A shape as torch prints it; "..." for sizes that are known only at launch."""
    return f"[{', '.join(str(d) if isinstance(d, int) else '...' for d in map(plain, type.shape))}]"
