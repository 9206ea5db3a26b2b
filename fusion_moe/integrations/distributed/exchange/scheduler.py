"""Segments that ranks run together: one operation, after what it reads and before what reads it. On
some targets `combine_from` also adds up the rows whose sums it sends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ....ir import Fusion, Op, Value, dependent
from ....schedule import pointwise
from ....schedule.plan import REFERENCE
from ....target import Target

NAME = "collective"
_TARGETS = ("cpu", "cuda", REFERENCE)
_SENDING_SUMS = ("cuda",)  # whose kernels make the sums that they send
CONTRACTS_ROUNDING = False
_WAITS = {
    "dispatch": ("rows to the ranks that need them", "the ids of all ranks, and rows of each"),
    "combine_from": ("sums to the ranks of their tokens", "the sums of all ranks"),
}


@dataclass(frozen=True)
class Collective:
    """What a rank sends and waits for. group: of how many ranks."""

    op: str
    group: str
    sends: str
    waits_for: str

    def __str__(self) -> str:
        return f"sends {self.sends} of group {self.group!r}, then waits for {self.waits_for}"


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None for a single collective operation, with views; where the target sends sums, also with
    the `combine` that makes what is sent, and operations on its elements.
    """
    if target.name not in _TARGETS:
        return f"{target.name} has no kernels that ranks run together"
    results = [op for op in fusion.ops if op.kind.role == "collective"]
    if len(results) != 1:
        return f"{' and '.join(op.kind.name for op in results) or 'no collective'} in a piece"
    sums = combine_before(fusion) if target.name in _SENDING_SUMS else None
    result = dependent(fusion.ops, sums.outputs) if sums else set()
    for op in fusion.ops:
        after_sums = op.kind.role == "pointwise" and not result.isdisjoint(op.values)
        if (
            op not in (*results, sums)
            and op.kind.role not in pointwise.ROLES[1:]
            and not after_sums
        ):
            return f"{results[0].kind.name} with {op.kind.name}"
    if not result.isdisjoint(fusion.outputs) and not set(fusion.outputs) <= set(results[0].outputs):
        return "sums are sent, and also stored"
    return None


def combine_before(fusion: Fusion) -> Op | None:
    """The operation that sums a token's rows on this rank before `combine_from` sends the sums: the
    piece's only `combine`. None if it has several, or does not end in `combine_from`.
    """
    results = [op for op in fusion.ops if op.kind.role == "combine"]
    return results[0] if len(results) == 1 and fusion.ops[-1].kind.name == "combine_from" else None


def describe(fusion: Fusion) -> Collective:
    """The segment's name in reports: the two sides between which it moves rows."""
    (op,) = (op for op in fusion.ops if op.kind.role == "collective")
    return Collective(op.kind.name, str(op.attrs["group"]), *_WAITS[op.kind.name])
