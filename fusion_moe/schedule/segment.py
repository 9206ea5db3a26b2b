"""Fusion -> Segments: pieces that a scheduler accepts and the backend has a kernel for. Each
boundary has its reason.

Operations that the backend cannot express are kept apart from those that it can: an operation that
has no kernel in a product's epilogue leaves the epilogue, and the product stays. An operation that
the backend cannot express even alone is computed by the reference, in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import schedule
from ..ir import Fusion, Op
from ..target import Target
from .pieces import Pieces
from .plan import REFERENCE, Plan, Planner, Refusal

SINGLE = "single"  # the kind of an operation that no scheduler accepts


@dataclass(frozen=True)
class Segment:
    """The work of one kernel: a Fusion like any other, of values of the whole one. boundary: why it
    starts there.
    """

    fusion: Fusion
    plan: Plan
    boundary: str = ""

    @property
    def kind(self) -> str:
        """The name of the scheduler that accepts it."""
        return self.plan.kind


def split(
    fusion: Fusion, target: Target, plan: Planner, apart: Mapping[frozenset[Op], str] | None = None
) -> tuple[Segment, ...]:
    """The segments, in an order in which they can run. plan: the backend's decision about a piece
    that one of its schedulers accepts; apart: as of `Pieces`.
    """
    return _Split(fusion, target, plan, apart or {}).segments()


def by_structure(fusion: Fusion, target: Target) -> tuple[Segment, ...]:
    """The segments that schedulers accept, whatever the backend can express: for a Fusion that has
    not been through the passes.
    """
    return split(fusion, target, lambda piece: on_reference(piece, target, ""))


class _Split:
    """Lets pieces grow, asks the backend about each of them, and lets them grow again with refused
    operations kept apart.
    """

    def __init__(
        self, fusion: Fusion, target: Target, plan: Planner, apart: Mapping[frozenset[Op], str]
    ):
        self.fusion, self.target, self._ask = fusion, target, plan
        self.apart = dict(apart)
        self._asked: dict[frozenset[Op], tuple[Fusion, Plan | Refusal]] = {}

    def segments(self) -> tuple[Segment, ...]:
        while True:
            pieces = Pieces(self.fusion, self.target, self.apart)
            pieces.grow()
            order = pieces.topological()
            refused = [
                (ops, why)
                for ops in order
                if len(ops) > 1 and isinstance(why := self._plan(pieces, ops)[1], Refusal)
            ]
            if not refused:
                return tuple(self._segment(pieces, ops) for ops in order)
            for ops, refusal in refused:
                self._keep_apart(pieces, ops, refusal)

    def _plan(self, pieces: Pieces, ops: frozenset[Op]) -> tuple[Fusion, Plan | Refusal]:
        """A piece as a Fusion, and the backend's decision about it; asked once."""
        if ops not in self._asked:
            fusion = pieces.part(ops)
            self._asked[ops] = fusion, self._ask(fusion)
        return self._asked[ops]

    def _segment(self, pieces: Pieces, ops: frozenset[Op]) -> Segment:
        fusion, plan = self._plan(pieces, ops)
        if isinstance(plan, Refusal):
            plan = on_reference(fusion, self.target, plan.why)
        return Segment(fusion, plan, pieces.boundary(ops))

    def _keep_apart(self, pieces: Pieces, ops: frozenset[Op], refusal: Refusal) -> None:
        """Takes operations out of a refused piece: the one that the backend named, if it has a
        kernel alone; else all that have none. If all have one and none was named, it is the one in
        the middle, so that the rest of the piece halves.
        """
        ordered = sorted(ops, key=pieces.place.__getitem__)
        never = {
            op: why.why
            for op in ordered
            if isinstance(why := self._plan(pieces, frozenset([op]))[1], Refusal)
        }
        if never and (refusal.op is None or refusal.op in never):
            self.apart.update((frozenset([op]), why) for op, why in never.items())
        else:
            # products before the operations around them, otherwise in order
            first, *others = sorted(ordered, key=lambda op: op.kind.role != "grouped")
            out = refusal.op if refusal.op in others else others[len(others) // 2]
            self.apart[frozenset([first, out])] = refusal.why


def on_reference(fusion: Fusion, target: Target, why: str) -> Plan:
    """The plan of a piece that the reference computes in torch. why: the reason."""
    scheduler = schedule.find(fusion, target)
    kind, described = (scheduler.NAME, scheduler.describe(fusion)) if scheduler else (SINGLE, None)
    return Plan(REFERENCE, kind, fusion, described, why=why)
