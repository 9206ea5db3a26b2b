"""What backends make of segments, also for targets that cannot run here and where nvFuser is not installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..emit import emit
from ..emit.nvfuser import NAME as NVFUSER
from ..emit.nvfuser import library
from ..ir.text import text
from ..runtime.kernel import Chosen
from ..segment import Segment
from ..target import Target


@dataclass(frozen=True)
class Made:
    """A kernel as it is reported: the backend's name, why it is that one or why it does not run, the source; what it is for some sizes."""

    backend: str
    why: str
    source: str
    chosen: Callable[[Mapping[str, int]], Chosen] | None = None


def made_of(segment: Segment, to: Target, why_not: str) -> Made:
    """What a target's backend makes of a segment. why_not: why programs for the target cannot run here; "" if they can.

    Where nvFuser is missing the source is the segment's own text, below what to do about it.
    """
    missing = library.why_missing() if segment.kind == NVFUSER else ""
    if missing:
        source = f"# nvFuser definition not shown: {missing}\n{text(segment.fusion)}"
        return Made(NVFUSER, _why(NVFUSER, to, why_not), source)
    kernel = emit(segment, to)
    return Made(kernel.backend, kernel.why or _why(kernel.backend, to, why_not), kernel.source, kernel.chosen)


def _why(backend: str, to: Target, why_not: str) -> str:
    if backend == to.name == "reference":
        return "requested"
    return _unexecuted(to, why_not) if why_not else "compiles it whole"


def _unexecuted(to: Target, why_not: str) -> str:
    never = "" if to.ever_run or to.capability is None else f"; never run on compute capability {'.'.join(map(str, to.capability))}"
    return f"emitted, unexecuted: {why_not}{never}"
