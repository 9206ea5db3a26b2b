"""Layers that the worker computes: `register`, and requests from a thread of the CPU, as kernels
make them (cuda.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.cpu.join import Joined
from ..compile import program_of
from ..definitions.operations import SPECS, Call, bind
from ..errors import UnsupportedError
from ..ir.text import text
from ..messages import warn_once
from .device import HostStorage
from .pinned import Staging
from .steps import fusion_of_call
from .worker import Model, Worker, request_buffers

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
        self._inputs = _inputs(self._model, dtype, CAPACITY)
        self._results = self._model.staging.tensors["results"].view(dtype).view(CAPACITY, -1)
        self._layer = register(self._model, storage, dtype, CAPACITY)

    def computed(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor | None:
        """The rows [m, H] of x with one expert each; None, after a warning, if no answer comes."""
        m = len(x)
        for to, t in zip(self._inputs, (x, ids, w), strict=True):
            to[:m] = t
        why = self._model.wait(self._model.submit(self._layer, m), LIMIT)
        if why:
            warn_once(f"offloaded experts are computed without their worker: {why}")
            return None
        return self._results[:m].clone()

    def busy(self) -> int:
        """Nanoseconds in which the worker computed, so far."""
        return self._model.busy(self._layer)


def register(model: Model, storage: HostStorage, dtype: torch.dtype, capacity: int) -> int:
    """Registers a layer with the worker, and the programs of its storage for more and more rows, up
    to so many, each with one expert. Its number.
    """
    (x, ids, w), programs, weights = _inputs(model, dtype, capacity), [], list[Tensor]()
    powers = [2**i for i in range(capacity.bit_length()) if 2**i < capacity]
    for rows in (*powers, capacity):
        arguments = storage.arguments(x[:rows], ids[:rows], w[:rows], storage.tensors)
        call = bind(SPECS["fused_experts"], (), arguments)
        weights = weights or [*call.tensors.values()][3:]
        programs.append((rows, _program(call)))
    return model.layer(model.programs(programs), weights, storage.in_files)


def _inputs(model: Model, dtype: torch.dtype, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [capacity, H], ids i32 and w f32 [capacity, 1] of a model's staging memory."""
    tensors = model.staging.tensors
    ids, w = tensors["ids"].view(torch.int32), tensors["weights"].view(torch.float32)
    return tensors["rows"].view(dtype).view(capacity, -1), ids.view(-1, 1), w.view(-1, 1)


def _program(call: Call) -> list[int]:
    """The launch plan, for C++, of what the worker runs for a call of the operation on the CPU.
    UnsupportedError if there is no one call of C++ for it.
    """
    program = program_of(text(fusion_of_call(call)), torch.device("cpu"))
    tensors = [*call.tensors.values()]
    joined, sizes = program.joined, program.sizes(tensors, {})
    plan = joined.plan_in(sizes).numbers(tensors) if isinstance(joined, Joined) else None
    if plan is None:
        why = next((k.why for k in program.kernels if k.why), "a kernel is not in C++")
        raise UnsupportedError(
            f"these experts on the CPU: {why}",
            expected="experts that one call of C++ computes",
            where="offload",
        )
    return plan
