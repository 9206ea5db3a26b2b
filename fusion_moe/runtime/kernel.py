"""A kernel: what a backend made of one segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..segment import Segment


@dataclass(frozen=True)
class Kernel:
    """segment: its work; backend: who made it; source: its text; launch(*inputs, sizes=...) -> outputs.

    why: why it is the reference's, where the target has kernels of its own. graph_safe: whether a CUDA graph can capture its launch.
    """

    segment: Segment
    backend: str
    source: str
    launch: Callable[..., tuple[Any, ...]] = field(compare=False)
    why: str = ""
    graph_safe: bool = False

    def __call__(self, inputs: list[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """The outputs on these inputs."""
        return self.launch(*inputs, sizes=sizes)
