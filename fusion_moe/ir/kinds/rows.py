"""Rows and their groups: operations that partition, gather and add rows, and routing by expert ids.

T tokens, k slots a token (top-k), M = T * k rows sorted by group, G groups, N features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import DtypeError, FusionError, ShapeError
from ...layouts import SF128X4, check_ends, check_ids
from ...layouts.groups import (
    check_expert_map,
    check_permutation,
    check_problem,
    check_slots,
    ends_from_problem,
)
from ..core import Need, Op, OpKind, Value
from ..sizes import AnySize
from ..types import (
    DTYPES,
    FLOATS,
    INTS,
    Dim,
    Groups,
    Rows,
    TensorType,
    accumulated,
    dtype_name,
    elements,
    plain,
)
from .rules import (
    Types,
    need,
    need_computed,
    need_dtype,
    need_ends,
    need_float,
    need_packed,
    need_partition,
    need_same,
)


def _ends_type(offs: TensorType, rows: AnySize, groups: Groups) -> Types:
    """offs i32[G], where the groups of this many rows end -> i32[G]@ends(g), which grouped
    operations take.
    """
    need("offs", offs, 1, "i32")
    need_same("group count", "offs", offs.shape[0], "groups", groups.count)
    return (offs.with_(shape=(plain(offs.shape[0]),), ends=groups),)


def _ends(offs: torch.Tensor, rows: int, groups: Groups) -> tuple[torch.Tensor]:
    """offs i32[G] unchanged, after a check that they are cumulative ends among `rows` rows."""
    check_ends(offs, rows)
    return (offs,)


def _problem_ends_type(
    starts: TensorType,
    problem_sizes: TensorType,
    padded_starts: TensorType,
    rows: AnySize,
    groups: Groups,
    n: int,
    k: int,
) -> Types:
    """starts i32[G], problem_sizes i32[G, 3], padded_starts i32[G] -> i32[G]@ends(g): a partition
    in nvFuser's form.
    """
    need_packed(groups)
    for name, type, shape in (
        ("offsets", starts, (groups.count,)),
        ("problem_sizes", problem_sizes, (groups.count, 3)),
        ("blockscale_offsets", padded_starts, (groups.count,)),
    ):
        need_dtype(name, type, "i32")
        if type.shape != shape:
            raise ShapeError(f"{name} {type}", expected=str(type.with_(shape=shape)))
    return (starts.with_(ends=groups),)


def _problem_ends(
    starts: torch.Tensor,
    problem_sizes: torch.Tensor,
    padded_starts: torch.Tensor,
    rows: int,
    groups: Groups,
    n: int,
    k: int,
) -> tuple[torch.Tensor]:
    if not starts.is_cuda:  # on CUDA the check would wait for the device
        check_problem(starts, problem_sizes, padded_starts, rows, n, k, SF128X4.rows)
    return (ends_from_problem(starts, problem_sizes),)


def _partition_type(x: TensorType, ends: TensorType) -> Types:
    """x [M, ...] -> [M/g, ...]: the rows in the groups that end at `ends`. No data moves."""
    groups = need_ends(ends)
    if x.quantized and x.encoding.axis == -2:
        raise DtypeError(
            f"x is {x}",
            expected="rows that are partitioned before they are "
            "quantized: blocks begin anew with each group",
        )
    if isinstance(x.shape[0], Rows) and x.shape[0].groups != groups:
        raise FusionError(
            f"the rows of {x} are already partitioned",
            expected=f"plain rows, or rows partitioned by {groups}",
            todo="reshape them first",
        )
    return (x.with_(shape=(plain(x.shape[0]) / groups, *x.shape[1:])),)


def _zero_rest_type(x: TensorType, ends: TensorType) -> Types:
    """x [M/g, ...] with the rows past the last end set to zero."""
    need_partition("x", x, ends)
    need_float("x", x)
    return (x,)


def _zero_rest(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
    """x [M/g, ...] with the rows past the last end set to zero."""
    return (
        x.clone().index_fill_(
            0, torch.arange(int(ends[-1]) if len(ends) else 0, len(x), device=x.device), 0
        ),
    )


def _route_type(ids: TensorType, groups: Groups, first_expert: int | None = None) -> Types:
    """ids int[T, k], experts of tokens -> ends i32[G]@ends(g), row_of i32[M/g], slot_of i32[T, k].

    row_of: the token of each row, sorted by expert, stably; slot_of: the row of each slot.
    first_expert: the id of the first group; rows of ids that name no group come past the last end.
    None: ids start at 0, and every id must name a group, or be -1, which names none.
    """
    need("ids", ids, 2, *INTS)
    need_packed(groups)
    if not isinstance(groups.count, int):
        raise ShapeError(f"{groups.count} groups", expected="a number known when compiling")
    if first_expert is not None and not 0 <= first_expert < 2**31 - groups.count:
        raise ShapeError(
            f"first_expert = {first_expert}",
            expected="0 or more, and ids of 32 bits for all groups",
        )
    ends = TensorType((groups.count,), "i32", ends=groups)
    return (
        ends,
        TensorType((elements(ids.shape) / groups,), "i32"),
        TensorType(tuple(map(plain, ids.shape)), "i32"),
    )


def _route_needs(
    ids: TensorType, groups: Groups, first_expert: int | None = None
) -> Iterator[Need]:
    if first_expert is None:
        yield some_of(groups.count, elements(ids.shape)), f"ids choose among {groups.count} groups"


def _route(
    ids: torch.Tensor, groups: Groups, first_expert: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [T, k] -> ends i32[G]; row_of i32[M], the token of each sorted row; slot_of i32[T, k],
    the sorted row of each slot.

    The sort is stable: within a group, and past the last one, rows keep the order of tokens and
    slots.
    """
    count = groups.count
    assert isinstance(count, int)
    if first_expert is None:
        check_ids(ids, count, least=-1)
    first = first_expert or 0
    ids = torch.where((ids >= first) & (ids < first + count), ids - first, count)
    flat, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(
        flat, torch.arange(count, dtype=flat.dtype, device=ids.device), right=True, out_int32=True
    )
    slot_of = torch.empty_like(order, dtype=torch.int32)
    slot_of[order] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    return ends, (order // max(ids.shape[1], 1)).int(), slot_of.view(ids.shape)


def _place_type(ids: TensorType, expert_map: TensorType, here: int) -> Types:
    """ids int[T, k], experts of tokens; expert_map i32[E], where each expert lies, at 0 to here - 1
    or, with -1, elsewhere -> i32[T, k]: the place of each slot's expert, -1 for the id -1.

    Every id must be one of the E experts, or -1.
    """
    if not 0 <= here < 2**31:
        raise ShapeError(f"{here} places", expected="0 or more, of 32 bits")
    need("ids", ids, 2, *INTS)
    need("expert_map", expert_map, 1, "i32")
    return (TensorType(tuple(map(plain, ids.shape)), "i32"),)


def _place_needs(ids: TensorType, expert_map: TensorType, here: int) -> Iterator[Need]:
    experts = expert_map.shape[0]
    yield some_of(experts, elements(ids.shape)), f"ids choose among {experts} experts"


def _place(ids: torch.Tensor, expert_map: torch.Tensor, here: int) -> tuple[torch.Tensor]:
    check_ids(ids, len(expert_map), least=-1)
    check_expert_map(expert_map, here)
    none = expert_map.new_full((1,), -1)
    return (torch.cat([none, expert_map])[ids.long() + 1],)


def _index_select_type(x: TensorType, index: TensorType, dim: int) -> Types:
    """The elements of x at index int[N] along a dimension."""
    need_dtype("x", x, *DTYPES)
    need("index", index, 1, *INTS)
    if not 0 <= dim < len(x.shape):
        raise ShapeError(f"dim {dim} of {x}", expected=f"0 to {len(x.shape) - 1}")
    return (TensorType((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]), x.dtype),)


def some_of(there: Dim, wanted: AnySize | Dim) -> AnySize:
    """A size for `Fusion.needs`, negative exactly if `wanted` elements are asked of a dimension of
    size `there` = 0: reading from nothing.
    """
    return plain(there) * 2**62 + plain(wanted) * -1


def _index_select(x: torch.Tensor, index: torch.Tensor, dim: int) -> tuple[torch.Tensor]:
    if not index.is_cuda:  # on CUDA the check would wait for the device
        check_slots(index, x.shape[dim], "index")
    return (x.index_select(dim, index),)


def _index_select_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    """Adds the rows of dy where they were taken from.

    For rows in the order of a routing, each token's slots are added in order; for slots in the
    order of rows, a permutation, rows are picked back.
    """
    x, index = op.values
    wide, rows = accumulated(x.type.dtype), plain(x.type.shape[0])
    if op.attrs["dim"] != 0:
        raise NotImplementedError("the derivative of index_select along another dimension than 0")
    if (
        len(x.type.shape) == 2
        and (slot_of := _slots(fd, index)) is not None
        and rows == plain(slot_of.type.shape[0])
    ):
        once = fd.ops.full(shape=slot_of.type.shape, fill_value=1.0, dtype=wide)
        return [fd.ops.cast(fd.ops.combine(dy, slot_of, once), dtype=x.type.dtype), None]
    inverse = fd.producer(index, "invert")
    if inverse is not None and rows == plain(index.type.shape[0]):
        return [fd.ops.index_select(dy, _flat(fd, inverse.values[0]), dim=0), None]
    zeros = fd.ops.full(shape=tuple(map(plain, x.type.shape)), fill_value=0.0, dtype=wide)
    total = fd.ops.index_put_accumulate(zeros, index, fd.ops.cast(dy, dtype=wide))
    return [fd.ops.cast(total, dtype=x.type.dtype), None]


def _slots(fd: Any, index: Value) -> Value | None:
    """slot_of i32[T, k] of the routing whose row_of is this index, if there is one."""
    routed = fd.producer(index, "route")
    return routed.outputs[2] if routed is not None and index is routed.outputs[1] else None


def _index_put_type(acc: TensorType, index: TensorType, value: TensorType) -> Types:
    """acc [N, ...] with the rows of value [M, ...] added at index int[M]."""
    need("index", index, 1, *INTS)
    need_computed("acc", acc)
    need_dtype("value", value, acc.dtype)
    need_same("row count", "index", index.shape[0], "value", value.shape[0])
    for a, b in zip(acc.shape[1:], value.shape[1:], strict=True):
        need_same("size", "acc", a, "value", b)
    return (acc.with_(shape=tuple(map(plain, acc.shape))),)


def _index_put(acc: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor]:
    if not index.is_cuda:
        check_slots(index, len(acc), "index")
    return (acc.index_add(0, index, value),)


def _invert_type(slot_of: TensorType, rows: Dim) -> Types:
    """slot_of i32[T, k], a permutation of the rows -> i32[M]: the flat slot that each row
    serves.
    """
    need_dtype("slot_of", slot_of, "i32")
    need_same("row count", "slot_of", elements(slot_of.shape), "rows", rows)
    return (TensorType((rows,), "i32"),)


def _invert(slot_of: torch.Tensor, rows: int) -> tuple[torch.Tensor]:
    """slot_of i32[T, k], a permutation of the M rows -> i32[M]: the flat slot that each row
    serves.
    """
    check_permutation(slot_of, rows)
    flat = slot_of.flatten().long()
    slots = torch.empty(rows, dtype=torch.int32, device=flat.device)
    slots[flat] = torch.arange(rows, dtype=torch.int32, device=flat.device)
    return (slots,)


def _combine_type(y: TensorType, slot_of: TensorType, w: TensorType) -> Types:
    """y [M, N], slot_of int[T, k], w [T, k] -> f32[T, N]: w times the rows of each token's slots,
    added in their order.
    """
    need("y", y, 2, *FLOATS)
    need("slot_of", slot_of, 2, *INTS)
    need("w", w, 2, *FLOATS)
    for a, b in zip(slot_of.shape, w.shape, strict=True):
        need_same("size", "slot_of", a, "w", b)
    return (TensorType((plain(slot_of.shape[0]), y.shape[1]), accumulated(y.dtype)),)


def _combine(y: torch.Tensor, slot_of: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
    """y [M, N], slot_of i32[T, k], w [T, k] -> f32[T, N]: w * y of the slots 0..k-1 added in that
    order in float32 (f64 in float64).
    """
    if not y.is_cuda:  # on CUDA the check would wait for the device
        check_slots(slot_of, len(y))
    wide = DTYPES[accumulated(dtype_name(y.dtype))]
    total = torch.zeros(slot_of.shape[0], y.shape[1], dtype=wide, device=y.device)
    for slot in range(slot_of.shape[1]):
        total += y.index_select(0, slot_of[:, slot]).to(wide) * w[:, slot, None].to(wide)
    return (total,)


def _combine_grad(fd: Any, op: Op, dout: Value) -> Sequence[Value | None]:
    """dout f32[T, N] -> dy [M, N]: each row gets its token's gradient times its weight; dw [T, k]:
    the gradient along that row.
    """
    y, slot_of, w = op.values
    rows = token_rows(fd, dout, slot_of, y)
    if rows is None:
        return _combine_grad_of_any(fd, op, dout)
    ops = fd.ops
    dy = weighted(fd, rows, w, slot_of)
    dw = ops.sum(ops.mul(rows, wide_like(fd, y, rows)), dims=(1,), keepdim=False)
    return [
        ops.cast(dy, dtype=y.type.dtype),
        None,
        ops.cast(slot_values(fd, dw, slot_of), dtype=w.type.dtype),
    ]


def _combine_grad_of_any(fd: Any, op: Op, dout: Value) -> Sequence[Value | None]:
    """The gradient for slots that may name a row twice, or not at all."""
    y, slot_of, w = op.values
    t, k = slot_of.type.shape
    m, n = y.type.shape
    ops = fd.ops
    flat = _flat(fd, slot_of)
    wide = dout.type.dtype
    spread = ops.broadcast_in_dim(dout, shape=(t, k, n), broadcast_dims=(0, 2))
    weight = ops.broadcast_in_dim(ops.cast(w, dtype=wide), shape=(t, k, n), broadcast_dims=(0, 1))
    scaled = ops.reshape(ops.mul(spread, weight), new_shape=(elements((t, k)), n))
    dy = ops.index_put_accumulate(
        ops.full(shape=(plain(m), n), fill_value=0.0, dtype=wide), flat, scaled
    )
    picked = ops.cast(
        ops.reshape(ops.index_select(y, flat, dim=0), new_shape=(t, k, n)), dtype=wide
    )
    dw = ops.sum(ops.mul(spread, picked), dims=(2,), keepdim=False)
    return [ops.cast(dy, dtype=y.type.dtype), None, ops.cast(dw, dtype=w.type.dtype)]


def token_rows(fd: Any, x: Value, slot_of: Value, y: Value) -> Value | None:
    """x [T, N] -> [M/g, N], the token of each row of y [M, N], if slot_of is of the routing that
    gave y's rows their order.
    """
    routed = fd.producer(slot_of, "route")
    if routed is None or plain(y.type.shape[0]) != elements(slot_of.type.shape):
        return None
    return fd.ops.index_select(x, routed.outputs[1], dim=0)


def weighted(fd: Any, rows: Value, w: Value, slot_of: Value) -> Value:
    """rows f32[M/g, N] times the weight of each row's slot: w [T, k], slot_of i32[T, k], a
    permutation. Weights of 1 are left out.
    """
    if ones(fd, w):
        return rows
    m = rows.type.shape[0]
    picked = fd.ops.index_select(_flat(fd, w), fd.ops.invert(slot_of, rows=m), dim=0)
    return fd.ops.mul(
        rows, fd.ops.reshape(fd.ops.cast(picked, dtype=rows.type.dtype), new_shape=(m, 1))
    )


def ones(fd: Any, w: Value) -> bool:
    """Whether all elements of a value are ones."""
    full = fd.producer(w, "full")
    return full is not None and full.attrs["fill_value"] == 1


def slot_values(fd: Any, rows: Value, slot_of: Value) -> Value:
    """rows [M], slot_of i32[T, k] -> [T, k]: the element of each slot's row."""
    return fd.ops.reshape(
        fd.ops.index_select(rows, _flat(fd, slot_of), dim=0), new_shape=slot_of.type.shape
    )


def wide_like(fd: Any, y: Value, rows: Value) -> Value:
    """y [M, N] in the dtype of `rows` [M/g, ...], and partitioned like them."""
    shape = (rows.type.shape[0], y.type.shape[1])
    return fd.ops.cast(
        y if y.type.shape == shape else fd.ops.reshape(y, new_shape=shape), dtype=rows.type.dtype
    )


def _flat(fd: Any, x: Value) -> Value:
    """x [T, k] -> [M]"""
    return fd.ops.reshape(x, new_shape=(elements(x.type.shape),))


TABLE = (
    OpKind("ends", _ends_type, _ends, view=True, role="view"),
    OpKind("problem_ends", _problem_ends_type, _problem_ends, role="routing"),
    OpKind(
        "partition",
        _partition_type,
        lambda x, ends: (x,),
        lambda fd, op, dy: [fd.ops.reshape(dy, new_shape=tuple(map(plain, dy.type.shape))), None],
        view=True,
        role="view",
    ),
    OpKind(
        "zero_rest",
        _zero_rest_type,
        _zero_rest,
        lambda fd, op, dy: [fd.ops.zero_rest(dy, op.values[1]), None],
    ),
    OpKind("route", _route_type, _route, needs=_route_needs, role="routing", outputs=3),
    OpKind("place", _place_type, _place, needs=_place_needs, role="routing"),
    OpKind(
        "index_select",
        _index_select_type,
        _index_select,
        _index_select_grad,
        lambda x, index, dim: [
            (
                some_of(x.shape[dim], index.shape[0]),
                f"{index.shape[0]} elements are selected from dimension {dim} of {x}, "
                "which has none",
            )
        ],
        role="gather",
    ),
    OpKind(
        "index_put_accumulate",
        _index_put_type,
        _index_put,
        needs=lambda acc, index, value: [
            (
                some_of(acc.shape[0], index.shape[0]),
                f"{index.shape[0]} rows are added to {acc}, which has none",
            )
        ],
        role="scatter",
    ),
    OpKind("invert", _invert_type, _invert, role="routing"),
    OpKind(
        "combine",
        _combine_type,
        _combine,
        _combine_grad,
        lambda y, slot_of, w: [
            (
                some_of(y.shape[0], elements(slot_of.shape)),
                "slots select from y, which has no rows",
            )
        ],
        lambda op: 2 * elements((*op.values[1].type.shape, op.outputs[0].type.shape[1])),
        role="combine",
    ),
)
