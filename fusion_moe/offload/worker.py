"""The worker: a native thread (worker.cpp) that computes rows which GPUs hand over.

    worker = Worker.of_process()                        # one for all models; started if needed
    model = worker.model(staging)                       # a request ring, and the memory beside it
    programs = model.programs([(rows, plan), ...])    # for more and more rows
    number = model.layer(programs, weights)             # which kernels put into the request ring

A model is removed when nothing refers to it any more, the worker ends with the process. After a
fork the child has none: it starts its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from ..backends.cpu.readers import KERNELS as CPU_KERNELS
from ..runtime import build, native, native_source
from ..runtime.host_memory import bandwidth
from ..runtime.launch_plan import counted
from .pinned import Staging

KERNELS = Path(__file__).parent / "kernels"
SOURCE = Path(__file__).with_name("worker.cpp")
_IDLE = 2000  # microseconds without work, after which the pool's threads are given back
_SPARE = 2  # CPUs that are left to others
_starting = threading.Lock()
WHY = {1: "its worker has ended", 2: "it took too long", 3: "it found bad input"}


class Worker:
    """The worker of this process. threads: of its pool."""

    _of_process: Worker | None = None

    def __init__(self, threads: int, idle: int = _IDLE):
        self.threads, self._process = threads, os.getpid()
        self.handle = library().offload_start(threads, idle)
        self.stop = weakref.finalize(self, library().offload_stop, self.handle)

    @classmethod
    def of_process(cls, idle: int = _IDLE) -> Worker:
        """The one of this process, on all CPUs but two. idle: of one that this starts."""
        with _starting:
            result = cls._of_process
            if result is None or result._process != os.getpid() or not result.stop.alive:
                result = cls._of_process = Worker(max(1, bandwidth.cpus() - _SPARE), idle)
            return result

    def model(self, staging: Staging) -> Model:
        """Registers a request ring: `staging` has those arrays that `request_buffers` names."""
        return Model(self, staging)

    def pause(self, still: bool = True) -> None:
        """Has the worker stand still, as one that a debugger has stopped, or go on: for tests."""
        library().offload_pause(self.handle, still)


class Model:
    """What the worker knows of a model: a request ring, programs and layers."""

    def __init__(self, worker: Worker, staging: Staging):
        self.worker, self.staging = worker, staging
        addresses = [staging.tensors[name].data_ptr() for name in request_buffers(0, 0)]
        self.handle = library().offload_model(worker.handle, *_numbers(addresses))
        self._kept: list[object] = []
        # keeps both: neither ends before it
        weakref.finalize(self, _remove, worker, self.handle, staging)

    def programs(self, plans: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Registers programs of the CPU and returns their number with the worker. plans: (most
        rows, launch plan as numbers), with more rows from one to the next.
        """
        numbers = [len(plans)]
        for rows, plan in plans:
            numbers += [rows, *plan]
        return int(library().offload_programs(self.worker.handle, self.handle, *_numbers(numbers)))

    def layer(
        self, programs: int, weights: Sequence[Tensor], in_files: Sequence[Tensor] = ()
    ) -> int:
        """Registers the inputs of programs after rows, ids and weights. Its number.

        in_files: those of which the system reads the experts of rows ahead.
        """
        self._kept.append(weights)
        numbers = [*counted([t.data_ptr() for t in weights]), len(in_files)]
        for t in in_files:
            numbers += [t.data_ptr(), t[0].nbytes]
        offload_layer = library().offload_layer(
            self.worker.handle, self.handle, programs, *_numbers(numbers)
        )
        return int(offload_layer)

    def busy(self, layer: int) -> int:
        """Nanoseconds in which the worker computed a layer, so far."""
        return int(library().offload_busy(self.worker.handle, self.handle, layer))

    def submit(self, layer: int, rows: int) -> int:
        """Hands over rows that lie in the staging memory, as a GPU does. The number of the
        request.
        """
        return int(library().offload_submit(self.worker.handle, self.handle, layer, rows))

    def wait(self, request: int, seconds: float) -> str:
        """Waits for its answer. Why there is none; "" if there is."""
        offload_await = library().offload_await(self.handle, request, int(seconds * 1e9))
        return WHY.get(offload_await, "")


def request_buffers(rows: int, row_bytes: int) -> dict[str, int]:
    """The bytes of the arrays of a request ring for so many rows."""
    return {
        "box": 256,
        "rows": rows * row_bytes,
        "ids": 4 * rows,
        "weights": 4 * rows,
        "results": rows * row_bytes,
    }


def nothing(rows: int) -> list[int]:
    """The launch plan of a program that makes nothing, for up to so many rows."""
    function = native.address(library().offload_nothing)
    return [3, *counted([0]), 0, *counted([]), function, *[0] * 3]


@cache
def library() -> ctypes.CDLL:
    """worker.cpp. BuildError without a compiler."""
    result = build.load(
        SOURCE.read_text(encoding="utf-8"),
        name="offload_worker",
        isa_level="generic",
        include=[KERNELS, CPU_KERNELS, native_source.INCLUDE],
    )
    address, number = ctypes.c_void_p, ctypes.c_longlong
    for name, takes, gives in (
        ("start", [ctypes.c_int, number], address),
        ("stop", [address], None),
        ("model", [address, address, number], address),
        ("programs", [address, address, address, number], number),
        ("layer", [address, address, number, address, number], number),
        ("remove", [address, address], None),
        ("pause", [address, ctypes.c_int], None),
        ("submit", [address, address, ctypes.c_int, ctypes.c_int], ctypes.c_ulonglong),
        ("await", [address, ctypes.c_ulonglong, number], ctypes.c_int),
        ("busy", [address, address, number], number),
    ):
        function = getattr(result, f"offload_{name}")
        function.argtypes, function.restype = takes, gives
    return result


def _remove(worker: Worker, handle: int, staging: Staging) -> None:
    library().offload_remove(worker.handle, handle)


def _numbers(numbers: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_longlong], int]:
    """In memory, and how many they are."""
    return (ctypes.c_longlong * len(numbers))(*numbers), len(numbers)
