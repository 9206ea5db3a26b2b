"""The reference backend: a segment in plain torch, by the definitions of its operations. Correct
everywhere, fast nowhere.

It computes everything for the target `reference`, and on other targets the single operations that
have no kernel.
"""

from __future__ import annotations

from ..ir import Fusion
from ..runtime.kernel import Kernel
from ..schedule import STANDARD
from ..schedule.plan import REFERENCE
from ..schedule.segment import Segment
from ..target import ACTIVATION_FORMATS, Target
from .backend import Backend


def plan(fusion: Fusion, kind: str) -> None:
    """Nothing to plan: it can compute anything."""


def emit(segment: Segment) -> Kernel:
    """A kernel that evaluates the segment's Fusion; its source is the Fusion's text."""
    return in_torch(segment, segment.plan.why)


def in_torch(segment: Segment, why: str) -> Kernel:
    """A kernel that runs a segment in plain torch, in place of another backend's. why: why that has
    none.
    """
    fusion = segment.plan.fusion
    why = f"in plain torch: {why}" if why else ""
    return Kernel(segment, REFERENCE, str(fusion), fusion.evaluate, why=why)


BACKEND = Backend(
    REFERENCE, (Target(REFERENCE, ACTIVATION_FORMATS, STANDARD),), plan, emit, interface=1
)
