"""Helpers that the kinds' type rules share: checks that raise with found and expected, and the
dimensions of pointwise results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import DtypeError, FusionError, ShapeError
from ..types import COMPUTED, DTYPES, FLOATS, Dim, Groups, Rows, TensorType, plain

Types = tuple[TensorType, ...]


def need_tensor(name: str, type: Any) -> TensorType:
    """The type of an operand. DtypeError if the operand is a number and not a tensor. name: what
    the message calls it.
    """
    if not isinstance(type, TensorType):
        raise DtypeError(f"{name} is a number, {type!r}", expected="a tensor")
    return type


def need_rank(name: str, type: TensorType, *ranks: int) -> None:
    """The number of dimensions must be one of `ranks`."""
    if len(need_tensor(name, type).shape) not in ranks:
        raise ShapeError(
            f"{name} {type} has {len(type.shape)} dimensions", expected=" or ".join(map(str, ranks))
        )


def need_dtype(name: str, type: TensorType, *dtypes: str) -> None:
    """The dtype must be one of `dtypes`."""
    if need_tensor(name, type).dtype not in dtypes:
        raise DtypeError(f"{name} is {type}", expected=f"dtype {' or '.join(dtypes)}")


def need(name: str, type: TensorType, rank: int, *dtypes: str) -> None:
    """Raises unless an operand has this number of dimensions and one of the dtypes. name: what the
    message calls it.
    """
    need_rank(name, type, rank)
    need_dtype(name, type, *dtypes)


def need_float(name: str, type: TensorType) -> None:
    """The dtype must be a floating-point one."""
    need_dtype(name, type, *FLOATS)


def need_computed(name: str, type: TensorType) -> None:
    """The dtype must be one that torch computes in."""
    need_dtype(name, type, *COMPUTED)


def known(k: Dim) -> int:
    """A size that the program knows; ShapeError for one that depends on the call."""
    size = plain(k)
    if not isinstance(size, int):
        raise ShapeError(f"K = {k}", expected="a number known when compiling")
    return size


def need_same(what: str, first: str, a: Dim, second: str, b: Dim) -> None:
    """Two sizes must be equal, partitioned or not. what: "group count"; first, second: the names of
    the operands with these sizes.
    """
    if plain(a) != plain(b):
        raise ShapeError(
            f"{what} mismatch: {first} has {a}, {second} has {b}", expected="equal sizes"
        )


def need_ends(ends: TensorType) -> Groups:
    """The partition of an `i32[G]@ends(g)`."""
    groups = need_tensor("ends", ends).ends
    if groups is None:
        raise FusionError(
            f"{ends} where group ends are read",
            expected="i32[G]@ends(g)",
            todo="make it with fd.ops.ends or fd.ops.route",
        )
    return groups


def need_packed(groups: Groups) -> None:
    """Groups must follow each other, each beginning where the one before it ends."""
    if groups.stride is not None:
        raise FusionError(
            f"the groups {groups} begin at multiples of {groups.stride} rows",
            expected="groups that follow each other",
            todo="sort rows of ranks by expert with fd.ops.route",
        )


def need_partition(name: str, type: TensorType, ends: TensorType) -> Rows:
    """The first dimension must be rows partitioned by exactly these `ends`, in groups that follow
    each other.
    """
    need_packed(need_ends(ends))
    return need_rows_of(name, type, ends)


def need_rows_of(name: str, type: TensorType, ends: TensorType) -> Rows:
    """The first dimension must be rows partitioned by exactly these `ends`."""
    groups, dim = need_ends(ends), type.shape[0]
    if not isinstance(dim, Rows) or dim.groups != groups:
        actual = f"partitioned by {dim.groups}" if isinstance(dim, Rows) else "not partitioned"
        raise FusionError(
            f"the rows of {name} {type} are {actual}, the ends are of {groups}",
            expected=f"rows partitioned by {groups}",
            todo="partition plain rows with fd.ops.partition(x, ends)",
        )
    return dim


def joined_shape(types: Sequence[Any]) -> tuple[Dim, ...]:
    """The shape of a pointwise result: ranks equal, sizes equal or 1. Plain rows next to
    partitioned rows count as partitioned.
    """
    shapes = [t.shape for t in types if isinstance(t, TensorType)]
    if not shapes:
        raise DtypeError("all operands are numbers", expected="at least one tensor")
    if len({len(s) for s in shapes}) != 1:
        raise ShapeError(
            f"shapes {', '.join(map(_shown, shapes))}",
            expected="one rank",
            todo="use fd.ops.broadcast_in_dim",
        )
    return tuple(_joined_dim(dims, shapes) for dims in zip(*shapes, strict=True))


def _joined_dim(dims: Sequence[Dim], shapes: Sequence[tuple[Dim, ...]]) -> Dim:
    # a single row is repeated like any other size of 1, partitioned or not
    wide = [d for d in dims if plain(d) != 1] or dims
    partitions = {d for d in wide if isinstance(d, Rows)}
    if len(partitions) > 1:
        raise FusionError(
            f"rows partitioned as {' and as '.join(sorted(map(str, partitions)))}",
            expected="one partition",
        )
    if len({plain(d) for d in wide}) > 1:
        raise ShapeError(f"shapes {', '.join(map(_shown, shapes))}", expected="equal sizes, or 1")
    return partitions.pop() if partitions else wide[0]


def joined_dtype(types: Sequence[Any]) -> str:
    """The common dtype of the tensors; the IR does not promote, casts are operations."""
    dtypes = {t.dtype for t in types if isinstance(t, TensorType)}
    if not dtypes:
        raise DtypeError("all operands are numbers", expected="at least one tensor")
    if len(dtypes) != 1:
        raise DtypeError(
            f"dtypes {' and '.join(sorted(dtypes))}",
            expected="one dtype",
            todo="cast with fd.ops.cast(x, dtype=...)",
        )
    (dtype,) = dtypes
    for t in types:
        if not isinstance(t, TensorType):
            need_number("the number", t, dtype)
    return dtype


_WHOLE = {
    "bool": (0, 1),
    "u8": (0, 2**8 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}


def need_number(name: str, number: float, dtype: str) -> None:
    """Raises unless a dtype can hold a number: integers and masks need a whole number in range,
    floats take any.
    """
    least, most = _WHOLE.get(dtype, (None, None))
    if least is not None and (isinstance(number, float) or not least <= number <= most):
        expected = f"an int from {least} to {most}"
        raise DtypeError(
            f"{name} {number!r} beside {dtype}",
            expected=expected,
            todo="cast with fd.ops.cast(x, dtype=...)",
        )


def need_finite(name: str, number: float, dtype: str) -> None:
    """DtypeError unless a number can be stored in a tensor of this dtype: as `need_number`, and a
    finite number must not exceed the dtype's largest. name: what the message calls it.
    """
    need_number(name, number, dtype)
    most = torch.finfo(DTYPES[dtype]).max if DTYPES[dtype].is_floating_point else math.inf
    if abs(number) > most and not (dtype in FLOATS and math.isinf(number)):
        raise DtypeError(f"{name} {number!r} beside {dtype}", expected=f"a number up to {most:.6g}")


def _shown(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
