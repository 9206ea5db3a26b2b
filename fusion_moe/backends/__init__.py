"""Backends, which make kernels from segments. BACKENDS maps a target to its backend; `plan` asks it
about a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import schedule
from ..errors import UnsupportedError
from ..ir.core import Fusion
from ..passes import contract_rounding
from ..runtime.kernel import Kernel
from ..runtime.program import Joined
from ..schedule.plan import REFERENCE, Plan, Refusal
from ..schedule.segment import Segment
from ..target import Target
from . import cpu, cuda, nvfuser, reference
from .inexpressible import Inexpressible

_TOO_DEEP = "too many operations in one expression"


@dataclass(frozen=True)
class Backend:
    """plan(fusion, kind) -> what a kernel of that kind is emitted from; UnsupportedError with the
    reason if there is no such kernel.

    emit(segment) -> the kernel of a planned segment. join(fusion, kernels) -> the kernels, and a
    single call for all of them if that is possible.
    """

    name: str
    plan: Callable[[Fusion, str], Any]
    emit: Callable[[Segment], Kernel]
    join: Callable[[Fusion, Sequence[Kernel]], tuple[tuple[Kernel, ...], Joined | None]] = (
        lambda fusion, kernels: (tuple(kernels), None)
    )


_REFERENCE = Backend(REFERENCE, reference.plan, reference.emit)
_CPU, _CUDA = (
    Backend(cpu.NAME, cpu.plan, cpu.emit, cpu.join),
    Backend(cuda.NAME, cuda.plan, cuda.emit, cuda.join),
)
_NVFUSER = Backend(nvfuser.NAME, nvfuser.plan, nvfuser.emit)

BACKENDS = {
    "reference": _REFERENCE,
    "cpu": _CPU,
    "cuda": _CUDA,
    "sm_90": _NVFUSER,
    "sm_100": _NVFUSER,
}


def plan(piece: Fusion, target: Target, contract: bool) -> Plan | Refusal:
    """The decision of a target's backend about a piece. contract: whether it may keep float32 where
    the program rounds and widens again.
    """
    scheduler, backend = schedule.find(piece, target), BACKENDS[target.name]
    if scheduler is None:
        return Refusal(
            schedule.closest(piece, target).can_schedule(piece, target) or "no scheduler accepts it"
        )
    fusion = contract_rounding(piece) if contract and scheduler.CONTRACTS_ROUNDING else piece
    try:
        work = backend.plan(fusion, scheduler.NAME)
    except UnsupportedError as error:
        return Refusal(str(error), _named(piece, backend, scheduler.NAME))
    except RecursionError:
        return Refusal(_TOO_DEEP)
    return Plan(backend.name, scheduler.NAME, fusion, scheduler.describe(fusion), work)


def emit(segment: Segment, target: Target) -> Kernel:
    """The kernel of a segment of a target's program."""
    backend = _REFERENCE if segment.plan.backend == REFERENCE else BACKENDS[target.name]
    return backend.emit(segment)


def _named(piece: Fusion, backend: Backend, kind: str) -> Any:
    """The operation of the piece itself that a backend cannot express: contracting makes new
    operations.
    """
    try:
        backend.plan(piece, kind)
    except Inexpressible as error:
        return error.op
    except (UnsupportedError, RecursionError):
        pass
    return None
