"""Rows of groups, counted by launches: by Python's, by C++'s (native.cpp), and by those of a CUDA
graph that was captured meanwhile. The memory stays where it is, and nothing waits for a device
before `Counts.read`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime import cuda, native, nvrtc

CAPACITY = 1024  # calls of a layer that are kept one by one
IGNORED, COUNTED, OF_PYTHON = range(3)  # as in native.cpp
_THREADS = 256
_SOURCE = Path(__file__).with_name("count.cu")
_kept: list[Any] = []  # what graphs and C++ may write to or read as long as the process lives


@dataclass(frozen=True)
class Counted:
    """calls: how many; totals i64[G]: rows of each group in all of them; rows i32[n, G], times
    i64[n]: of the last n, in order, with the time of each in ns, by the GPU's clock if of_gpu.
    """

    calls: int
    totals: Tensor
    rows: Tensor
    times: Tensor
    of_gpu: bool


class Counts:
    """Counts the rows of each group in the calls of a layer, on the device that runs it."""

    @torch.inference_mode(False)  # later calls, in whatever mode, add to these
    def __init__(self, groups: int, device: torch.device):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.groups, self.device, self.capacity = groups, device, CAPACITY
        self.calls, self.times, self.totals = zeros(1), zeros(CAPACITY), zeros(groups)
        self.rows = zeros(CAPACITY, groups, dtype=torch.int32)
        _kept.append(self)
        if device.type == "cuda":
            kernel()  # which a capture could not load

    @property
    def numbers(self) -> list[int]:
        """The sizes and addresses of this layer's counters, in the order of the fields of
        native.cpp's `Layer` after `how`.
        """
        arrays = self.calls, self.times, self.totals, self.rows
        return [self.groups, self.capacity, *(t.data_ptr() for t in arrays)]

    def add(self, ends: Tensor) -> None:
        """Counts one call, whose groups end at ends i32[G]."""
        if self.device.type == "cuda":
            layer = (ctypes.c_longlong * 8)(0, COUNTED, *self.numbers)
            first = ctypes.c_void_p(ends.data_ptr())
            argument = (ctypes.c_void_p * 2)(ctypes.addressof(first), ctypes.addressof(layer))
            kernel()[1](cuda.stream(ends.device), ctypes.addressof(argument))
            return
        n = int(self.calls) % self.capacity
        rows = ends.diff(prepend=ends.new_zeros(1))
        self.rows[n], self.times[n] = rows, time.time_ns()
        self.totals += rows
        self.calls += 1

    def read(self) -> Counted:
        """What was counted so far; waits for the device."""
        calls = int(self.calls)
        first = calls % self.capacity if calls > self.capacity else 0
        rows, times = (t.cpu().roll(-first, 0)[:calls] for t in (self.rows, self.times))
        return Counted(calls, self.totals.cpu(), rows, times, self.device.type == "cuda")


def count(layers: Mapping[int, tuple[int, Counts | None]]) -> None:
    """Has C++ count the calls of layers. layers: by the address of a weight, how its calls are
    counted, and in what.
    """
    there = any(counts and counts.device.type == "cuda" for _, counts in layers.values())
    numbers = [int(kernel()[0]) if there else 0, len(layers)]
    for weight, (how, counts) in layers.items():
        numbers += [weight, how, *(counts.numbers if counts else [0] * 6)]
    _kept.append(table := (ctypes.c_longlong * len(numbers))(*numbers))
    native.record(ctypes.addressof(table))


@cache
def kernel() -> tuple[Any, Any]:
    """The kernel that counts on GPUs, and its launch."""
    function = cuda.load(cubin(cuda.arch(torch.cuda.current_device()).nvrtc), "count", 0)
    return function, cuda.Launch(function, 1, _THREADS, 0, programmatic_launch=False)


def cubin(arch: str) -> Path:
    """The path of the machine code of count.cu for an architecture."""
    text = _SOURCE.read_text(encoding="utf-8")
    return nvrtc.build(text, name="count", arch=arch, headers=nvrtc.Headers())
