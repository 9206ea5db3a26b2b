"""Backends, which make kernels of segments. BACKENDS says which one makes those of a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir.core import Fusion
from ..runtime.kernel import Kernel
from ..runtime.program import Joined
from ..segment import Segment
from . import cpu, nvfuser, reference


@dataclass(frozen=True)
class Backend:
    """emit(segment, schedule) -> its kernel. join(fusion, kernels) -> the kernels, and one call for all of them if there can be one."""

    emit: Callable[[Segment, object], Kernel]
    join: Callable[[Fusion, Sequence[Kernel]], tuple[tuple[Kernel, ...], Joined | None]] = lambda fusion, kernels: (tuple(kernels), None)


_REFERENCE, _CPU, _NVFUSER = Backend(reference.emit), Backend(cpu.emit, cpu.join), Backend(nvfuser.emit)

# What runs on a target that has no kernels of its own yet is said by `explain`.
BACKENDS = {"reference": _REFERENCE, "cpu": _CPU, "cuda": _REFERENCE, "sm_90": _NVFUSER, "sm_100": _NVFUSER}
