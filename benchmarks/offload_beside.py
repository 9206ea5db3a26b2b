"""How fast the CPU's experts are read while others are copied to the GPU, beside a loop that only
reads, for offload.py.

Both have the worker's threads and a layer's experts, beside the copies that fill a cache. The CPU
computes a row of each of as many experts as a token has, others in each call, and its time is the
worker's own; the loop reads all experts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import torch
from offload_layers import SPARE

from fusion_moe import synchronize
from fusion_moe.offload.device import Device
from fusion_moe.offload.requester import Requester
from fusion_moe.offload.worker import Worker
from fusion_moe.runtime.host_memory import bandwidth

_PAUSE = 0.02  # s, in which threads of the way before fall asleep
_TURNS, _CALLS, _READS = 5, 31, 3


@dataclass(frozen=True)
class Beside:
    """GB/s of the CPU's experts and of the loop, alone and beside copies; of copies beside each."""

    model: str
    threads: int
    experts: int  # of a call
    cpu: float
    loop: float
    cpu_beside: float
    loop_beside: float
    copies_beside_cpu: float
    copies_beside_loop: float

    @property
    def share(self) -> float:
        """Of what the loop reads beside copies."""
        return self.cpu_beside / self.loop_beside

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.experts} experts by {self.threads} threads: {self.cpu:.1f} GB/s, "
            f"a loop {self.loop:.1f}; beside copies {self.cpu_beside:.1f}, a loop "
            f"{self.loop_beside:.1f}, so {self.share:.2f} of it; copies beside them "
            f"{self.copies_beside_cpu:.1f}, {self.copies_beside_loop:.1f}"
        )


def beside(model: str, device: Device, of_token: int) -> Beside:
    """Of a layer all of whose experts are on the device, and SPARE free slots after them."""
    storage, threads = device.storage, Worker.of_process().threads
    requester = Requester(storage, torch.bfloat16)
    read = bandwidth.of(threads).reader(*storage.tensors.values())
    x, w = torch.ones(of_token, storage.features).bfloat16(), torch.ones(of_token, 1)
    ids = cycle(torch.arange(storage.experts // of_token * of_token).view(-1, of_token, 1))

    def cpu() -> float:
        before = requester.busy()
        if requester.computed(x, next(ids), w) is None:
            raise RuntimeError("the worker did not compute")
        return of_token * storage.nbytes / (requester.busy() - before)

    def loop() -> float:
        start = time.perf_counter_ns()
        read()
        return storage.experts * storage.nbytes / (time.perf_counter_ns() - start)

    found: dict[str, list[float]] = {}
    for _ in range(_TURNS):
        for name, run, count in (("cpu", cpu, _CALLS), ("loop", loop, _READS)):
            copied = found.setdefault(f"copies_beside_{name}", [])
            time.sleep(_PAUSE)
            run()
            found.setdefault(name, []).extend(run() for _ in range(count))
            with _copies(device, copied):
                found.setdefault(f"{name}_beside", []).extend(run() for _ in range(count))
    return Beside(model, threads, of_token, **{n: median(rates) for n, rates in found.items()})


@contextmanager
def _copies(device: Device, rates: list[float]) -> Iterator[None]:
    """A thread copies experts into slots that no table names. Adds its GB/s."""
    begun, end = threading.Event(), threading.Event()
    experts, nbytes = device.storage.experts, device.storage.nbytes
    numbers = cycle(range(experts))

    def work() -> float:
        count, start = 0, time.perf_counter_ns()
        try:
            while not end.is_set():
                for slot in range(experts, experts + SPARE):
                    device.load(slot, next(numbers))
                begun.set()
                device.publish(device.expert_map)  # the next ones wait for these
                count += SPARE
        finally:
            begun.set()
        synchronize()
        return count * nbytes / (time.perf_counter_ns() - start)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        begun.wait()
        try:
            yield
        finally:
            end.set()
        rates.append(other.result())
