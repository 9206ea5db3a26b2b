"""What a backend is: the interface between the compiler and what makes kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import Fusion
from ..runtime.kernel import Kernel
from ..runtime.program import Joined
from ..schedule.segment import Segment
from ..target import Target

INTERFACE = 1  # the version of everything that docs/extend/backends.md names


def source_of(
    fusion: Fusion, backend: str, usual: Callable[[Fusion], Any]
) -> Callable[[Fusion], Any]:
    """What writes a piece for a backend: what one of its operations brings, else what usually
    does.
    """
    brought = (op.kind.sources[backend] for op in fusion.ops if backend in op.kind.sources)
    return next(brought, usual)


def _one_by_one(
    fusion: Fusion, kernels: Sequence[Kernel]
) -> tuple[tuple[Kernel, ...], Joined | None]:
    return tuple(kernels), None


def _nothing(segment: Segment) -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """What makes the kernels of some targets.

    name: of the backend; targets: those that it serves, with the schedulers whose pieces it is
    asked about; interface: the INTERFACE that it was written for.

    plan(fusion, kind) -> what a kernel of that kind is emitted from. UnsupportedError with the
    reason if there is no such kernel; `Inexpressible` if one operation is the reason. It depends on
    nothing that is installed.

    emit(segment) -> the kernel of a planned segment. It needs what writes its source, not what
    compiles it. join(fusion, kernels) -> the kernels of a program, and a single call for all of
    them if that is possible. why_missing() -> what is not installed without which `emit` writes no
    source; "" if nothing. substitute(segment) -> what runs in place of the kernel where nothing can
    be compiled; None where it can. note: what the numbers of `explain` mean for its segments, where
    that is not what they mean for others'. row_order: whether the option order is followed: with
    order="row" no row changes the bits of another one's results.
    """

    name: str
    targets: tuple[Target, ...]
    plan: Callable[[Fusion, str], Any]
    emit: Callable[[Segment], Kernel]
    interface: int
    join: Callable[[Fusion, Sequence[Kernel]], tuple[tuple[Kernel, ...], Joined | None]] = (
        _one_by_one
    )
    why_missing: Callable[[], str] = str
    substitute: Callable[[Segment], Kernel | None] = _nothing
    note: str = ""
    row_order: bool = False
