"""What a step does on a GPU beside its programs: finds misses and decides about them, copies
experts and hands rows over to the worker, in one kernel; awaits them and sums, in another one. All
on one stream, without a host or a wait where nothing is missing; a CUDA graph can capture it.

    shared = Shared(capacity, row_bytes)                # of a model
    moves = Moves(parts, cached, constants, shared, layer, experts, device)
    placed = moves.begin(x, ids, w)                     # i32[T, k]: slots
    y, slot_of = ...                                    # rows of experts that are there by now
    sums = moves.end(y, slot_of, w)                     # of these and of the others' rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from ..errors import BuildError, DtypeError, ShapeError
from ..runtime import cuda
from ..runtime.faults import Faults
from ..runtime.turns import Turns
from . import launches
from .launches import Kernel, Parts
from .pinned import Staging
from .worker import Model, Worker, request_buffers

COPYING, HANDING = 16, 8  # blocks: so many reach what PCIe has
PUTTING, UNPACKING = 1024, 256
LIMIT = 10.0  # seconds after which the worker is given up
# Counts of kernels/step.cuh
_COUNTS = "steps", "hits", "copied_rows", "computed_rows", "copied", "computed", "waited"


class Shared:
    """A request ring and the memory of rows beside it, which the layers of one model use in turn.

    capacity: rows of a step that the worker may compute, at most, each of `features` numbers of a
    dtype. limit: seconds.
    """

    def __init__(
        self,
        capacity: int,
        features: int,
        dtype: torch.dtype,
        device: torch.device,
        limit: float = LIMIT,
    ):
        self.capacity, self.dtype, self.device, self.limit = capacity, dtype, device, limit
        self.features = features
        self.staging = Staging(request_buffers(capacity, features * dtype.itemsize))
        self.turns = Turns(device)
        self.model: Model = Worker.of_process().model(self.staging)
        self.exchange = torch.zeros(4, dtype=torch.int64, device=device)  # of kernels/step.cuh

    @property
    def buffers(self) -> list[int]:
        """The addresses of the shared buffers, in the order of `RequestBuffers` of
        kernels/handover.cuh.
        """
        return [self.staging.addresses[name] for name in request_buffers(0, 0)]


class Moves:
    """One layer's. parts: of its experts; cached, spare: slots; layer: the worker's number of it.

    costs: the numbers of `Constants`. tables i32[2, E]: the slot of each expert, or -1; version
    i32[1]: which of both a step reads.
    """

    def __init__(
        self,
        parts: Parts,
        experts: int,
        cached: int,
        spare: int,
        costs: Sequence[int],
        shared: Shared,
        layer: int,
    ):
        device = parts.slots[0].device
        self.parts, self.shared, self.layer, self.device = parts, shared, layer, device
        self.experts, self.cached, self.spare, self._costs = experts, cached, spare, [*costs]

        def zeros(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        self.tables = torch.full((2, experts), -1, dtype=torch.int32, device=device)
        self._version, self._table = 0, torch.full((experts,), -1, dtype=torch.int32)
        self.version, self.uses = zeros(1), zeros(experts)
        self._counts = zeros(1 + len(_COUNTS), torch.int64)
        self._handed, self._placed = zeros(shared.capacity), zeros(shared.capacity)
        self._faults = Faults("a step of offloaded experts")
        self._faults.prepare(device.index)
        self._fault = 0  # where the step reports that was begun
        self._kernels: dict[object, Kernel] = {}
        self._load, self._put, self._unpack  # noqa: B018  # nothing is compiled while a GPU waits

    def begin(self, x: Tensor, ids: Tensor, w: Tensor | None = None) -> Tensor:
        """The slots of ids, -1 for none: experts that missed are copied or handed over.

        x [T, H], ids int[T, k] contiguous; w [T, k]: what rows are weighted with, if inputs are.
        ShapeError for more rows than `shared` has room for.
        """
        if ids.numel() > self.shared.capacity:
            raise ShapeError(
                f"{ids.numel()} rows of experts in a step",
                expected=f"at most {self.shared.capacity}",
                where="offload",
            )
        if x.dtype != self.shared.dtype or x.shape[1] != self.shared.features:
            raise DtypeError(
                f"x is {x.dtype}[T, {x.shape[1]}]",
                expected=f"{self.shared.dtype}[T, {self.shared.features}]",
                where="offload",
            )
        stream = cuda.stream(self.device)
        fault = self._fault = self._faults.word(self.device.index, stream)
        dtype = torch.float32 if w is None else w.dtype
        step = self._step
        numbers = [COPYING, self.parts.address]
        numbers += [ids.numel(), self.experts, self.cached, self.spare, ids.data_ptr()]
        numbers += [self.tables.data_ptr(), self.version.data_ptr(), *step, *self._costs, fault]
        numbers += [ids.shape[1], x[0].nbytes, self.layer, x.data_ptr(), ids.data_ptr()]
        numbers += [0 if w is None else w.data_ptr(), *step, *self.shared.buffers]
        self._begin(ids.dtype, dtype)(stream, numbers)
        return self._placed[: ids.numel()].view(ids.shape)

    def end(self, y: Tensor, slot_of: Tensor, w: Tensor | None = None) -> Tensor:
        """The sums [T, H] of y [T * k, H] with slot_of i32[T, k], weighted with w [T, k] if given:
        when the rows are there that the worker computes. After `begin` and another kernel.
        """
        stream, (tokens, slots) = cuda.stream(self.device), slot_of.shape
        sums, at = y.new_empty(tokens, y.shape[1]), 0 if w is None else w.data_ptr()
        numbers = [tokens, int(self.shared.limit * 1e9), slot_of.data_ptr(), at]
        numbers += [
            y.data_ptr(),
            sums.data_ptr(),
            *self._step,
            *self.shared.buffers,
            self._fault,
        ]
        dtype = torch.float32 if w is None else w.dtype
        pieces = tokens * y[0].nbytes // 16
        self._end(dtype, slots)(stream, numbers, blocks=-(-pieces // launches.SUMMING))
        return sums

    def put(self, computed: Tensor, ends: Tensor, rows: Tensor, y: Tensor, slot_of: Tensor) -> None:
        """Puts the rows of `computed` that are before the last end to their places in y: rows says
        where those of ids are, slot_of where they belong.
        """
        numbers = [computed[0].nbytes, rows.numel(), len(ends)]
        arrays = ends, rows, slot_of, computed, y
        self._put(cuda.stream(self.device), [*numbers, *[t.data_ptr() for t in arrays]])

    def publish(self, expert_map: Tensor) -> None:
        """Writes the table that is not in use, on the current stream, and has steps use it from
        then on.
        """
        self._version = 1 - self._version
        self.tables[self._version].copy_(expert_map)
        self.version.fill_(self._version)
        self._table = expert_map.clone()

    def table(self) -> Tensor:
        """A copy of the table that was published last, on the CPU."""
        return self._table.clone()

    def load(self, slot: int, expert: int) -> None:
        """Copies an expert into a slot, on the current stream, by as few blocks as PCIe needs."""
        self._load(cuda.stream(self.device), [expert, slot, 1, self.parts.address, 0])

    def unpack(self, copies: Parts, first: int, slot: int, count: int) -> None:
        """Puts copies that are on the GPU as they are on the host into slots, from this one on."""
        self._unpack(cuda.stream(self.device), [first, slot, count, copies.address, 0])

    def place(self, parts: Parts, pairs: Tensor) -> None:
        """Copies what is on the GPU of experts to slots: pairs i32[2, n] has both."""
        numbers = [0, 0, pairs.shape[1], parts.address, pairs.data_ptr()]
        self._unpack(cuda.stream(self.device), numbers)

    def counted(self) -> dict[str, int]:
        """What steps did so far. Waits for them."""
        return dict(zip(_COUNTS, self._counts[1:].tolist(), strict=True))

    @property
    def _step(self) -> list[int]:
        of_layer = self._counts, self._placed, self._handed, self.uses
        return [t.data_ptr() for t in (self.shared.exchange, *of_layer)]

    def _begin(self, *dtypes: torch.dtype) -> Kernel:
        shared = 4 * (3 * self.experts + 2 * self.shared.capacity)
        result = partial(Kernel, blocks=COPYING + HANDING, shared=shared, overlaps=True)
        return self._kernel(dtypes, lambda: result(launches.begin_step(*dtypes)))

    def _end(self, weights: torch.dtype, slots: int) -> Kernel:
        result = partial(Kernel, overlaps=True, threads=launches.SUMMING)
        form = self.shared.dtype, weights, slots, self.shared.features
        return self._kernel((weights, slots), lambda: result(launches.end_step(*form)))

    def _kernel(self, key: object, make: Callable[[], Kernel]) -> Kernel:
        if key not in self._kernels:
            if cuda.capturing():
                raise BuildError(
                    "a step of offloaded experts was not compiled before a CUDA graph is captured",
                    todo="call the model once before torch.cuda.graph",
                    where="offload",
                )
            with torch.cuda.device(self.device):
                self._kernels[key] = make()
        return self._kernels[key]

    @cached_property
    def _load(self) -> Kernel:
        with torch.cuda.device(self.device):
            return Kernel(launches.load(), COPYING)

    @cached_property
    def _unpack(self) -> Kernel:
        with torch.cuda.device(self.device):
            return Kernel(launches.load(), UNPACKING)

    @cached_property
    def _put(self) -> Kernel:
        with torch.cuda.device(self.device):
            return Kernel(launches.put_rows(), PUTTING)
