"""The whole report as text: the same for the same model, whatever the machine, the folder and the
time, except for measured values.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median_low

from ..backends import TARGETS, backend_of
from ..frontends.float_experts import advice
from ..ir.kinds.eight_bits import CODED_MULTIPLE
from ..messages import amount, count, duration, ratio
from .data import Load, ReportData, TensorReport, total
from .summary import after, what

WIDTH = 120
_COLUMNS = ("segment", "kind", "operations", "flops", "read", "written", "avoided", "flop/B")
_TIMES = ("measured", "kernel", "time", "spread", "floor", "x floor", "GB/s", "GFLOP/s")
_OPERATIONS = 42  # columns


def details(report: ReportData) -> str:
    """The whole report as lines of text."""
    fusions, segments = report.fusions, report.segments
    emulated = [f.id for f in fusions if any("dequantize" in s.ops for s in f.segments)]
    sections = (
        ("measured on", _machine(report)),
        ("load", ((f"{f.id}, {x.partition}", _load(x)) for f in fusions for x in f.loads)),
        ("source lines", ((s.id, source) for s in segments for source in s.sources)),
        ("types", ((s.id, f"{', '.join(s.inputs)} -> {', '.join(s.outputs)}") for s in segments)),
        ("boundaries", ((s.id, after(s)) for s in segments if s.boundary)),
        ("ranks", ((s.id, s.schedule) for s in segments if s.kind == "collective")),
        ("emulated", ((id, _EMULATED) for id in emulated)),
        ("saved for the backward", _saved(report)),
        ("made again", ((f.id, " ".join(f.made_again)) for f in fusions if f.made_again)),
        ("gradients", ((x.name, _tensor(x, "that of a result")) for x in report.gradients)),
        ("rewritten", ((f.id, ", ".join(f.rewritten)) for f in fusions if f.rewritten)),
        ("roundings dropped", ((s.id, ", ".join(s.roundings)) for s in segments if s.roundings)),
        ("backends", _counted((s.backend, s.backend_why) for s in segments)),
        ("kernels", _kernels(report)),
        ("weight layouts", _counted(layout for s in segments for layout in s.layouts)),
        ("not fused", _not_fused(report)),
    )
    title = f"fusion_moe.explain: {what(report, with_segments=True)}"
    calls = f"{report.fused_calls} of {count(report.calls, 'call')} in fusions"
    parts = [
        f"{title}; {calls}",
        _filled(advice(report.float_experts) if report.float_experts else ""),
        _filled(report.requantized),
        *(_table(rows(report)) for rows in (_segments, _times) if fusions),
        *(_section(title, rows) for title, rows in sections),
        _filled(_legend(report) if fusions else f"nothing was fused: {report.why_nothing}"),
    ]
    return "\n\n".join(part for part in parts if part)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False)


def _segments(report: ReportData) -> Iterator[tuple[str, ...]]:
    """Rows of columns, and of lines that have one."""
    id, kind, operations, *numbers = _COLUMNS
    yield id, kind, f"{operations:<{_OPERATIONS + 2}}", *numbers
    for fusion in report.fusions:
        for s in fusion.segments:
            lines = textwrap.wrap(" ".join(s.ops), _OPERATIONS) or [""]
            moved = (amount(n, "B") for n in (s.bytes_read, s.bytes_written, s.bytes_avoided))
            first, *rest = (f"{line:<{_OPERATIONS + 2}}" for line in lines)
            yield s.id, s.kind, first, amount(s.flops), *moved, ratio(s.intensity)
            yield from (("", "", line) for line in rest)
        if fusion.times > 1:
            yield (f"{fusion.id} occurs {fusion.times} times in the model",)
        if fusion.backward:
            yield (f"{fusion.id} is part of the backward pass",)


def _times(report: ReportData) -> Iterator[tuple[str, ...]]:
    """Rows of columns, if there are any."""
    if report.machine:
        yield _TIMES
    for fusion in report.fusions:
        flops = total(s.flops for s in fusion.segments)
        rows = [(s.id, s.backend, s.measured, s.flops) for s in fusion.segments]
        for id, kernel, m, n in (*rows, (fusion.id, "whole program", fusion.measured, flops)):
            if m:
                yield (
                    id,
                    kernel,
                    duration(m.seconds),
                    f"{(m.longest - m.shortest) / m.seconds:.0%}",
                    duration(m.floor),
                    ratio(m.seconds / m.floor if m.floor else None),
                    ratio(m.bytes_read / m.seconds / 1e9),
                    ratio(None if n is None else n / m.seconds / 1e9),
                )


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = (
        id if not cells else f"{id:<12}{cells[0]:<14}{''.join(f'{x:>10}' for x in cells[1:])}"
        for id, *cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _machine(report: ReportData) -> Iterable[tuple[str, str]]:
    m = report.machine
    if m and m.gpu:
        yield m.gpu, f"times of CUDA events; {amount(m.bytes_per_second, 'B/s')} {m.read_by}"
    elif m:
        yield (
            m.cpu,
            f"{count(m.cpus, 'CPU')}, "
            f"{count(m.threads, 'thread')}{f'; C++ for {m.isa_level}' if m.isa_level else ''}",
        )
        yield (
            "read bandwidth",
            f"{amount(m.bytes_per_second, 'B/s')} ({m.read_by}), {amount(m.now, 'B/s')} for "
            "this report",
        )
        if m.preemptions:
            yield (
                "preemptions",
                f"preempted {count(m.preemptions, 'time')} during the measurement: the "
                "machine is busy",
            )
        yield (
            "weights",
            f"{amount(m.weight_bytes, 'B')}, {amount(m.weight_bytes_on_large_pages, 'B')} of them "
            f"on large pages",
        )


def _load(load: Load) -> str:
    rows = load.rows or (0,)
    spread = f"least {min(rows)}, median {median_low(rows)}, most {max(rows)}; {load.empty} empty"
    return f"{count(sum(load.rows), 'row')} in {count(len(load.rows), 'group')}: {spread}"


# of products whose operands are rounded to 8 bits
_EMULATED = (
    "products of operands in 8 bits, multiplied as the floats that these are: fidelity, not speed. "
    "Codes are multiplied on compute capability 9.0, in FP8 with scales that are powers of two, if "
    f"in- and out-features are multiples of {CODED_MULTIPLE}"
)


def _saved(report: ReportData) -> Iterable[tuple[str, str]]:
    yield from ((x.name, _tensor(x, "an input")) for x in report.saved)
    if results := [x.bytes for x in report.saved if x.made_by]:
        yield "in all", f"{amount(total(results), 'B')} beside inputs"


def _tensor(x: TensorReport, otherwise: str) -> str:
    maker = f"made by {x.made_by}" if x.made_by else otherwise
    return f"{x.type}, {amount(x.bytes, 'B')}, {maker}"


def _kernels(report: ReportData) -> Iterable[tuple[str, str]]:
    for fusion in report.fusions:
        if fusion.gpu:
            yield fusion.id, f"on {fusion.gpu}, workspace {amount(fusion.workspace, 'B')}"
            yield from ((s.id, s.launched) for s in fusion.segments if s.launched)


def _counted(of_segments: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Each statement about segments once, with the number of segments that it is about."""
    return (
        (name, f"{why} ({count(times, 'segment')})")
        for (name, why), times in Counter(of_segments).items()
    )


def _not_fused(report: ReportData) -> Iterable[tuple[str, str]]:
    for x in report.not_fused:
        times = f" ({x.times} times)" if x.times > 1 else ""
        yield x.op, f"{x.why}{times}{' at ' + x.source if x.source else ''}"


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = []
    for name, text in rows:
        first, *rest = textwrap.wrap(text, WIDTH - 30, break_long_words=False) or [""]
        lines.append(f"  {name:<26}  {first}" if len(name) <= 26 else f"  {name}\n{'':30}{first}")
        lines += [f"{'':30}{line}" for line in rest]
    return "\n".join([title, *lines]) if lines else ""


_FLOPS_AND_BYTES = (
    "flops and bytes are for one call with these sizes; of grouped weights, at most one group per "
    "row counts as read. avoided: the traffic between operations that separate kernels would have "
    "caused; views and casts are not kernels of their own. flop/B: flops per byte read or written. "
    "?: a size known only on the device. boundaries: the segments that a segment reads from, and "
    "why they are not one kernel."
)
_TIME = (
    " time: the median of {} runs with cold inputs, where a fusion first runs; spread: (longest - "
    "shortest) / median. floor: the time to read the inputs at the read bandwidth; of grouped "
    "weights, those of groups with rows."
)
_BACKWARD = (
    " saved: what the forward pass keeps. made again: operations of the backward that read no "
    "gradient, which make what was not saved, and factors of derivatives. rewritten: derivatives "
    "that are not the operations' own, and round elsewhere."
)


def _legend(report: ReportData) -> str:
    times = _TIME.format(report.machine.repeats) if report.machine else ""
    backend = backend_of(TARGETS[report.target])
    note = f" {backend.name}: {backend.note}." if backend.note else ""
    return f"{_FLOPS_AND_BYTES}{times}{_BACKWARD if report.gradients else ''}{note}"
