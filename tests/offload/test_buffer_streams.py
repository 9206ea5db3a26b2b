"""The order of what `Buffers` launches on a GPU's streams, without a GPU: vector clocks of streams
say for each access of a buffer whether all accesses that it must come after have ended.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_moe.offload.buffers import Buffers
from fusion_moe.runtime import cuda

E = 8


class Stream:
    """Stands for torch.cuda.Stream. clock: of each stream, how many of its launches have ended
    before the next one here begins. races: of all streams, those that were seen.
    """

    races: list[Memory]

    def __init__(self, device: Any = None):
        self.device, self.clock, self.launched = device, dict[Stream, int](), 0

    def launch(self, reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> None:
        self.launched += 1
        self.clock[self] = self.launched
        for memory in reads:
            memory.access(self, memory.written, memory.read)
        for memory in writes:
            memory.access(self, memory.written | memory.read, memory.written)

    def record_event(self) -> dict[Stream, int]:
        return dict(self.clock)

    def wait_event(self, event: Mapping[Stream, int]) -> None:
        self.clock = latest(self.clock, event)

    def wait_stream(self, other: Stream) -> None:
        self.clock = latest(self.clock, other.clock)


def latest(a: Mapping[Stream, int], b: Mapping[Stream, int]) -> dict[Stream, int]:
    return {s: max(a.get(s, 0), b.get(s, 0)) for s in {**a, **b}}


class Memory(dict[str, Tensor]):
    """A buffer of a layer's experts: which layer's number each one is; and its accesses."""

    def __init__(self):
        super().__init__(weight=torch.zeros(E))
        self.written, self.read = dict[Stream, int](), dict[Stream, int]()

    def access(self, by: Stream, after: Mapping[Stream, int], to: dict[Stream, int]) -> None:
        if any(by.clock.get(stream, 0) < count for stream, count in after.items()):
            by.races.append(self)
        to[by] = by.launched


class Gpu(str):
    """What says of itself that it is a GPU, and to torch "cpu"."""

    type = "cuda"


class Layer:
    """What `Buffers` asks of a layer, of its device and of its storage."""

    nbytes, on, experts = 1, Gpu("cpu"), E

    def __init__(self, number: int, slots: int, copies_itself: bool):
        self.key, self.copies_itself, self.device, self.storage = (
            (number, 0),
            copies_itself,
            self,
            self,
        )
        self.expert_map = torch.arange(E).where(torch.arange(E) < slots, -1)
        self.slots = {"weight": torch.full((E,), float(number))}

    def unchanging(self) -> Any:
        return contextlib.nullcontext()

    def empty(self, count: int, device: Any) -> Memory:
        return Memory()

    def fetch(self, experts: Sequence[int], arrival: Memory) -> None:
        asked = threading.current_thread() is threading.main_thread()
        assert asked == self.copies_itself  # nobody waits while a host reads
        torch.cuda.current_stream().launch(writes=[arrival])
        arrival["weight"][[*experts]] = float(self.key[0])

    def unpacker(self, arrival: Memory, weights: Memory) -> Callable[[int, int], None]:
        def unpack(first: int, count: int) -> None:
            torch.cuda.current_stream().launch(reads=[arrival], writes=[weights])
            weights["weight"][first : first + count] = arrival["weight"][first : first + count]

        return unpack

    def from_slots(self, slots: Any, experts: Any, weights: Memory) -> Callable[[], None]:
        def place() -> None:
            torch.cuda.current_stream().launch(writes=[weights])
            weights["weight"][experts] = self.slots["weight"][slots]

        return place

    def complete(self, arrival: Memory) -> None:
        torch.cuda.current_stream().launch(writes=[arrival])


@pytest.fixture
def streams(monkeypatch):
    """Of torch, with a default one for all threads."""
    monkeypatch.setattr(Stream, "races", [], raising=False)
    main, current = Stream(), threading.local()

    @contextlib.contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        before, current.stream = current_stream(), stream or current_stream()
        try:
            yield
        finally:
            current.stream = before

    def current_stream(device: Any = None) -> Stream:
        return getattr(current, "stream", main)

    for name, stands in {"Stream": Stream, "stream": on, "current_stream": current_stream}.items():
        monkeypatch.setattr(torch.cuda, name, stands)
    monkeypatch.setattr(cuda, "capturing", bool)
    return on


def multiply(buffers: Buffers, layer: Layer, named: Collection[int]) -> None:
    """A product, which finds its own weights."""
    with buffers.hold(layer, named) as weights:
        torch.cuda.current_stream().launch(reads=[weights])
        assert weights["weight"][[*named]].eq(layer.key[0]).all()


def train(streams: Any, seed: int) -> None:
    """Steps of a model, with or without checkpoints, on one stream or two, in one order or many."""
    drawn = random.Random(seed)
    slots, other, by_itself = drawn.choice((0, 2, E)), Stream(), drawn.choice((0, 0.5, 1))
    layers = [Layer(i + 1, slots, drawn.random() < by_itself) for i in range(drawn.randint(1, 7))]
    buffers = Buffers(layers[0])
    for _ in range(drawn.randint(1, 5)):
        if drawn.random() < 0.2:
            drawn.shuffle(layers)
        again, few = drawn.random() < 0.4, drawn.random() < 0.25
        named = {
            layer: drawn.sample(range(E), drawn.randint(1, E)) if few else range(E)
            for layer in layers
        }
        on = drawn.choice((None, None, other))
        uses = [layer for layer in reversed(layers) for _ in range(1 + again)]
        with streams(on):
            for layer in (*layers, *uses):
                multiply(buffers, layer, named[layer])


def test_no_launch_reads_or_writes_what_another_still_uses(streams):
    for seed in range(100):
        train(streams, seed)
    assert not Stream.races


@pytest.mark.parametrize("wait", ["wait_event", "wait_stream"])
def test_each_wait_is_needed(streams, wait, monkeypatch):
    monkeypatch.setattr(Stream, wait, lambda *args: None)
    for seed in range(20):
        train(streams, seed)
    assert Stream.races
