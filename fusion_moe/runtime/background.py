"""Compiling while calls are served: builds run on background threads, and each build runs only once
at a time.

    started = start(builds)
        started.done        # whether all have ended; never waits
        started.check()     # raises the first error of those that have ended

What was started ends before the process does.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from .host_memory.bandwidth import cpus
from .precompile import Build

_lock = threading.Lock()
_unfinished: dict[Hashable, Future[object]] = {}


@dataclass(frozen=True)
class Started:
    """Builds that have been started."""

    futures: tuple[Future[object], ...]

    @property
    def done(self) -> bool:
        """Whether all builds have ended, with or without an error."""
        return all(future.done() for future in self.futures)

    def check(self) -> None:
        """Raises the first error of the builds that have ended."""
        for future in self.futures:
            if future.done():
                future.result()


def start(builds: Iterable[Build]) -> Started:
    """Starts builds under the options in force, except those that are running already."""
    with _lock:
        return Started(tuple(_future(key, build) for key, build in builds))


def _future(key: Hashable, build: Callable[[], object]) -> Future[object]:
    if key in _unfinished:
        return _unfinished[key]
    future = _unfinished[key] = _threads().submit(contextvars.copy_context().run, build)
    future.add_done_callback(lambda _: _unfinished.pop(key, None))
    return future


@cache
def _threads() -> ThreadPoolExecutor:
    """Half as many threads as CPUs, so that the others keep serving calls."""
    return ThreadPoolExecutor(max(1, cpus() // 2), "fusion_moe background compile")


def _begin_anew() -> None:
    """After a fork: the child has none of the threads, and may have a lock that one of them
    held.
    """
    global _lock
    _lock = threading.Lock()
    _threads.cache_clear()
    _unfinished.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
