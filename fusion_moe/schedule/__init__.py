"""Schedulers, one file for each kind of segment.

can_schedule(fusion, target) -> None if one kernel can do it, else the reason; choose(fusion, target) -> a frozen dataclass.
They look at kinds of operations and at what depends on what; none of them knows any model's pattern.
"""

from __future__ import annotations

from typing import Protocol

from ..ir.core import Fusion
from ..target import Target
from . import grouped_gemm, layout, pointwise, rows


class Scheduler(Protocol):
    """What each module of this folder has."""

    NAME: str

    def can_schedule(self, fusion: Fusion, target: Target) -> str | None:
        """Why one kernel cannot do it; None if it can."""

    def choose(self, fusion: Fusion, target: Target) -> object:
        """The schedule: a frozen dataclass."""


SCHEDULERS: tuple[Scheduler, ...] = (pointwise, rows, layout, grouped_gemm)


def find(fusion: Fusion, target: Target) -> Scheduler | None:
    """The first scheduler that takes the fusion."""
    return next((s for s in SCHEDULERS if s.can_schedule(fusion, target) is None), None)


def named(name: str) -> Scheduler:
    """The scheduler of a kind of segment."""
    return next(s for s in SCHEDULERS if name == s.NAME)
