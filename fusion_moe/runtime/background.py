"""Compiling while calls are served: builds run on background threads, and each build runs only once
at a time.

    started = start(builds)
        started.done        # whether all have ended; never waits
        started.check()     # raises the first error of those that have ended

The threads end when no work is left. At the interpreter's exit no further build is started, and
running builds are waited for: a compiler that is a library must not run while the process is torn
down. Half-written files do no harm: see store.py.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from .host_memory.bandwidth import cpus
from .precompile import Build

_lock = threading.Lock()
_waiting: deque[tuple[Hashable, Callable[[], object], Future[object]]] = deque()
_unfinished: dict[Hashable, Future[object]] = {}
_threads = 0


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
        started = Started(tuple(_future(key, build) for key, build in builds))
        _add_threads()
    return started


def _future(key: Hashable, build: Callable[[], object]) -> Future[object]:
    if key not in _unfinished:
        _unfinished[key] = Future()
        _waiting.append((key, partial(contextvars.copy_context().run, build), _unfinished[key]))
    return _unfinished[key]


def _add_threads() -> None:
    """Starts as many threads as half the CPUs, so that the others keep serving calls."""
    global _threads
    while _threads < min(len(_waiting), max(1, cpus() // 2)):
        _threads += 1
        threading.Thread(target=_work, name="fusion_moe background compile").start()


def _work() -> None:
    global _threads
    while True:
        with _lock:
            if not _waiting or not threading.main_thread().is_alive():
                _threads -= 1
                return
            key, build, future = _waiting.popleft()
        try:
            future.set_result(build())
        except BaseException as error:
            future.set_exception(error)
        with _lock:
            del _unfinished[key]


def _begin_anew() -> None:
    """After a fork: the child has none of the threads, and may have a lock that one of them
    held.
    """
    global _lock, _threads
    _lock, _threads = threading.Lock(), 0
    _waiting.clear()
    _unfinished.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
