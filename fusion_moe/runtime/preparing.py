"""Compiling before serving: calls of programs that are noted in place of run, and then all kernels that they need compiled at once.

    with preparing():
        model(tokens)          # launches none of our kernels; programs return zeros
    model(tokens)              # compiles nothing

A call is noted with its sizes, from which a backend knows the kernels. Those of all noted calls are compiled in parallel, each once, and
loaded. Calls inside of a CUDA graph capture are not noted: what is captured must be what runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ..progress import progress
from .bandwidth import cpus

Sizes = Mapping[str, int]
Build = tuple[Hashable, Callable[[], object]]  # a key, equal for equal work, and a function that does it and may run in any thread


@runtime_checkable
class Compiled(Protocol):
    """A launch that is compiled before it runs."""

    def builds(self, device: torch.device, sizes: Sizes) -> Iterable[Build]:
        """What a call of these sizes has to compile."""

    def load(self, device: torch.device, sizes: Sizes) -> None:
        """All that such a call does before it launches, once everything is compiled."""


@dataclass(frozen=True)
class Noted:
    """A call of launches that would have happened."""

    launches: tuple[Compiled, ...]
    device: torch.device
    sizes: tuple[tuple[str, int], ...]


_noted: contextvars.ContextVar[dict[Noted, None] | None] = contextvars.ContextVar("fusion_moe_noted", default=None)


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Compiles what the calls inside the block need, at its end and in parallel, with progress on stderr.

    Inside, programs launch nothing and return zeros: results are meaningless. An error inside compiles nothing. BuildError for a kernel
    that does not compile.
    """
    noted: dict[Noted, None] = {}
    token = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(token)
    compile_all(noted)


def note(launches: tuple[Compiled, ...], device: torch.device, sizes: Sizes) -> bool:
    """Notes a call, if calls are noted now; whether they are."""
    noted = _noted.get()
    if noted is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    noted[Noted(launches, device, tuple(sizes.items()))] = None
    return True


def compile_all(calls: Iterable[Noted]) -> None:
    """Compiles and loads what calls need."""
    calls = list(calls)
    run_builds(build for c in calls for launch in c.launches for build in launch.builds(c.device, dict(c.sizes)))
    for c in calls:
        for launch in c.launches:
            launch.load(c.device, dict(c.sizes))


def run_builds(builds: Iterable[Build]) -> dict[Hashable, Any]:
    """What builds return, by their keys: each done once, in parallel, under the options in force.

    The first error is raised, and what has not begun then is left out.
    """
    wanted = dict(builds)
    with ThreadPoolExecutor(max(1, min(len(wanted), cpus()))) as pool:
        made: dict[Future[Any], Hashable] = {pool.submit(contextvars.copy_context().run, build): key for key, build in wanted.items()}
        try:
            return {made[done]: done.result() for done in progress(as_completed(made), "compiling kernels", len(made))}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
