"""Backends, which make kernels of segments. BACKENDS says which one makes those of a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir.core import Fusion
from ..runtime.kernel import Kernel
from ..runtime.program import Joined
from ..segment import Segment
from . import cpu, cuda, nvfuser, reference


@dataclass(frozen=True)
class Backend:
    """emit(segment, schedule) -> its kernel. join(fusion, kernels) -> the kernels, and one call for all of them if there can be one."""

    emit: Callable[[Segment, object], Kernel]
    join: Callable[[Fusion, Sequence[Kernel]], tuple[tuple[Kernel, ...], Joined | None]] = lambda fusion, kernels: (tuple(kernels), None)


_REFERENCE, _CPU, _NVFUSER = Backend(reference.emit), Backend(cpu.emit, cpu.join), Backend(nvfuser.emit)

BACKENDS = {"reference": _REFERENCE, "cpu": _CPU, "cuda": Backend(cuda.emit, cuda.join), "sm_90": _NVFUSER, "sm_100": _NVFUSER}
