"""Two buffers of a device through which experts go in steps that read whole layers: one in which
they arrive, as they are on the host, while others are multiplied by; and one in which products read
all of a layer, those in slots too, in the layout of kernels.

    buffers = Buffers(layer)                # for all layers of one form
    with buffers.hold(layer, {3, 5}) as weights:
        ...                                 # launches on the current stream that read `weights`

Layers are fetched ahead in the order in which they were used before. Which one follows depends on
where a layer was reached from: forward and backward go opposite ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime.turns import Turns
from .device import runs

if TYPE_CHECKING:
    from .experts import OffloadedExperts


@dataclass(frozen=True)
class _Arriving:
    """Experts of a layer that are being copied. done: raises what went wrong."""

    key: tuple[int, int]
    experts: Sequence[int]
    done: Future[None]


class Buffers:
    """For layers like one, on its device. Each of both has room for all experts of a layer."""

    @torch.inference_mode(False)  # later calls, in whatever mode, write there
    def __init__(self, layer: OffloadedExperts):
        device, storage = layer.device, layer.storage
        self._arrival, self._weights = (storage.empty(storage.experts, device.on) for _ in "ab")
        self._unpack = device.unpacker(self._arrival, self._weights)
        self._side = torch.cuda.Stream(device.on) if device.on.type == "cuda" else None
        self._thread = None if device.copies_itself else ThreadPoolExecutor(1)
        self._turns = Turns(device.on)
        self._arriving: _Arriving | None = None
        self._key: tuple[int, int] | None = None  # of the layer in `weights`, of which
        self._there: set[int] = set()  # these experts are there
        self._path: tuple[OffloadedExperts | None, ...] = (None, None)  # the last two layers
        self._next: dict[tuple[OffloadedExperts | None, ...], OffloadedExperts] = {}
        self._slots: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by a layer's number

    @contextlib.contextmanager
    def hold(
        self, layer: OffloadedExperts, named: Collection[int]
    ) -> Iterator[Mapping[str, Tensor]]:
        """The weights of a layer, with these experts at least, for launches on the current stream.
        After an error no later call takes for whole what is half copied.
        """
        with self._turns.next():
            if layer is not self._path[1]:
                self._next[self._path] = layer
                self._path = self._path[1], layer
            self._fill(layer, {*named})
            following = self._next.get(self._path)
            if following and len(named) == layer.storage.experts:
                self._fetch(following, range(following.storage.experts))
            yield self._weights

    def _fill(self, layer: OffloadedExperts, named: set[int]) -> None:
        if self._key != layer.key:
            self._key, self._there = layer.key, set()
        while missing := named - self._there:
            self._fetch(layer, missing)
            self._settle(layer)

    def _fetch(self, layer: OffloadedExperts, experts: Collection[int]) -> None:
        """Begins to copy those of the experts that are in no slot, after all that was launched,
        unless some of this layer are on their way.
        """
        if self._arriving is not None:
            if self._arriving.key == layer.key:
                return
            self._arriving.done.exception()  # nobody reads them any more
        in_slots, self._arriving = layer.device.expert_map, None
        away = [e for e in sorted(experts) if in_slots[e] < 0]
        if self._side:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        done = Future[None]()
        if self._thread:
            done = self._thread.submit(self._copy, layer, away)
        else:
            done.set_result(self._copy(layer, away))
        self._arriving = _Arriving(layer.key, away, done)

    def _copy(self, layer: OffloadedExperts, experts: Sequence[int]) -> None:
        with torch.cuda.stream(self._side) if self._side else contextlib.nullcontext():
            layer.device.fetch(experts, self._arrival)

    def _settle(self, layer: OffloadedExperts) -> None:
        """Puts what has arrived, and what is in slots, to where products read it."""
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        arriving.done.result()
        if self._side:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        layer.device.complete(self._arrival)
        for i, j in runs(arriving.experts):
            self._unpack(arriving.experts[i], j - i)
        with layer.unchanging():
            in_slots = self._from_slots(layer)
        self._there |= {*arriving.experts, *in_slots.tolist()}

    def _from_slots(self, layer: OffloadedExperts) -> Tensor:
        """Copies the experts that are in slots, on the device; returns which ones."""
        device, expert_map = layer.device, layer.device.expert_map
        there = (expert_map >= 0).nonzero().flatten()
        before = self._slots.get(layer.key[0])
        if before is None or not before[0].equal(expert_map):  # a copy that waits
            to, slots = there.to(device.on), expert_map[there].long().to(device.on)
            before = self._slots[layer.key[0]] = expert_map.clone(), to, slots
        _, to, slots = before
        for name, t in device.slots.items() if len(there) else ():
            bytes_of, all_bytes = (u[..., None].view(torch.uint8) for u in (t, self._weights[name]))
            all_bytes.index_copy_(0, to, bytes_of.index_select(0, slots))
        return there
