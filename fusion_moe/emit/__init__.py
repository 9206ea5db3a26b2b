"""Backends, which make kernels of segments. BACKENDS says which one makes those of a target; `plan` asks it about a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import schedule
from ..errors import UnsupportedError
from ..ir.core import Fusion
from ..passes import contract_rounding
from ..plan import REFERENCE, Plan, Refusal
from ..runtime.kernel import Kernel
from ..runtime.program import Joined
from ..segment import Segment
from ..target import Target
from . import cpu, cuda, nvfuser, reference
from .inexpressible import Inexpressible

_TOO_DEEP = "too many operations in one expression"


@dataclass(frozen=True)
class Backend:
    """plan(fusion, kind) -> what a kernel of that kind is emitted from; UnsupportedError with the sentence why there is none.

    emit(segment) -> the kernel of a segment that was planned. join(fusion, kernels) -> the kernels, and one call for all of them if there
    can be one.
    """

    name: str
    plan: Callable[[Fusion, str], Any]
    emit: Callable[[Segment], Kernel]
    join: Callable[[Fusion, Sequence[Kernel]], tuple[tuple[Kernel, ...], Joined | None]] = lambda fusion, kernels: (tuple(kernels), None)


_REFERENCE = Backend(REFERENCE, reference.plan, reference.emit)
_CPU, _CUDA = Backend(cpu.NAME, cpu.plan, cpu.emit, cpu.join), Backend(cuda.NAME, cuda.plan, cuda.emit, cuda.join)
_NVFUSER = Backend(nvfuser.NAME, nvfuser.plan, nvfuser.emit)

BACKENDS = {"reference": _REFERENCE, "cpu": _CPU, "cuda": _CUDA, "sm_90": _NVFUSER, "sm_100": _NVFUSER}


def plan(piece: Fusion, target: Target, contract: bool) -> Plan | Refusal:
    """What the backend of a target decides about a piece. contract: whether it may keep float32 where the program rounds and reads back."""
    scheduler, backend = schedule.find(piece, target), BACKENDS[target.name]
    if scheduler is None:
        return Refusal(schedule.closest(piece, target).can_schedule(piece, target) or "no scheduler accepts it")
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
    """The operation that a backend cannot express, of the piece itself: contracting makes operations of its own."""
    try:
        backend.plan(piece, kind)
    except Inexpressible as error:
        return error.op
    except (UnsupportedError, RecursionError):
        pass
    return None
