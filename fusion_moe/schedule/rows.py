"""Segments on rows: routing, gathers, and sums of rows, with the pointwise operations around
them.
"""

from __future__ import annotations

from collections.abc import Collection

from ..ir import Fusion, Value
from ..target import Target
from . import pointwise

NAME = "rows"
CONTRACTS_ROUNDING = True
ROLES = (
    *pointwise.ROLES,
    "routing",
    "gather",
    "combine",
    "scatter",
    "reduce",
    "per_group",
    "grouped_sum",
)
SUMS = ("combine", "scatter", "reduce", "grouped_sum")


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if rows are only gathered, routed and added, with at most one sum."""
    other = next((op for op in fusion.ops if op.kind.role not in ROLES), None)
    if other is not None:
        return f"{other.kind.name} is neither pointwise nor a row operation"
    return of_one_sum(fusion)


def of_one_sum(fusion: Fusion) -> str | None:
    """Why one kernel cannot make all sums of a fusion; None if there is at most one."""
    sums = [op.kind.name for op in fusion.ops if op.kind.role in SUMS]
    return (
        f"{sums[1]} reads the whole result of {sums[0]}: two reductions require two passes"
        if len(sums) > 1
        else None
    )


def describe(fusion: Fusion) -> str:
    """The operations on rows, in order; at most one of them sums."""
    return ", ".join(op.kind.name for op in fusion.ops if op.kind.role not in pointwise.ROLES)
