"""Which values are computed from which."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .core import Op, Value


def dependent(ops: Sequence[Op], values: Collection[Value]) -> set[Value]:
    """These values and all that the operations, in their order, compute from them."""
    reached = set(values)
    for op in ops:
        if not reached.isdisjoint(op.values):
            reached.update(op.outputs)
    return reached


def needed(ops: Sequence[Op], values: Collection[Value]) -> set[Value]:
    """These values and all from which the operations, in their order, compute them."""
    needed_values = set(values)
    for op in reversed(ops):
        if not needed_values.isdisjoint(op.outputs):
            needed_values.update(op.values)
    return needed_values
