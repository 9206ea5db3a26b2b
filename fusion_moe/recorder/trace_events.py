"""A run as trace events, the format of chrome://tracing that Perfetto opens too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from .data import RunData, Span


def trace_events(run: RunData) -> dict[str, Any]:
    """A process for each rank, a thread for each track, times in us."""
    tracks: dict[tuple[int, str], int] = {}
    slices = [
        {
            "name": span.name,
            "cat": span.track,
            "ph": "X",
            "ts": span.start * 1e6,
            "dur": span.seconds * 1e6,
            "pid": span.rank,
            "tid": tracks.setdefault((span.rank, span.track), len(tracks)),
        }
        for span in _spans(run)
    ]
    named = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": track}}
        for (rank, track), tid in tracks.items()
    ]
    ranks = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, _ in tracks})
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*ranks, *named, *slices]}


def _spans(run: RunData) -> Iterator[Span]:
    for n, (start, end) in enumerate(pairwise(run.begun)):
        yield Span(f"step {n}", "steps", start, end - start)
    for spans in (run.stalls, run.spans, run.gaps, run.tiles):
        yield from spans
