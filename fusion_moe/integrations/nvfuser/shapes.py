"""Kinds that move elements, and sums over dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir import Op, plain
from .writer import Writer


def _reshape(w: Writer, op: Op, x: Any) -> Any:
    """Sizes of 1 are squeezed and broadcast, since nvFuser does not repeat dimensions that a
    reshape made.
    """
    before, after = op.values[0].type.shape, op.outputs[0].type.shape
    ones = [i for i, d in enumerate(before) if d == 1]
    x = w.squeeze(x, ones) if ones else x
    narrow, wide = (tuple(plain(d) for d in shape if d != 1) for shape in (before, after))
    x = x if narrow == wide else w.reshape(x, w.shape(wide))
    return (
        x
        if wide == tuple(map(plain, after))
        else w.spread(x, after, *(i for i, d in enumerate(after) if d != 1))
    )


def _permute(w: Writer, op: Op, x: Any) -> Any:
    return w.permute(x, list(op.attrs["dims"]))


def _broadcast(w: Writer, op: Op, x: Any) -> Any:
    before = op.values[0].type.shape
    after = op.outputs[0].type.shape
    places = op.attrs["broadcast_dims"]
    repeats = any(d == 1 and after[place] != 1 for d, place in zip(before, places, strict=True))
    return w.spread(x, after, *places, repeats=repeats)


def _slice(w: Writer, op: Op, x: Any) -> Any:
    return w.part(x, w.shape(op.attrs["start_indices"]), w.shape(op.attrs["end_indices"]))


def _pad(w: Writer, op: Op, x: Any) -> Any:
    # the last dimension first
    pairs = zip(reversed(op.attrs["before"]), reversed(op.attrs["after"]), strict=True)
    return w.pad(x, [w.size(n) for pair in pairs for n in pair])


def _cat(w: Writer, op: Op, *xs: Any) -> Any:
    return w.cat(list(xs), op.attrs["dim"])


def _full(w: Writer, op: Op) -> Any:
    return w.filled(op.outputs[0].type.shape, op.attrs["fill_value"], op.outputs[0].type.dtype)


def _sum(w: Writer, op: Op, x: Any) -> Any:
    wide = "f64" if op.values[0].type.dtype == "f64" else "f32"
    return w.to(
        w.sum(w.to(x, wide), list(op.attrs["dims"]), op.attrs["keepdim"]), op.outputs[0].type.dtype
    )


RULES: dict[str, Callable[..., Any]] = {
    "reshape": _reshape,
    "permute": _permute,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "cat": _cat,
    "full": _full,
    "sum": _sum,
}
