"""Schedulers, one file for each kind of segment.

can_schedule(fusion, target, kept) -> None if one kernel can do it, else the reason;
describe(fusion) -> the text of its schedule in reports. They look at the kinds of operations and at
their dependencies; none of them knows any model's pattern. A backend's `plan` then says whether it
has such a kernel.

pointwise.py, rows.py, layout.py, grouped_gemm.py
                 the schedulers; product.py: fprop, dgrad and wgrad described as one
pieces.py        pieces grow along edges while a scheduler accepts them
segment.py       split: Fusion -> Segments, each with the reason why it begins there
plan.py          what a backend decides about a piece: Plan or Refusal
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..ir import Fusion, Value
from ..target import Target
from . import grouped_gemm, layout, pointwise, rows


class Scheduler(Protocol):
    """The interface of each module in this folder, and of what an operation brings."""

    NAME: str
    # whether its kernels keep float32 where the program rounds and widens again
    CONTRACTS_ROUNDING: bool

    def can_schedule(
        self, fusion: Fusion, target: Target, kept: Collection[Value] = ()
    ) -> str | None:
        """Why one kernel cannot do it; None if it can. kept: outputs of the whole program, which
        remain outputs of any larger piece.
        """

    def describe(self, fusion: Fusion) -> object:
        """What the kernel does with each operation, as reports print it."""


# asked in this order; kernels of CPUs, of CUDA and of the reference come in these kinds
STANDARD: tuple[Scheduler, ...] = (pointwise, rows, layout, grouped_gemm)


def find(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> Scheduler | None:
    """The first scheduler that accepts the fusion: the target's, then those of its operations."""
    own = (op.kind.scheduler for op in fusion.ops if op.kind.scheduler)
    accepting = (
        s for s in (*target.schedulers, *own) if s.can_schedule(fusion, target, kept) is None
    )
    return next(accepting, None)


def closest(fusion: Fusion, target: Target) -> Scheduler:
    """The scheduler that a fusion's operations suggest: its refusal says why they are not one
    kernel.
    """
    roles = {op.kind.role for op in fusion.ops}
    name = (
        "grouped_gemm"
        if "grouped" in roles
        else "layout"
        if roles & {"layout", "quantize"}
        else "rows"
    )
    return next((s for s in target.schedulers if name == s.NAME), target.schedulers[0])
