"""How fast this machine reads memory, a bound for all kernels that read it. Measured once for a
number of threads, and kept on disk.

    memory = bandwidth.of(threads=2)        # takes about a second the first time
    memory.bytes_per_second, memory.by
    memory.reader(t)()                      # reads one tensor or several in the same way
    bandwidth.evict(t)                      # the next read comes from memory, not from a cache

bandwidth.cpp does the reading, prefetching as far ahead as is fastest on this machine; without a
compiler, a torch reduction reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from ...errors import BuildError
from .. import build, isa, store
from . import pages

_AHEAD = (0, 512, 1024, 2048, 4096, 8192)  # bytes
_REPEATS = 31
_SOURCE = Path(__file__).with_suffix(".cpp")


@dataclass(frozen=True)
class Bandwidth:
    """bytes_per_second: when reading a `pool` with `threads` threads. by: what did the reading.

    ahead: how many bytes ahead it prefetches; None: torch reads.
    """

    bytes_per_second: float
    threads: int
    by: str
    ahead: int | None = None

    def reader(self, *tensors: Tensor) -> Callable[[], None]:
        """A function that reads contiguous CPU tensors, each a whole number of 8 bytes, divided
        evenly between the threads; they must live until it is called.
        """
        if self.ahead is None:
            return partial(_reduce, tensors, self.threads)
        addresses = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        sizes = (ctypes.c_longlong * len(tensors))(*[t.nbytes for t in tensors])
        return partial(
            _library().read_words, addresses, sizes, len(tensors), self.threads, self.ahead
        )

    def now(self, memory: Tensor) -> float:
        """Bytes per second, by the median of three reads of a tensor."""
        return memory.nbytes / median(self.times(memory, 3))

    def times(self, memory: Tensor, count: int) -> list[float]:
        """The seconds of `count` reads of a tensor, in increasing order."""
        results, read = [], self.reader(memory)
        for _ in range(count):
            start = time.perf_counter()
            read()
            results.append(time.perf_counter() - start)
        return sorted(results)


@cache
def of(threads: int) -> Bandwidth:
    """The read bandwidth of this machine: measured in this process, or stored by an earlier one."""
    where = cpu(), str(cpus())
    key = store.key_of(
        Path(__file__).read_bytes(), _SOURCE.read_bytes(), *where, str(threads), _why_not_cpp()
    )

    def make(path: Path) -> None:
        path.write_text(json.dumps(asdict(_measured(threads))))

    return Bandwidth(**json.loads(store.get_or_make(f"bandwidth-{key}.json", make).read_text()))


def evict(*tensors: Tensor) -> None:
    """Evicts CPU tensors from the CPU's caches: by bandwidth.cpp, or by reading enough other memory
    to replace them.
    """
    threads = torch.get_num_threads()
    if _why_not_cpp() or not all(
        _library().evict(memory.data_ptr(), memory.nbytes(), threads)
        for memory in map(Tensor.untyped_storage, tensors)
    ):
        _reduce([_kept_pool()], threads)


def pool() -> Tensor:
    """u8: memory that exceeds all caches, written once, placed like weights."""
    return pages.empty((min(max(2**28, 4 * _cache_bytes()), 2**30),), torch.uint8).fill_(1)


def cpu() -> str:
    """The name of this CPU, as Linux reports it."""
    facts = isa.cpuinfo()
    name = facts.get("model name", platform.machine())
    numbers = [
        f"{key} {facts[key]}"
        for key in ("cpu family", "model", "CPU implementer", "CPU part")
        if key in facts
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def cpus() -> int:
    """How many CPUs the threads of this process may use. If OpenMP binds threads, this thread's
    affinity is only the CPU of its binding.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(allowed or 1, torch.get_num_threads())


def _measured(threads: int) -> Bandwidth:
    memory = pool()
    ways = (None,) if _why_not_cpp() else _AHEAD
    ahead = max(ways, key=lambda ahead: Bandwidth(0, threads, "", ahead).now(memory))
    where = f"{memory.nbytes >> 20} MiB, {pages.obtained(memory) >> 20} MiB of them on large pages"
    how = (
        f"torch's amax: {_why_not_cpp()}"
        if ahead is None
        else f"C++, prefetching {ahead} bytes ahead"
    )
    bandwidth = Bandwidth(0, threads, f"{how}; {where}", ahead)
    # Other programs slow down most reads, and this number is stored; but a single read can be
    # faster than the memory is over a longer time.
    return replace(
        bandwidth,
        bytes_per_second=memory.nbytes / bandwidth.times(memory, _REPEATS)[_REPEATS // 10],
    )


@cache
def _library() -> ctypes.CDLL:
    """bandwidth.cpp, compiled for the best ISA level of this machine, whatever cpu_isa says: memory
    does not get slower by that option.
    """
    library = build.load(
        _SOURCE.read_text(encoding="utf-8"), name="bandwidth", isa_level=isa.available()[0]
    )
    library.read_words.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_longlong,
    ]
    library.read_words.restype = ctypes.c_uint64
    library.evict.argtypes = [ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int]
    return library


@cache
def _why_not_cpp() -> str:
    """Why C++ cannot do the reading; "" if it can."""
    try:
        _library()
    except BuildError as error:
        return error.found
    return ""


@cache
def _kept_pool() -> Tensor:
    return pool()


def _reduce(tensors: Sequence[Tensor], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for t in tensors:
            t.view(-1).view(torch.float64).amax()
    finally:
        torch.set_num_threads(before)


def _cache_bytes() -> int:
    """The sum of all last-level caches, as Linux reports it; 0 if it does not."""
    results = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        results[(folder / "shared_cpu_list").read_text()] = (
            int((folder / "size").read_text().strip().rstrip("K")) * 1024
        )
    return sum(results.values())
