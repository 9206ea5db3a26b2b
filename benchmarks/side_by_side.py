"""Processes that get ready side by side and are measured one at a time: to import a library and to
make its model takes minutes, and what computes beside others is not measured.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

# what dies with this process, however that ends (PR_SET_PDEATHSIG)
_WITH_PARENT = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)


def ready() -> None:
    """A process that can be measured stops itself, until it is its turn."""
    os.kill(os.getpid(), signal.SIGSTOP)


def in_turns(
    calls: Mapping[str, Sequence[str]], out: Path, limit: float
) -> Iterator[tuple[str, str]]:
    """Starts command lines, which write to OUT/NAME.log. When each is `ready`, has ended, or
    was not ready in `limit` seconds and is killed, they go on one after the other, in this order.
    Yields when one has ended: its name, and what went wrong. None is left, whatever happens.
    """
    processes = {}
    try:
        for name, call in calls.items():
            with (out / f"{name}.log").open("w") as log:
                processes[name] = subprocess.Popen(
                    call,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_WITH_PARENT,
                )
        deadline = time.monotonic() + limit
        states = {name: _state(process, deadline) for name, process in processes.items()}
        for name, process in processes.items():
            problem = "" if states[name] else f"not ready in {limit:g} s"
            if states[name] == os.CLD_STOPPED:
                process.send_signal(signal.SIGCONT)
            try:
                if process.wait(limit) and not problem:
                    said = (out / f"{name}.log").read_text(errors="replace").split("\n")
                    status = f"exit status {process.returncode}"
                    problem = next(filter(str.strip, reversed(said)), status)
            except subprocess.TimeoutExpired:
                problem = f"not measured in {limit:g} s"
                _end(process)
            yield name, problem
    finally:
        for process in processes.values():
            _end(process)


def _state(process: subprocess.Popen[bytes], deadline: float) -> int:
    """os.CLD_STOPPED, or how it ended; 0 if it had to be ended."""
    flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_PID, process.pid, flags)) is None:
        if time.monotonic() > deadline:
            _end(process)
            return 0
        time.sleep(0.01)
    return found.si_code


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what it started. An interrupt may have left Popen.wait's lock held."""
    if process.poll() is None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.killpg(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        process.poll()
