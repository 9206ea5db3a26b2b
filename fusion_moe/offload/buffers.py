"""Buffers of a device through which experts go in steps that read whole layers: three in which
they arrive, as they are on the host, while others are multiplied by; and one in which products read
all of a layer, those in slots too, in the layout of kernels.

    buffers = Buffers(layer)                # for all layers of one form
    with buffers.hold(layer, {3, 5}) as weights:
        ...                                 # launches on the current stream that read `weights`

Layers are fetched ahead in the order in which they were used before. Which one follows depends on
where a layer was reached from: forward and backward go opposite ways. Where they turn, the last
three layers are not copied again: one is multiplied by, the others stay where they arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..runtime.turns import Turns
from .device import Device, HostStorage, runs

_AHEAD = 3  # layers that are on their way: what forward waits for, backward has time for


class Layer(Protocol):
    """What buffers read of a layer (`experts.OffloadedExperts`)."""

    device: Device
    storage: HostStorage

    @property
    def key(self) -> tuple[int, int]:
        """The layer's number, and the version of its weights."""

    def unchanging(self) -> Any:
        """A context in which the same experts stay in slots."""


@dataclass(frozen=True)
class _Arrival:
    """Where experts arrive, and what puts some of them to where products read them."""

    tensors: Mapping[str, Tensor]
    unpack: Callable[[int, int], None]


@dataclass(frozen=True)
class _Arriving:
    """Experts of a layer that are being copied, or were. done: the event after which they are
    there, on a GPU, or what went wrong.
    """

    key: tuple[int, int]
    experts: Sequence[int]
    at: _Arrival
    done: Future[Any]

    def is_of(self, key: tuple[int, int]) -> bool:
        """Whether they are a layer's, and are there or will be."""
        return self.key == key and self.done.exception() is None


class Buffers:
    """For layers like one, on its device. Each has room for all experts of a layer."""

    @torch.inference_mode(False)  # later calls, in whatever mode, write there
    def __init__(self, layer: Layer):
        device, storage = layer.device, layer.storage
        self._weights = storage.empty(storage.experts, device.on)
        self._free = list[_Arriving]()  # with what arrived there last; the first since longest
        for _ in range(_AHEAD):
            tensors = storage.empty(storage.experts, device.on)
            at = _Arrival(tensors, device.unpacker(tensors, self._weights))
            self._free.append(_Arriving((-1, -1), (), at, Future()))
        # by `copies_itself`: pieces of files, which come one by one, do not queue behind others
        self._sides = {
            by_itself: torch.cuda.Stream(device.on)
            for by_itself in (False, True)
            if device.on.type == "cuda"
        }
        self._thread = ThreadPoolExecutor(1)  # for layers whose devices do not copy by themselves
        self._turns = Turns(device.on)
        self._arriving = list[_Arriving]()  # in this order
        self._key: tuple[int, int] | None = None  # of the layer in `weights`, of which
        self._there: set[int] = set()  # these experts are there
        self._path: tuple[Layer | None, ...] = (None, None)  # the last two layers
        self._next: dict[tuple[Layer | None, ...], Layer] = {}
        self._slots: dict[int, tuple[Tensor, Callable[[], None]]] = {}  # by a layer's number

    @contextlib.contextmanager
    def hold(self, layer: Layer, named: Collection[int]) -> Iterator[Mapping[str, Tensor]]:
        """The weights of a layer, with these experts at least, for launches on the current stream.
        After an error no later call takes for whole what is half copied.
        """
        with self._turns.next():
            if layer is not self._path[1]:
                self._next[self._path] = layer
                self._path = self._path[1], layer
            self._fill(layer, {*named})
            if len(named) == layer.storage.experts:
                self._fetch_ahead()
            yield self._weights

    def _fill(self, layer: Layer, named: set[int]) -> None:
        if self._key != layer.key:
            self._key, self._there = layer.key, set()
        while missing := named - self._there:
            while self._arriving and not self._arriving[0].is_of(layer.key):
                self._drop()
            if not self._arriving:
                self._fetch(layer, missing)
            self._settle(layer)

    def _fetch_ahead(self) -> None:
        path, fetched = self._path, [arriving.key for arriving in self._arriving]
        while self._free and (following := self._next.get(path)):
            if all(following.key != arriving.key for arriving in self._arriving):
                self._fetch(following, range(following.storage.experts))
            elif not fetched or following.key != fetched.pop(0):
                return  # it stays where it arrives, or the order is another by now
            path = path[1], following

    def _fetch(self, layer: Layer, experts: Collection[int]) -> None:
        """Begins to copy those of the experts that are in no slot, after all that was launched,
        also on other streams, unless they are where they arrived before.
        """
        in_slots = layer.device.expert_map.tolist()
        away = [e for e in sorted(experts) if in_slots[e] < 0]
        for i, before in enumerate(self._free):
            if before.is_of(layer.key) and {*away} <= {*before.experts}:
                self._arriving.append(self._free.pop(i))
                return
        at, sides = self._free.pop(0).at, self._sides.values()
        streams = [*sides, torch.cuda.current_stream(layer.device.on)] if sides else []
        launched = [stream.record_event() for stream in streams]
        if not layer.device.copies_itself:
            done = self._thread.submit(self._copy, layer, away, at, launched)
        else:
            done = Future[Any]()
            try:
                done.set_result(self._copy(layer, away, at, launched))
            except Exception as error:  # for who reads them, if anybody does
                done.set_exception(error)
        self._arriving.append(_Arriving(layer.key, away, at, done))

    def _copy(
        self,
        layer: Layer,
        experts: Sequence[int],
        at: _Arrival,
        launched: Sequence[torch.cuda.Event],
    ) -> Any:
        side = self._sides.get(layer.device.copies_itself)
        with torch.cuda.stream(side) if side else contextlib.nullcontext():
            for event in launched:  # here, since the thread may still copy for a layer before
                torch.cuda.current_stream().wait_event(event)
            layer.device.fetch(experts, at.tensors)
            return side.record_event() if side else None

    def _drop(self) -> _Arriving:
        """The first that arrive, when they are there or have failed; their place is free."""
        arriving = self._arriving.pop(0)
        arriving.done.exception()
        self._free.append(arriving)
        return arriving

    def _settle(self, layer: Layer) -> None:
        """Puts what has arrived, and what is in slots, to where products read it."""
        arriving = self._drop()
        event = arriving.done.result()
        if self._sides:
            torch.cuda.current_stream(layer.device.on).wait_event(event)
        layer.device.complete(arriving.at.tensors)
        for i, j in runs(arriving.experts):
            arriving.at.unpack(arriving.experts[i], j - i)
        with layer.unchanging():
            in_slots = self._from_slots(layer)
        torch.autograd.graph.increment_version([*self._weights.values()])  # kernels wrote
        self._there |= {*arriving.experts, *in_slots.tolist()}

    def _from_slots(self, layer: Layer) -> Tensor:
        """Copies the experts that are in slots, on the device; returns which ones."""
        expert_map = layer.device.expert_map
        there, before = (expert_map >= 0).nonzero().flatten(), self._slots.get(layer.key[0])
        if not len(there):
            return there  # nothing to launch
        if before is None or not before[0].equal(expert_map):
            place = layer.device.from_slots(expert_map[there].long(), there, self._weights)
            before = self._slots[layer.key[0]] = expert_map.clone(), place
        before[1]()
        return there


def needed(layer: Layer) -> int:
    """Bytes of the buffers for layers like one."""
    return (1 + _AHEAD) * layer.storage.experts * layer.storage.nbytes
