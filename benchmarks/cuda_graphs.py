"""Times of calls in CUDA graphs, in which the host has no part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Captured(NamedTuple):
    """A graph of so many calls, of which the last returned `result`. keep: what it reads."""

    graph: torch.cuda.CUDAGraph
    calls: int
    result: Any
    keep: object


def capture(calls: Sequence[Callable[[], object]]) -> Captured:
    """The calls, one after the other, in one graph."""
    calls[0]()  # compiles and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            result = call()
    return Captured(graph, len(calls), result, calls)


def replays(
    graphs: Mapping[str, Captured],
    repeats: int,
    meanwhile: Callable[[Callable[[], bool]], object] = lambda done: None,
) -> dict[str, list[float]]:
    """Microseconds a call of each repetition, the graphs interleaved. meanwhile: is told how to ask
    whether all are done.
    """
    events = {
        name: [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats)]
        for name in graphs
    }
    for captured in graphs.values():
        captured.graph.replay()
    torch.cuda._sleep(10**7)  # the host gets ahead meanwhile
    names = list(graphs)
    for i in range(repeats):
        first = i % len(names)  # nobody follows the same one always: a hot card is slower
        for name in names[first:] + names[:first]:
            start, end = events[name][i]
            start.record()
            graphs[name].graph.replay()
            end.record()
    meanwhile(end.query)
    torch.cuda.synchronize()
    return {
        name: [a.elapsed_time(b) * 1e3 / graphs[name].calls for a, b in pairs]
        for name, pairs in events.items()
    }


def medians(graphs: Mapping[str, Captured], repeats: int) -> dict[str, float]:
    """Microseconds a call."""
    return {name: statistics.median(times) for name, times in replays(graphs, repeats).items()}
