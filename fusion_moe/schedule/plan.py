"""A backend's decision about a piece of a Fusion: a Plan, from which alone its kernel is made, or a
Refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..ir import Fusion, Op

REFERENCE = "reference"


@dataclass(frozen=True)
class Plan:
    """A piece that one backend computes.

    backend: the backend's name; kind: the scheduler that accepts the piece, "single" for an
    operation that no scheduler accepts; fusion: the piece as computed, without roundings that may
    be left out; schedule: how the scheduler describes it; work: what the backend emits from. why:
    why the reference computes it although the target has kernels.
    """

    backend: str
    kind: str
    fusion: Fusion
    schedule: object
    work: Any = field(default=None, compare=False, repr=False)
    why: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a backend has no kernel for a piece. op: the operation that it cannot express; None if no
    single operation is the reason.
    """

    why: str
    op: Op | None = None


Planner = Callable[[Fusion], Plan | Refusal]
