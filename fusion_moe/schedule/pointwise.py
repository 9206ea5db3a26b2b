"""Pointwise segments: each element of a result from elements of the inputs; one pass over
memory.
"""

from __future__ import annotations

from collections.abc import Collection

from ..ir import Fusion, Value
from ..target import Target

NAME = "pointwise"
CONTRACTS_ROUNDING = True
ROLES = ("pointwise", "shape", "view")


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if every operation is pointwise or moves elements."""
    other = next((op for op in fusion.ops if op.kind.role not in ROLES), None)
    return f"{other.kind.name} is not pointwise" if other else None


def describe(fusion: Fusion) -> str:
    """The operations for one element, in order."""
    return ", ".join(op.kind.name for op in fusion.ops if op.kind.role == "pointwise")
