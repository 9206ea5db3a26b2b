"""One operation by itself, in plain torch: for what the kernels of a target cannot do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..ir.core import Fusion, Value
from ..target import Target

NAME = "single"
CONTRACTS_ROUNDING = False


@dataclass(frozen=True)
class Single:
    """The operation."""

    op: str


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if there is one operation, views aside."""
    ops = [op.kind.name for op in fusion.ops if not op.kind.view]
    return f"more than one operation: {' and '.join(ops)}" if len(ops) > 1 else None


def choose(fusion: Fusion, target: Target) -> Single:
    """The operation."""
    return Single(next((op.kind.name for op in fusion.ops if not op.kind.view), "view"))
