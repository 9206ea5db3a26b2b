"""What a step takes on a GPU beside experts: to find out what is missing, to hand rows over to the
CPU and to wait for them, to begin copies. Measured with small experts, and a program of the CPU
that makes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from ..runtime.faults import synchronize
from ..runtime.host_memory import pages
from . import launches
from .cuda import large_of, layout_of, shapes_of
from .device import HostStorage
from .launches import Kernel, Parts, Shape
from .moves import COPYING, Moves, Shared
from .pinned import Pinned, pinned
from .worker import nothing

_EXPERTS, _BYTES = 64, 2**16  # a microsecond's over PCIe
_STEPS, _REPLAYS = 20, 15
_NEVER = 10**10  # nanoseconds


class Turnaround:
    """A layer of experts without products. copies: whether misses are copied, else the CPU has
    them.
    """

    def __init__(self, device: torch.device, features: int, tokens: int, k: int, copies: bool):
        shared = Shared(tokens * k, features, torch.bfloat16, device)
        programs = shared.model.programs([(tokens * k, nothing(tokens * k))])
        self.storage = Pinned(pages.empty((_EXPERTS, _BYTES), torch.uint8).zero_())
        slots = torch.zeros(_EXPERTS + k, _BYTES, dtype=torch.uint8, device=device)
        parts = Parts([Shape.of(self.storage.tensor)], [self.storage.address], [slots])
        costs = [_NEVER, *[0] * 7] if copies else [*[0] * 4, _NEVER, 0, 0, 0]
        layer = shared.model.layer(programs, [])
        self.moves = Moves(parts, _EXPERTS, _EXPERTS, k, costs, shared, layer)
        self.x = torch.zeros(tokens, features, dtype=torch.bfloat16, device=device)
        self.y = torch.zeros(tokens * k, features, dtype=torch.bfloat16, device=device)
        self.slot_of = torch.arange(tokens * k, dtype=torch.int32, device=device).view(tokens, k)
        self.device, self.shape = device, (tokens, k)

    def nanoseconds(self, rows: int) -> float:
        """Of a step in a CUDA graph, so many rows of which are of an expert that is not there."""
        table = torch.arange(_EXPERTS, dtype=torch.int32)
        table[0] = -1
        self.moves.publish(table)
        ids = torch.ones(self.shape, dtype=torch.int64, device=self.device)
        ids.flatten()[:rows] = 0

        def steps() -> None:
            for _ in range(_STEPS):
                self.moves.begin(self.x, ids)
                self.y.zero_()  # as products would, between them
                self.moves.end(self.y, self.slot_of)

        steps()
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        value = median(_times(graph.replay)) / _STEPS
        synchronize()
        return value


class Copier:
    """copier(first, count): copies experts of a host storage to the GPU by kernels, as steps do,
    and waits. most: how many at once.
    """

    def __init__(self, device: torch.device, storage: HostStorage, most: int):
        self.device, self.storage, self.most = device, storage, most
        self._load: Kernel | None = None

    def __call__(self, first: int, count: int) -> None:
        """Copies the experts from `first` on."""
        with torch.cuda.device(self.device):
            if self._load is None:
                self._begin()
                self._load = Kernel(launches.load(), COPYING)
            stream = torch.cuda.current_stream()
            self._load(stream.cuda_stream, [first, 0, count, self._parts.address, 0])
            stream.synchronize()

    def _begin(self) -> None:
        shapes = shapes_of(self.storage, layout_of(self.storage, self.device))
        large, slots = large_of(self.storage), self.storage.empty(self.most, self.device)
        self._stored = [
            pinned(t) if name in large else Pinned(t.to(self.device), pin=False)
            for name, t in self.storage.tensors.items()
        ]
        addresses = [storage.address for storage in self._stored]
        self._parts = Parts([*shapes.values()], addresses, [*slots.values()])


def starts(device: torch.device) -> tuple[int, int]:
    """Nanoseconds to hand a row over and to wait for it, and to copy a small expert."""
    results = []
    with torch.cuda.device(device):
        for copies in (False, True):
            one = Turnaround(device, 4096, 1, 8, copies)
            results.append(max(1000, int(one.nanoseconds(1) - one.nanoseconds(0))))
    return results[0], results[1]


def _times(run: Callable[[], object]) -> list[float]:
    """Nanoseconds on the GPU."""
    results = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        results.append(begin.elapsed_time(end) * 1e6)
    return results
