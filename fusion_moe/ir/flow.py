"""Which values are computed from which."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .core import Op, Value


def dependent(ops: Sequence[Op], values: Collection[Value]) -> set[Value]:
    """These values and all that the operations, in their order, compute from them."""
    found = set(values)
    for op in ops:
        if not found.isdisjoint(op.values):
            found.update(op.outputs)
    return found


def needed(ops: Sequence[Op], values: Collection[Value]) -> set[Value]:
    """These values and all from which the operations, in their order, compute them."""
    found = set(values)
    for op in reversed(ops):
        if not found.isdisjoint(op.outputs):
            found.update(op.values)
    return found
