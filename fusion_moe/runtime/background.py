"""Compiling while calls are served: builds run on background threads, and each build runs only once
at a time.

    started = start(builds)
        started.done        # whether all have ended; never waits
        started.check()     # raises the first error of those that have ended
    ahead(builds)           # of what later calls may need; nobody waits for them

What was started ends before the process does; of what runs ahead, what has begun.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from ..messages import warn_once
from .host_memory.bandwidth import cpus
from .precompile import Build

_NICE = 10  # of threads that run ahead
_lock = threading.Lock()
_one_at_a_time = threading.Lock()  # of lists of builds ahead: each uses all spare CPUs
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
        """Raises the error of the first of these builds that failed; builds that still run are not
        waited for.
        """
        for future in self.futures:
            if future.done():
                future.result()


def start(builds: Iterable[Build]) -> Started:
    """Starts builds under the options in force, except those that are running already."""
    with _lock:
        return Started(tuple(_future(key, build) for key, build in builds))


def ahead(builds: Callable[[], Iterable[Build]]) -> None:
    """Starts builds that later calls may need, on threads of low priority, where `builds` runs too.

    An error is left to the call that needs the build; a warning says so. At the interpreter's exit
    none begins.
    """
    run = contextvars.copy_context().run
    threading.Thread(
        target=run,
        args=(_ahead, builds),
        name="fusion_moe compile ahead",
        daemon=False,  # also where autograd's threads, daemons to Python, run a backward pass
    ).start()


def _ahead(builds: Callable[[], Iterable[Build]]) -> None:
    _give_way()
    with _one_at_a_time:
        waiting = deque[Callable[[], object]]()
        with _warned():
            waiting.extend(build for _, build in builds())
        helpers = [
            threading.Thread(target=contextvars.copy_context().run, args=(_drain, waiting))
            for _ in range(min(len(waiting), cpus() - 1) - 1)
        ]
        for thread in helpers:
            thread.start()
        _drain(waiting)
        for thread in helpers:
            thread.join()


def _drain(waiting: deque[Callable[[], object]]) -> None:
    """Not by an executor, which would begin all that waits before the interpreter exits."""
    while threading.main_thread().is_alive():
        try:
            build = waiting.popleft()
        except IndexError:
            return
        with _warned():
            build()


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """Nobody waits for what runs ahead: an error becomes a warning."""
    try:
        yield
    except Exception as error:
        warn_once(
            f"a kernel was not compiled ahead ({type(error).__name__}: {error}); the call that "
            "needs it compiles it"
        )


def _give_way() -> None:
    """Lowers the priority of this thread, and of those that it starts."""
    if sys.platform == "linux":  # elsewhere a priority is a process's
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


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
    global _lock, _one_at_a_time
    _lock, _one_at_a_time = threading.Lock(), threading.Lock()
    _threads.cache_clear()
    _unfinished.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
