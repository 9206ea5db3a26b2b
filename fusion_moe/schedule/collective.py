"""Segments that ranks run together: one operation, after what it reads and before what reads it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..ir.core import Fusion, Value
from ..target import Target
from . import pointwise

NAME = "collective"
CONTRACTS_ROUNDING = False
_WAITS = {
    "dispatch": ("rows to the ranks of their experts", "the ids of all ranks, and rows of each"),
    "combine_from": ("sums to the ranks of their tokens", "the sums of all ranks"),
}


@dataclass(frozen=True)
class Collective:
    """What a rank sends and waits for. group: of how many ranks."""

    op: str
    group: str
    sends: str
    waits_for: str


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None for a single collective operation, with views."""
    found = [op.kind.name for op in fusion.ops if op.kind.role == "collective"]
    other = next(
        (op for op in fusion.ops if op.kind.role not in ("collective", *pointwise.ROLES[1:])), None
    )
    if len(found) != 1 or other is not None:
        return f"{' and '.join(found) or 'no collective'} with {other.kind.name if other else ''}"
    return None


def describe(fusion: Fusion) -> Collective:
    """Its two sides."""
    (op,) = (op for op in fusion.ops if op.kind.role == "collective")
    return Collective(op.kind.name, str(op.attrs["group"]), *_WAITS[op.kind.name])
