"""The reference backend: each segment in plain torch, by the meaning of its operations. Right everywhere, fast nowhere."""

from __future__ import annotations

from ..runtime.kernel import Kernel
from ..segment import Segment

NAME = "reference"


def emit(segment: Segment, schedule: object) -> Kernel:
    """A kernel that evaluates the segment's Fusion; its source is the Fusion's text."""
    return Kernel(segment, schedule, NAME, str(segment.fusion), segment.fusion.evaluate)
