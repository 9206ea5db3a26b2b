"""The whole report as text: the same for the same model, whatever the machine, the folder and the
time, except for measured values.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median_low

from ..frontends.float_experts import advice
from .data import FusionReport, Load, Measured, Report, SegmentReport
from .units import amount, count, duration

WIDTH = 120
_HEAD = ("segment", "kind", "operations", "flops", "read", "written", "avoided", "flop/B")
_TIMES = ("measured", "kernel", "time", "spread", "floor", "x floor", "GB/s", "GFLOP/s")
_OPERATIONS = 42


def details(report: Report) -> str:
    """The whole report."""
    parts = [_title(report), _float_experts(report)]
    if report.fusions:
        parts += [
            _rows(report),
            _times(report),
            _section("measured on", _machine(report)),
            _section("load", _loads(report)),
            _section("source lines", _sources(report)),
            _section("types", _types(report)),
            _section("boundaries", _boundaries(report)),
            _section("emulated", _emulated(report)),
        ]
        parts += [
            _section("saved for the backward", _saved(report)),
            _section("made again", _again(report)),
            _section("gradients", _gradients(report)),
            _section("rewritten", _rewritten(report)),
        ]
        parts += [
            _section("roundings dropped", _roundings(report)),
            _section("backends", _backends(report)),
        ]
        parts += [
            _section("kernels", _kernels(report)),
            _section("weight layouts", _layouts(report)),
        ]
    parts.append(_section("not fused", _not_fused(report)))
    parts.append(_legend(report) if report.fusions else _nothing(report))
    return "\n\n".join(p for p in parts if p)


def _title(report: Report) -> str:
    fusions = sum(f.times for f in report.fusions)
    segments = sum(len(f.segments) * f.times for f in report.fusions)
    where = report.target if report.executed else f"{report.target} (emitted, unexecuted)"
    what = (
        f"{count(report.graphs, 'graph')}, {count(fusions, 'fusion')} with "
        f"{count(segments, 'segment')} for {where}"
    )
    return (
        f"fusion_moe.explain: {what}; {report.fused_calls} of {count(report.calls, 'call')} "
        "in fusions"
    )


def _float_experts(report: Report) -> str:
    return (
        textwrap.fill(advice(report.float_experts), WIDTH, break_long_words=False)
        if report.float_experts
        else ""
    )


def _rows(report: Report) -> str:
    lines = [_line(*_HEAD)]
    for fusion in report.fusions:
        for segment in fusion.segments:
            lines += _row(segment)
        if fusion.times > 1:
            lines.append(f"{fusion.id} occurs {fusion.times} times in the model")
        if fusion.backward:
            lines.append(f"{fusion.id} is part of the backward pass")
    return "\n".join(lines)


def _row(s: SegmentReport) -> Iterator[str]:
    first, *rest = textwrap.wrap(" ".join(s.ops), _OPERATIONS) or [""]
    numbers = [amount(s.flops)] + [
        amount(n, "B") for n in (s.bytes_read, s.bytes_written, s.bytes_avoided)
    ]
    yield _line(s.id, s.kind, first, *numbers, "?" if s.intensity is None else f"{s.intensity:.3g}")
    yield from (f"{'':26}{line}" for line in rest)


def _line(id: str, kind: str, ops: str, *numbers: str) -> str:
    return (
        f"{id:<12}{kind:<14}{ops:<{_OPERATIONS + 2}}{''.join(f'{n:>10}' for n in numbers)}".rstrip()
    )


def _times(report: Report) -> str:
    lines = [line for fusion in report.fusions if fusion.measured for line in _times_of(fusion)]
    return "\n".join([_time(*_TIMES), *lines]) if lines else ""


def _times_of(fusion: FusionReport) -> Iterator[str]:
    for s in fusion.segments:
        if s.measured:
            yield _time(s.id, s.backend, *_numbers(s.measured, s.flops))
    flops = [s.flops for s in fusion.segments if s.flops is not None]
    if fusion.measured:
        yield _time(
            fusion.id,
            "whole program",
            *_numbers(fusion.measured, sum(flops) if len(flops) == len(fusion.segments) else None),
        )


def _time(id: str, kernel: str, *numbers: str) -> str:
    return f"{id:<12}{kernel:<14}{''.join(f'{n:>10}' for n in numbers)}".rstrip()


def _numbers(m: Measured, flops: int | None) -> Iterator[str]:
    """time, spread, floor, x floor, GB/s, GFLOP/s"""
    yield duration(m.seconds)
    yield f"{(m.longest - m.shortest) / m.seconds:.0%}"
    yield duration(m.floor)
    yield f"{m.seconds / m.floor:.3g}" if m.floor else "?"
    yield f"{m.bytes_read / m.seconds / 1e9:.3g}"
    yield "?" if flops is None else f"{flops / m.seconds / 1e9:.3g}"


def _machine(report: Report) -> Iterable[tuple[str, str]]:
    m = report.machine
    if m and m.gpu:
        yield m.gpu, f"times of CUDA events; {amount(m.bytes_per_second, 'B/s')} {m.read_by}"
    elif m:
        yield (
            m.cpu,
            f"{count(m.cpus, 'CPU')}, "
            f"{count(m.threads, 'thread')}{f'; C++ for {m.tier}, {m.tier_why}' if m.tier else ''}",
        )
        for dtype, kernels in m.products:
            yield f"products of {dtype}", f"groups of {kernels}"
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


def _loads(report: Report) -> Iterable[tuple[str, str]]:
    return (
        (f"{fusion.id}, {load.partition}", _load(load))
        for fusion in report.fusions
        for load in fusion.loads
    )


def _load(load: Load) -> str:
    empty = [group for group, rows in enumerate(load.rows) if not rows]
    spread = (
        f"least {min(load.rows)}, median {median_low(load.rows)}, most {max(load.rows)}"
        if load.rows
        else "none"
    )
    unused = f"{len(empty)} empty: {_ranges(empty)}" if empty else "none empty"
    return f"{count(sum(load.rows), 'row')} in {count(len(load.rows), 'group')}: {spread}; {unused}"


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _sources(report: Report) -> Iterable[tuple[str, str]]:
    return ((s.id, source) for s in _segments(report) for source in s.sources)


def _types(report: Report) -> Iterable[tuple[str, str]]:
    return ((s.id, f"{', '.join(s.inputs)} -> {', '.join(s.outputs)}") for s in _segments(report))


def _boundaries(report: Report) -> Iterable[tuple[str, str]]:
    for s in _segments(report):
        if s.boundary:
            yield (
                f"{s.id.split('.')[0]}: {', '.join(map(_number, s.after))} | {_number(s.id)}",
                s.boundary,
            )


def _emulated(report: Report) -> Iterable[tuple[str, str]]:
    """The fusions with products whose operands are rounded to 8 bits."""
    for fusion in report.fusions:
        if any("dequantize" in s.ops for s in fusion.segments):
            yield (
                fusion.id,
                "products of MXFP8 operands, multiplied as the bf16 numbers that these are: "
                "fidelity, not speed",
            )


def _number(id: str) -> str:
    return id.rsplit(".", 1)[1]


def _saved(report: Report) -> Iterable[tuple[str, str]]:
    for x in report.saved:
        yield (
            x.name,
            f"{x.type}, {amount(x.bytes, 'B')}, "
            f"{f'made by {x.made_by}' if x.made_by else 'an input'}",
        )
    if made := [x.bytes for x in report.saved if x.made_by]:
        yield (
            "in all",
            f"{amount(None if None in made else sum(n or 0 for n in made), 'B')} beside inputs",
        )


def _again(report: Report) -> Iterable[tuple[str, str]]:
    return ((f.id, " ".join(f.made_again)) for f in report.fusions if f.made_again)


def _gradients(report: Report) -> Iterable[tuple[str, str]]:
    for x in report.gradients:
        yield (
            x.name,
            f"{x.type}, {amount(x.bytes, 'B')}, "
            f"{f'made by {x.made_by}' if x.made_by else 'that of a result'}",
        )


def _rewritten(report: Report) -> Iterable[tuple[str, str]]:
    return ((f.id, ", ".join(f.rewritten)) for f in report.fusions if f.rewritten)


def _roundings(report: Report) -> Iterable[tuple[str, str]]:
    return ((s.id, ", ".join(s.roundings)) for s in _segments(report) if s.roundings)


def _backends(report: Report) -> Iterable[tuple[str, str]]:
    return _counted((s.backend, s.backend_why) for s in _segments(report))


def _kernels(report: Report) -> Iterable[tuple[str, str]]:
    for fusion in report.fusions:
        if fusion.gpu:
            yield fusion.id, f"on {fusion.gpu}, workspace {amount(fusion.workspace, 'B')}"
            yield from ((s.id, s.launched) for s in fusion.segments if s.launched)


def _layouts(report: Report) -> Iterable[tuple[str, str]]:
    return _counted(said for s in _segments(report) for said in s.layouts)


def _counted(of_segments: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Each statement about segments once, with the number of segments that it is about."""
    return (
        (name, f"{why} ({count(times, 'segment')})")
        for (name, why), times in Counter(of_segments).items()
    )


def _not_fused(report: Report) -> Iterable[tuple[str, str]]:
    for x in report.not_fused:
        times = f" ({x.times} times)" if x.times > 1 else ""
        yield x.op, f"{x.why}{times}{' at ' + x.source if x.source else ''}"


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = []
    for name, said in rows:
        first, *rest = textwrap.wrap(said, WIDTH - 30, break_long_words=False) or [""]
        lines.append(f"  {name:<26}  {first}" if len(name) <= 26 else f"  {name}\n{'':30}{first}")
        lines += [f"{'':30}{line}" for line in rest]
    return "\n".join([title, *lines]) if lines else ""


def _legend(report: Report) -> str:
    said = (
        "flops and bytes are for one call with these sizes; of grouped weights, at most one group "
        "per row counts as read. avoided: the "
        "traffic between operations that separate kernels would have caused; views and casts are "
        "not kernels of their own. flop/B: "
        "flops per byte read or written. ?: a size known only on the device. boundaries: the "
        "segments that a segment reads from, and "
        "why they are not one kernel."
    )
    if report.machine:
        said += (
            f" time: the median of {report.machine.repeats} runs with cold inputs, where a fusion "
            "first runs; spread: (longest - shortest) "
            "/ median. floor: the time to read the inputs at the read bandwidth; of grouped "
            "weights, those of groups with rows."
        )
    if report.gradients:
        said += (
            " saved: what the forward pass keeps. made again: operations of the backward that "
            "read no gradient, which make what was not "
            "saved, and factors of derivatives. rewritten: derivatives that are not the "
            "operations' own, and round elsewhere."
        )
    if any(s.kind == "nvfuser" for s in _segments(report)):
        said += (
            " nvfuser: one definition, which nvFuser splits into kernels; the traffic between "
            "them counts as avoided."
        )
    return textwrap.fill(said, WIDTH)


def _nothing(report: Report) -> str:
    if not report.graphs:
        return (
            "nothing was fused: no graph was captured from this call (TORCH_LOGS=graph_breaks "
            "shows why)"
        )
    custom = f" (without a translator: {', '.join(report.custom_ops)})" if report.custom_ops else ""
    said = (
        "nothing was fused: no call in these graphs has a translator that makes a grouped "
        f"product which can join others{custom}"
    )
    return textwrap.fill(said, WIDTH, break_long_words=False)


def _segments(report: Report) -> Iterator[SegmentReport]:
    for fusion in report.fusions:
        yield from fusion.segments
