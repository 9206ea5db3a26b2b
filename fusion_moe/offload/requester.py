"""Requests to the worker from a thread of the CPU, as kernels make them (cuda.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..definitions.operations import SPECS, bind
from ..messages import warn_once
from .cuda import host_program
from .device import HostStorage
from .pinned import Staging
from .worker import Worker, request_buffers

CAPACITY = 512  # rows that the worker gets at once; more are computed without it
LIMIT = 10.0  # seconds that it has for them


class Requester:
    """Rows of one layer, which the worker computes: they go through a request ring, as those of a
    GPU do, whose flags are all that its thread sees.
    """

    @torch.inference_mode(False)  # later calls, in whatever mode, write there
    def __init__(self, storage: HostStorage, dtype: torch.dtype):
        row = storage.features * dtype.itemsize
        self._model = Worker.of_process().model(Staging(request_buffers(CAPACITY, row), pin=False))
        tensors = self._model.staging.tensors
        self._rows, self._results = (
            tensors[name].view(dtype).view(CAPACITY, -1) for name in ("rows", "results")
        )
        self._ids = tensors["ids"].view(torch.int32).view(-1, 1)
        self._weights = tensors["weights"].view(torch.float32).view(-1, 1)
        results, inputs = [], list[Tensor]()
        for rows in (2**i for i in range(CAPACITY.bit_length())):
            taken = self._rows[:rows], self._ids[:rows], self._weights[:rows]
            call = bind(SPECS["fused_experts"], (), storage.arguments(*taken, storage.tensors))
            inputs = [*call.tensors.values()][3:]
            results.append((rows, host_program(call)))
        self._layer = self._model.layer(self._model.programs(results), inputs, storage.in_files)

    def computed(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor | None:
        """The rows [m, H] of x with one expert each; None, after a warning, if no answer comes."""
        m = len(x)
        for to, t in ((self._rows, x), (self._ids, ids), (self._weights, w)):
            to[:m] = t
        why = self._model.wait(self._model.submit(self._layer, m), LIMIT)
        if why:
            warn_once(f"offloaded experts are computed without their worker: {why}")
            return None
        return self._results[:m].clone()

    def busy(self) -> int:
        """Nanoseconds in which the worker computed, so far."""
        return self._model.busy(self._layer)
