"""What torch's profiler saw of a run: kernels joined with their programs, and what is between
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, cycle
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile as Profiler

from ..errors import Error
from ..frontends.compiled import kept
from ..ir import plain, value
from ..ir.text import text
from ..report import cost
from ..report.measure import cpu_seconds
from ..report.trace import last_compiled
from ..runtime import cuda
from ..runtime.host_memory import bandwidth
from ..runtime.program import Program
from .counts import Counted
from .data import KernelRun, Span
from .tiles import Tile

LAUNCH = 5e-6  # seconds: what a kernel takes that computes nothing
_OURS = re.compile(r"fusion_moe::\d+\[")  # runtime/program.py
_KERNELS = "kernels"
_SIDE = 1024


@dataclass(frozen=True)
class Launched:
    """A call of a program. layer: the name of the one that called it, or ""."""

    layer: str
    program: Program
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Profile:
    """Events of torch's profiler, and when it began, in seconds from the beginning of the run; and
    tiles of kernels that mark them.
    """

    events: Sequence[Any]
    start: float
    tiles: Sequence[Tile] = ()

    @classmethod
    def of(cls, profiler: Profiler, run: float, tiles: Sequence[Tile]) -> Profile:
        """What a profiler saw that has stopped. run: when the run began, of time.time()."""
        result: Any = profiler.profiler
        start = result.kineto_results.trace_start_ns() / 1e9 - run
        return cls(list(result.function_events), start, tiles)

    def spans(self, device: torch.device) -> list[Span]:
        """On a GPU all of its work, on a CPU operations of torch that are inside of no other; on a
        track of their own, our kernels.
        """
        seen = [e for e in self.events if (e.device_type == DeviceType.CPU) == _is_cpu(device)]
        ours = [e for e in seen if _OURS.match(e.name)]
        others = [
            e for e in seen if not (_OURS.match(e.name) or (e.cpu_parent and _is_cpu(device)))
        ]
        results = [self._span(e, _KERNELS) for e in ours]
        return sorted(results + [self._span(e, device.type) for e in others], key=lambda s: s.start)

    def tile_spans(self, device: torch.device) -> list[Span]:
        """Tiles by multiprocessor, on more than one line where they overlap. The GPU's clock is
        another one: the first tile begins with the first of their kernels.
        """
        names, until = {t.kernel for t in self.tiles}, dict[str, int]()
        seen = (s.start for s in self.spans(device) if s.name in names)
        offset, results = next(seen, self.start), list[Span]()
        tiles = sorted(self.tiles, key=lambda t: t.begin)
        for t in tiles:
            lines = (f"multiprocessor {t.multiprocessor}.{i}" for i in count())
            line = next(line for line in lines if until.get(line, 0) <= t.begin)
            until[line], begin = t.end, (t.begin - tiles[0].begin) / 1e9
            results.append(Span(t.kernel, line, offset + begin, (t.end - t.begin) / 1e9))
        return results

    def window(self, device: torch.device) -> tuple[float, list[Span]]:
        """How long it lasted, and when nothing ran meanwhile."""
        gaps, until, last = list[Span](), None, ""
        spans = [s for s in self.spans(device) if s.track != _KERNELS]
        for span in spans:
            if until is not None and span.start > until:
                gaps.append(Span(f"{last} to {span.name}", "nothing", until, span.start - until))
            if until is None or span.start + span.seconds > until:
                until, last = span.start + span.seconds, span.name
        return (until or 0) - (spans[0].start if spans else 0), gaps

    def kernels(
        self,
        device: torch.device,
        noted: Sequence[Launched],
        captured: Sequence[Launched],
        counted: Mapping[str, Counted],
    ) -> list[KernelRun]:
        """Our kernels by program, sizes and number: the profiler saw them in the order of launches,
        noted or, in graphs, captured.
        """
        calls = dict[Any, list[tuple[Launched, float]]]()
        seen = self._noted(device, noted) if noted else self._replayed(captured)
        for of, i, seconds in seen:
            key = text(of.program.stages[0][1]), i, tuple(of.sizes.items())
            calls.setdefault(key, []).append((of, seconds))
        if not calls:
            return []
        numbers = {source: n for n, source in enumerate(dict.fromkeys(s for s, *_ in calls))}
        lines, speeds = _lines(), _speeds(device)
        return [
            _kernel(f"program{numbers[source]}.{i}", i, of, counted, speeds, lines.get(source))
            for (source, i, _), of in calls.items()
        ]

    def _span(self, e: Any, track: str) -> Span:
        start = self.start + e.time_range.start / 1e6
        return Span(e.name, track, start, e.time_range.elapsed_us() / 1e6)

    def _noted(
        self, device: torch.device, noted: Sequence[Launched]
    ) -> Iterator[tuple[Launched, int, float]]:
        ours = iter([s for s in self.spans(device) if s.track == _KERNELS])
        for of in noted:
            for i, _ in enumerate(of.program.kernels):
                if span := next(ours, None):
                    yield of, i, span.seconds

    def _replayed(self, captured: Sequence[Launched]) -> Iterator[tuple[Launched, int, float]]:
        """The kernels of a replayed graph, which have no ranges: those of a part follow each other,
        and may overlap.
        """
        launches = [
            (of, i, {kernel.name for kernel in step.kernels})
            for of in captured
            for i, step in enumerate(_steps(of))
            if step.kernels
        ]
        names = {name for *_, of in launches for name in of}
        seen = [e for e in self.events if e.device_type == DeviceType.CUDA and e.name in names]
        seen.sort(key=lambda e: e.time_range.start)
        for of, i, wanted in cycle(launches):
            if not seen:
                return
            part = [seen.pop(0)]
            if part[0].name not in wanted:
                continue
            while seen and len(part) < len(wanted) and seen[0].name in wanted:
                part.append(seen.pop(0))
            end = max(e.time_range.end for e in part)
            yield of, i, (end - part[0].time_range.start) / 1e6


NOTHING = Profile((), 0.0)


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _steps(of: Launched) -> Sequence[Any]:
    """What a captured call launched for each part of its program."""
    joined: Any = of.program.joined
    return joined.choose(of.sizes, cuda.arch(torch.cuda.current_device())).steps if joined else ()


def _kernel(
    name: str,
    i: int,
    calls: Sequence[tuple[Launched, float]],
    counted: Mapping[str, Counted],
    speeds: tuple[float, float],
    lines: Sequence[Sequence[str]] | None,
) -> KernelRun:
    (first, _), seconds = calls[0], sorted(s for _, s in calls)
    layers = list(dict.fromkeys(of.layer for of, _ in calls if of.layer))
    fusion, sizes = first.program.kernels[i].segment.fusion, first.sizes
    used = _used(first, [counted[layer] for layer in layers if layer in counted])
    flops, read = cost.flops(fusion, sizes), cost.bytes_read(fusion, sizes, used)
    return KernelRun(
        name=name,
        ops=" ".join(dict.fromkeys(op.kind.name for op in fusion.ops if not op.kind.view)),
        sizes=dict(sizes),
        layers=layers,
        calls=len(calls),
        seconds=median(seconds),
        shortest=seconds[0],
        longest=seconds[-1],
        whole=sum(seconds),
        flops=flops,
        bytes_read=read,
        reading=read / speeds[0],
        multiplying=flops / speeds[1],
        launching=LAUNCH,
        sources=lines[i] if lines else (),
    )


def _used(of: Launched, counted: Sequence[Counted]) -> dict[str, int]:
    """By partition: how many groups had rows, on average, in calls of as many rows."""
    product = of.program.product
    if product is None or not counted:
        return {}
    rows = torch.cat([c.rows for c in counted])
    like = rows[rows.sum(1) == value(plain(product.values[0].type.shape[0]), of.sizes)]
    used = round(float((like if len(like) else rows).count_nonzero(1).double().mean()))
    values = (v for op in of.program.fusion.ops for v in op.outputs)
    return {v.type.ends.name: used for v in values if v.type.ends}


def _lines() -> Mapping[str, Sequence[Sequence[str]]]:
    """By the text of a program that torch.compile made: the user's lines of each of its kernels."""
    with suppress(Error):
        if kept():
            fusions = last_compiled().fusions
            return {f.programs["translated"]: [s.sources for s in f.segments] for f in fusions}
    return {}


def _speeds(device: torch.device) -> tuple[float, float]:
    """Bytes and FLOP a second: of a GPU as specified, of a CPU as measured."""
    if not _is_cpu(device):
        arch = cuda.arch(cuda.index_of(device))
        return arch.memory_bandwidth, arch.tensor_rate
    threads = torch.get_num_threads()
    return bandwidth.of(threads).bytes_per_second, _multiplying(threads)


@cache
def _multiplying(threads: int) -> float:
    """FLOP a second of torch's product of matrices in bf16, on so many threads."""
    a = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
    return 2 * _SIDE**3 / min(cpu_seconds(partial(torch.mm, a, a)) for _ in range(3))
