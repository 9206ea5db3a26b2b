"""How fast a machine's parts are, which the split's constants come from: measured once for experts
of a form, since kernels are not equally fast in all, and kept on disk, so that runs repeat.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from ..errors import WorkerError
from ..runtime import cuda, store
from ..runtime.host_memory import bandwidth
from .device import HostStorage
from .requester import Requester
from .split import Constants

_MANY = 256  # rows, whose products take longer than reading an expert
_SOME = 12  # experts of a call
_REPEATS = 31  # whose median counts: steps, too, are at times slowed down by other programs
_PRODUCT = 10_000  # nanoseconds to begin the GPU's products
_OF_MEMORY = 0.8  # of a GPU's bandwidth, that its products reach


# copy(first, count): copies experts of a host storage to a device, and waits
Copy = Callable[[int, int], None]


@dataclass(frozen=True)
class Machine:
    """Bytes per second that the CPU's products read and that copies move, each alone and beside the
    other; multiplications per second of the CPU's products; nanoseconds to begin work on each side
    and to wait for it.

    gpu: bytes per second that the GPU's products read; 0: it is not known.
    """

    cpu: float
    cpu_beside: float
    macs: float
    copy: float
    copy_beside: float
    cpu_start: int
    copy_start: int
    gpu: float = 0.0

    def constants(self, nbytes: int, macs: int) -> Constants:
        """Those of experts of so many bytes, with so many multiplications a row."""
        return Constants(
            cpu_start=self.cpu_start,
            cpu_expert=_ns(nbytes, self.cpu),
            cpu_expert_beside=_ns(nbytes, min(self.cpu, self.cpu_beside)),
            cpu_row=_ns(macs, self.macs),
            copy_start=self.copy_start + (_PRODUCT if self.gpu else 0),
            copy_expert=_ns(nbytes, self.copy),
            copy_expert_beside=_ns(nbytes, min(self.copy, self.copy_beside)),
            gpu_expert=_ns(nbytes, self.gpu) if self.gpu else 0,
        )


# What `plan` expects of a GPU beside a server's CPU: what was measured beside an H200, with 14
# threads, of which products of the CPU reach nine tenths. When a model is loaded, all are measured.
EXPECTED = {
    "H100": Machine(8.1e10, 7.0e10, 2e12, 5.0e10, 4.7e10, 20_000, 6_000, 2.6e12),
    "H200": Machine(8.1e10, 7.0e10, 2e12, 5.0e10, 4.7e10, 20_000, 6_000, 3.8e12),
}
# a pretended device's, on every machine: either side is the better one now and then
PRETENDED = Machine(5e9, 4e9, 1e12, 5e9, 4e9, 2_000, 2_000)


def measured(
    name: str, storage: HostStorage, copy: Copy, starts: Callable[[], tuple[int, int]]
) -> Machine:
    """The speeds of this machine with a device of a name, for experts like those of a host
    storage: from this process, an earlier one, or measured now.

    starts(): the nanoseconds to hand rows over and to wait for them, and to begin a copy.
    """
    like = storage.format, storage.activation_format, storage.features, storage.macs, storage.nbytes
    key = store.key_of(
        Path(__file__).read_bytes(), bandwidth.cpu(), str(torch.get_num_threads()), name, str(like)
    )

    def make(path: Path) -> None:
        path.write_text(json.dumps(asdict(_measure(storage, copy, *starts()))))

    return Machine(**json.loads(store.get_or_make(f"machine-{key}.json", make).read_text()))


def copy_alone(to: Tensor, t: Tensor) -> None:
    """A copy of a contiguous CPU tensor by one thread, which as the GPU's copies needs no other."""
    ctypes.memmove(to.data_ptr(), t.data_ptr(), t.nbytes)


def of_gpu(device: str, storage: HostStorage) -> Machine:
    """The speeds of this machine with a GPU, whose kernels copy experts of a host storage from
    pinned memory.
    """
    from .turnaround import Copier, starts  # which looks for a GPU

    if storage.in_files:
        return EXPECTED["H100"]  # nothing is copied from there, so nothing is to be decided
    on = torch.device(device)
    name, copier = torch.cuda.get_device_name(on), Copier(on, storage, _SOME)
    result = measured(name, storage, copier, lambda: starts(on))
    return replace(result, gpu=_OF_MEMORY * cuda.device_facts(cuda.index_of(on)).memory_bandwidth)


def _measure(storage: HostStorage, copy: Copy, hand_over: int, copy_start: int) -> Machine:
    requester = Requester(storage, torch.bfloat16)
    (many,) = _products(storage, requester, 1, rows=_MANY)  # first: it wakes the CPU up
    start, expert = _line(storage, requester)
    rows = max(many - expert, many / 2)  # of all but the first one
    _, alone = _of_line(storage, *(median(_copies(storage, copy, n)) for n in (1, _some(storage))))
    copy_beside, cpu_beside = _beside(storage, requester, copy)
    return Machine(
        cpu=storage.nbytes * 1e9 / expert,
        cpu_beside=storage.nbytes * 1e9 / cpu_beside,
        macs=(_MANY - 1) * storage.macs * 1e9 / rows,
        copy=storage.nbytes * 1e9 / alone,
        copy_beside=storage.nbytes * 1e9 / copy_beside,
        cpu_start=int(start) + hand_over,
        copy_start=copy_start,
    )


def _some(storage: HostStorage) -> int:
    return max(2, min(_SOME, storage.experts))


def _line(storage: HostStorage, requester: Requester) -> tuple[float, float]:
    """Nanoseconds that the CPU's products take to begin, and for each expert."""
    return _of_line(storage, *_products(storage, requester, 1, _some(storage)))


def _of_line(storage: HostStorage, one: float, some: float) -> tuple[float, float]:
    """The same, by the time of one and of some experts."""
    count = _some(storage)
    expert = max((some - one) / (count - 1), some / count / 2)  # noise is no speed
    return max(one - expert, 1000), expert


def _products(
    storage: HostStorage, requester: Requester, *counts: int, rows: int = 1
) -> list[float]:
    """The nanoseconds that the worker computes so many rows of each of so many experts, which are
    others in each call. Counts take turns, so that what slows the machine slows them alike.

    It is the worker's own time: steps hand rows over to it without Python, whose calls take longer
    than an expert.
    """
    times: list[list[float]] = [[] for _ in counts]
    first = 0
    for _ in range(_REPEATS + 2):
        for result, count in zip(times, counts, strict=True):
            ids = torch.arange(first, first + count).repeat_interleave(rows)[:, None]
            x = torch.ones(len(ids), storage.features, dtype=torch.bfloat16)
            before = requester.busy()
            if requester.computed(x, ids % storage.experts, torch.ones(len(ids), 1)) is None:
                raise WorkerError("the worker did not compute", where="offload")
            result.append(float(requester.busy() - before))
            first += count
    return [median(value[2:]) for value in times]  # the first ones learn the form


def _copies(storage: HostStorage, copy: Copy, count: int) -> list[float]:
    """The nanoseconds of copying so many experts, which are others in each call."""
    times = []
    for i in range(2 * _REPEATS):
        start = time.perf_counter_ns()
        copy(i * count % max(1, storage.experts - count + 1), min(count, storage.experts))
        times.append(float(time.perf_counter_ns() - start))
    return times[1:]


def _beside(storage: HostStorage, requester: Requester, copy: Copy) -> tuple[float, float]:
    """Nanoseconds of a copy and of the CPU's products of an expert while both run."""
    end, copies = threading.Event(), list[float]()

    def work() -> None:
        while not end.is_set():
            copies.extend(_copies(storage, copy, _some(storage)))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        try:
            _, cpu = _line(storage, requester)
        finally:
            end.set()
        other.result()  # raises what went wrong there
    return median(copies) / _some(storage), cpu


def _ns(amount: float, rate: float) -> int:
    return max(1, round(amount * 1e9 / rate))
