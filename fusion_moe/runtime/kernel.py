"""A kernel: what a backend made from one segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..schedule.segment import Segment


@dataclass(frozen=True)
class Kernel:
    """segment: the segment that it computes; backend: the backend's name; source: its text;
    launch(*inputs, sizes=...) -> outputs.

    suffix: of a file with its source; "" if that is only the segment's Fusion. why: why the
    reference computes it although the target has kernels. graph_safe: whether a CUDA graph can
    capture its launch.
    """

    segment: Segment
    backend: str
    source: str
    launch: Callable[..., tuple[Any, ...]] = field(compare=False)
    suffix: str = ""
    why: str = ""
    graph_safe: bool = False

    def __call__(self, inputs: list[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """The outputs for these inputs."""
        return self.launch(*inputs, sizes=sizes)
