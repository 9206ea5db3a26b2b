"""Backends: (Segment, schedule) -> Kernel. BACKENDS says which one makes the kernels of a target."""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.kernel import Kernel
from ..segment import Segment
from . import cpu, nvfuser, reference

# What runs on a target that has no kernels of its own yet is said by `explain`.
BACKENDS: dict[str, Callable[[Segment, object], Kernel]] = {
    "reference": reference.emit, "cpu": reference.emit, "cuda": reference.emit, "cpp": cpu.emit,
    "sm_90": nvfuser.emit, "sm_100": nvfuser.emit,
}  # fmt: skip
