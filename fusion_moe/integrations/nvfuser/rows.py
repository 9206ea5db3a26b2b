"""Kinds on rows and their groups. Nothing waits for the device: ends, ids and indices out of range
are made safe, not reported.

M rows, G groups, T tokens, k slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir import Dim, Op, elements, plain
from .writer import Writer


def inside(
    w: Writer, x: Any, shape: tuple[Dim, ...], ends: Any, groups: int, outside: float = 0.0
) -> Any:
    """x [M, ...] -> x with the rows at or past the last end set to `outside`."""
    last = w.part(ends, [groups - 1], [groups])
    keep = w.lt(w.count(shape[0]), last)
    return w.where(w.spread(keep, shape, 0), x, outside)


def group_of(w: Writer, rows: Dim, ends: Any, groups: int) -> Any:
    """ends i32[G] -> i32[M]: the group of each row, G - 1 for rows that belong to none."""
    shape = (rows, groups)
    past = w.ge(w.spread(w.count(rows), shape, 0), w.spread(ends, shape, 1))
    return w.minimum(w.to(w.sum(w.to(past, "i32"), [1]), "i32"), groups - 1)


def of_their_group(w: Writer, table: Any, shape: tuple[Dim, ...], ends: Any, groups: int) -> Any:
    """table [G, N], ends i32[G] -> [M, N]: for each row, its group's row of the table. nvFuser may
    fail an assertion if G is 1.
    """
    if groups == 1:
        return w.spread(w.squeeze(table, [0]), shape, 1)
    return w.index_select(table, group_of(w, shape[0], ends, groups), 0)


def _ends(w: Writer, op: Op, offs: Any) -> Any:
    """The same as groups.clamp_ends."""
    groups = op.attrs["groups"].count
    clamped = w.minimum(w.maximum(offs, 0), w.size(op.attrs["rows"]))
    return w.max(of_groups(w, clamped, groups, w.ge), [1]) if groups > 1 else clamped


def of_groups(w: Writer, x: Any, groups: int, order: Callable[[Any, Any], Any]) -> Any:
    """x i32[G] -> i32[G, G]: x[j] at (i, j) if order(i, j), else 0. Reducing it along j gives a
    scan of x.

    nvFuser's scans need the headers of a CUDA toolkit, and reductions do not; G is small, but more
    than 1.
    """
    shape = (groups, groups)
    taken = order(w.spread(w.count(groups), shape, 0), w.spread(w.count(groups), shape, 1))
    return w.where(taken, w.spread(x, shape, 1), w.constant(0, "i32"))


def _problem_ends(w: Writer, op: Op, starts: Any, problem_sizes: Any, padded_starts: Any) -> Any:
    groups = op.attrs["groups"].count
    sizes = w.squeeze(w.part(problem_sizes, [0, 0], [groups, 1]), [1])
    return _ends(w, op, w.add(starts, sizes))


def _partition(w: Writer, op: Op, x: Any, ends: Any) -> Any:
    return x


def _zero_rest(w: Writer, op: Op, x: Any, ends: Any) -> Any:
    t = op.outputs[0].type
    return w.to(inside(w, x, t.shape, ends, group_count(op)), t.dtype)


def _route(w: Writer, op: Op, ids: Any) -> tuple[Any, Any, Any]:
    """Sorted by group, with ids that name none last; ends by counting; the slot of each row by
    sorting the order back.
    """
    (t, k), groups = op.values[0].type.shape, op.attrs["groups"].count
    rows, first = elements((t, k)), op.attrs.get("first_expert") or 0
    flat = w.reshape(ids, [w.size(rows)])
    known = w.logical_and(w.ge(flat, first), w.lt(flat, first + groups))
    group = w.to(w.where(known, w.sub(flat, first) if first else flat, groups), "i32")
    order = w.argsort(group, 0, False, True)
    at_most = w.le(w.spread(group, (rows, groups), 0), w.spread(w.count(groups), (rows, groups), 1))
    ends = w.to(w.sum(w.to(at_most, "i32"), [0]), "i32")
    row_of = w.to(w.div(order, k), "i32")
    return ends, row_of, w.reshape(w.to(w.argsort(order, 0), "i32"), w.shape((t, k)))


def _invert(w: Writer, op: Op, slot_of: Any) -> Any:
    return w.to(w.argsort(w.reshape(slot_of, [w.size(op.attrs["rows"])]), 0), "i32")


def _index_select(w: Writer, op: Op, x: Any, index: Any) -> Any:
    dim = op.attrs["dim"]
    last = w.size(plain(op.values[0].type.shape[dim]) - 1)
    return w.index_select(x, w.maximum(w.minimum(index, last), 0), dim)


def _combine(w: Writer, op: Op, y: Any, slot_of: Any, weights: Any) -> Any:
    (t, k), (out_rows, n) = op.values[1].type.shape, op.outputs[0].type.shape
    wide = op.outputs[0].type.dtype
    total = w.filled((out_rows, n), 0.0, wide)
    for slot in range(k):  # type: ignore[arg-type]  # a number, or scheduler.py would have refused it
        row, weight = (
            w.squeeze(w.part(x, [0, slot], [w.size(t), slot + 1]), [1]) for x in (slot_of, weights)
        )
        total = w.add(
            total,
            w.mul(w.to(w.index_select(y, row, 0), wide), w.spread(w.to(weight, wide), (t, n), 0)),
        )
    return total


def _group_add(w: Writer, op: Op, y: Any, bias: Any, ends: Any) -> Any:
    added = _of_each_row(w, op, bias, ends, outside=0.0)
    return w.to(w.add(w.to(y, "f32"), added), op.outputs[0].type.dtype)


def _group_mul(w: Writer, op: Op, y: Any, scale: Any, ends: Any) -> Any:
    scales = _of_each_row(w, op, scale, ends, outside=1.0)
    return w.to(w.mul(w.to(y, "f32"), scales), op.outputs[0].type.dtype)


def _of_each_row(w: Writer, op: Op, table: Any, ends: Any, outside: float) -> Any:
    """table [G, N] -> f32[M, N]: for each row, its group's; `outside` past the last end."""
    shape, groups = op.outputs[0].type.shape, group_count(op)
    rows = of_their_group(w, w.to(table, "f32"), shape, ends, groups)
    return inside(w, rows, shape, ends, groups, outside)


def group_count(op: Op) -> int:
    """The number of groups: that of the partition of an operation's ends, its last input."""
    return op.values[-1].type.shape[0]  # type: ignore[return-value]


RULES: dict[str, Callable[..., Any]] = {
    "ends": _ends,
    "problem_ends": _problem_ends,
    "partition": _partition,
    "zero_rest": _zero_rest,
    "route": _route,
    "invert": _invert,
    "index_select": _index_select,
    "combine": _combine,
    "group_add": _group_add,
    "group_mul": _group_mul,
}
