"""Backends, which make kernels from segments: the registry of those that serve a target, and what
the compiler asks them.

CPU, CUDA and the reference are here, each imported when one of its targets is first asked for.
Others are registered by `register`, or by an entry point of the group `fusion_moe.backends`, which
names a Backend. docs/extend/backends.md has their interface.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

from .. import options, plugins, schedule
from ..arch import lookup
from ..encodings import Element
from ..encodings.search import BLOCK_KERNELS, BlockKernels
from ..errors import OptionError, PluginError, UnsupportedError, did_you_mean
from ..ir import Fusion
from ..messages import log
from ..passes import contract_rounding
from ..runtime.kernel import Kernel
from ..schedule.plan import REFERENCE, Plan, Refusal
from ..schedule.segment import Segment
from ..target import Target
from .backend import INTERFACE, Backend
from .inexpressible import Inexpressible

__all__ = ["INTERFACE", "TARGETS", "Backend", "Target", "register"]

GROUP = "fusion_moe.backends"
_OWN = ("cpu", "cuda", REFERENCE)  # targets, and the modules here that serve them
_TOO_DEEP = "too many operations in one expression"

_registered: dict[str, tuple[Backend, Target]] = {}  # by the names of targets
_failed: list[PluginError] = []  # entry points that could not be loaded


# The registry -------------------------------------------------------------------------------------


def register(backend: Backend) -> Backend:
    """Adds a backend, whose targets can be asked for from then on. PluginError if it was written
    for another version of the interface, and for a target that another backend serves.
    """
    where = f"backend {getattr(backend, 'name', backend)!r}"
    if not isinstance(backend, Backend):
        raise PluginError(f"a {type(backend).__name__}", expected="a Backend", where=where)
    if backend.interface != INTERFACE:
        raise PluginError(
            f"written for version {backend.interface} of the interface",
            expected=f"version {INTERFACE}, which this fusion_moe has",
            todo="install a version of the backend's package for it: docs/extend/backends.md",
            where=where,
        )
    for target in backend.targets:
        served = _own(target.name) if target.name in _OWN else _registered.get(target.name)
        if served is not None and served[0] is not backend:
            raise PluginError(
                f"the target {target.name!r}, which another backend serves",
                expected="a name of its own",
                where=where,
            )
    return _add(backend)


def _add(backend: Backend) -> Backend:
    _registered.update((target.name, (backend, target)) for target in backend.targets)
    return backend


def _found(name: str) -> tuple[Backend, Target] | None:
    """The backend and the target of this name, loaded if need be; None if there is none."""
    if name in _OWN:
        return _own(name)
    if name not in _registered:
        _load()
    return _registered.get(name)


def _own(name: str) -> tuple[Backend, Target]:
    if name not in _registered:
        _add(importlib.import_module(f"{__name__}.{name}").BACKEND)
    return _registered[name]


@cache
def _load() -> None:
    """Registers the backends of installed packages. One that fails warns, and only its own targets
    are missing.
    """
    loaded, failed = plugins.load(GROUP)
    _failed.extend(failed)
    for backend in loaded:
        try:
            register(backend)
        except PluginError as error:
            _failed.append(error)
            log.warning("%s", error)


class _Targets(Mapping[str, Target]):
    """All targets, by name; those of a package are loaded when they are asked for, or all are."""

    def __getitem__(self, name: str) -> Target:
        if (result := _found(name)) is None:
            raise KeyError(name)
        return result[1]

    def __iter__(self) -> Iterator[str]:
        _load()
        return iter(dict.fromkeys((*_OWN, *_registered)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


TARGETS: Mapping[str, Target] = _Targets()


def _block_kernels(x: torch.Tensor, element: Element) -> BlockKernels | None:
    """The CPU's for x float [n, block], imported when scales are first searched."""
    return importlib.import_module(f"{__name__}.cpu.blocks").CPUBlockKernels.find(x, element)


BLOCK_KERNELS["cpu"] = _block_kernels


def find(name: str, device: torch.device) -> Target:
    """The target called `name`; "auto" is the kind of `device`. OptionError for an unknown name."""
    wanted = device.type if name == "auto" else name
    if (result := _found(wanted)) is not None:
        return result[1]
    raise OptionError(
        f"target {wanted!r}",
        expected=f"one of auto, {', '.join(TARGETS)}",
        todo=(
            "load the tensors: what is on meta has no values"
            if name == "auto" and wanted == "meta"
            else "move the tensors to a supported device"
            if name == "auto"
            else f"for a GPU, target='cuda', or fusion_moe.explain(..., gpu={wanted!r})"
            if lookup(wanted)
            else did_you_mean(wanted, ["auto", *TARGETS]) or "; ".join(map(str, _failed))
        ),
    )


def backend_of(target: Target) -> Backend:
    """The backend that serves a target."""
    result = _found(target.name)
    assert result is not None
    return result[0]


# What the compiler asks ---------------------------------------------------------------------------


def plan(piece: Fusion, target: Target, contract: bool) -> Plan | Refusal:
    """The decision of a target's backend about a piece. contract: whether it may keep float32 where
    the program rounds and widens again.
    """
    scheduler, backend = schedule.find(piece, target), backend_of(target)
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
    return backend_for(segment, target).emit(segment)


def in_place_of_kernel(segment: Segment, target: Target) -> Kernel | None:
    """What runs in plain torch: a segment that has no kernel, or whose kernel cannot be compiled on
    this machine. None for all others. UnsupportedError with order="row", which torch's kernels do
    not keep.
    """
    backend = backend_for(segment, target)
    actual = backend.emit(segment) if backend.name == REFERENCE else backend.substitute(segment)
    if actual and options.current().row_order:
        names = ", ".join(dict.fromkeys(op.kind.name for op in segment.fusion.ops))
        raise UnsupportedError(
            f"order='row' for {names}, which has no kernel here: {segment.plan.why or actual.why}",
            expected="a kernel, since the bits of plain torch may depend on the batch",
        )
    return actual


def backend_for(segment: Segment, target: Target) -> Backend:
    """The backend that computes a segment of a target's program: the target's, or the reference."""
    return backend_of(TARGETS[REFERENCE] if segment.plan.backend == REFERENCE else target)


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
