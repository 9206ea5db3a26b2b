"""The whole report as text: the same for the same model, whatever the machine, the folder and the
time, except for measured values.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median_low

from ..backends import TARGETS, backend_of
from ..frontends.float_experts import advice
from .data import FusionReport, Load, Measured, ReportData, SegmentReport, TensorReport, total
from .summary import what
from .units import amount, count, duration

WIDTH = 120
_HEAD = ("segment", "kind", "operations", "flops", "read", "written", "avoided", "flop/B")
_TIMES = ("measured", "kernel", "time", "spread", "floor", "x floor", "GB/s", "GFLOP/s")
_OPERATIONS = 42


def details(report: ReportData) -> str:
    """The whole report."""
    fusions, segments = report.fusions, report.segments
    sections = (
        ("measured on", _machine(report)),
        ("load", ((f"{f.id}, {x.partition}", _load(x)) for f in fusions for x in f.loads)),
        ("source lines", ((s.id, source) for s in segments for source in s.sources)),
        ("types", ((s.id, f"{', '.join(s.inputs)} -> {', '.join(s.outputs)}") for s in segments)),
        ("boundaries", ((_place(s), s.boundary) for s in segments if s.boundary)),
        ("emulated", ((f.id, _EMULATED) for f in fusions if _is_emulated(f))),
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
    ]
    if fusions:
        parts += [_rows(report), _times(report)]
    parts += [_section(title, rows) for title, rows in sections]
    parts.append(_filled(_legend(report) if fusions else _nothing(report)))
    return "\n\n".join(part for part in parts if part)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False)


def _rows(report: ReportData) -> str:
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


def _times(report: ReportData) -> str:
    lines = []
    for fusion in (fusion for fusion in report.fusions if fusion.measured):
        flops = total(s.flops for s in fusion.segments)
        rows = [(s.id, s.backend, s.measured, s.flops) for s in fusion.segments]
        rows.append((fusion.id, "whole program", fusion.measured, flops))
        lines += [_time(id, kernel, *_numbers(m, n)) for id, kernel, m, n in rows if m]
    return "\n".join([_time(*_TIMES), *lines]) if lines else ""


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


def _machine(report: ReportData) -> Iterable[tuple[str, str]]:
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


def _place(s: SegmentReport) -> str:
    """A segment and those that it reads from, as "fusion0: 0, 1 | 2"."""
    fusion, _, number = s.id.rpartition(".")
    return f"{fusion}: {', '.join(id.rpartition('.')[2] for id in s.after)} | {number}"


# of products whose operands are rounded to 8 bits
_EMULATED = (
    "products of MXFP8 operands, multiplied as the bf16 numbers that these are: fidelity, not speed"
)


def _is_emulated(fusion: FusionReport) -> bool:
    return any("dequantize" in s.ops for s in fusion.segments)


def _saved(report: ReportData) -> Iterable[tuple[str, str]]:
    yield from ((x.name, _tensor(x, "an input")) for x in report.saved)
    if made := [x.bytes for x in report.saved if x.made_by]:
        yield "in all", f"{amount(total(made), 'B')} beside inputs"


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
    for name, said in rows:
        first, *rest = textwrap.wrap(said, WIDTH - 30, break_long_words=False) or [""]
        lines.append(f"  {name:<26}  {first}" if len(name) <= 26 else f"  {name}\n{'':30}{first}")
        lines += [f"{'':30}{line}" for line in rest]
    return "\n".join([title, *lines]) if lines else ""


def _legend(report: ReportData) -> str:
    text = (
        "flops and bytes are for one call with these sizes; of grouped weights, at most one group "
        "per row counts as read. avoided: the "
        "traffic between operations that separate kernels would have caused; views and casts are "
        "not kernels of their own. flop/B: "
        "flops per byte read or written. ?: a size known only on the device. boundaries: the "
        "segments that a segment reads from, and "
        "why they are not one kernel."
    )
    if report.machine:
        text += (
            f" time: the median of {report.machine.repeats} runs with cold inputs, where a fusion "
            "first runs; spread: (longest - shortest) "
            "/ median. floor: the time to read the inputs at the read bandwidth; of grouped "
            "weights, those of groups with rows."
        )
    if report.gradients:
        text += (
            " saved: what the forward pass keeps. made again: operations of the backward that "
            "read no gradient, which make what was not "
            "saved, and factors of derivatives. rewritten: derivatives that are not the "
            "operations' own, and round elsewhere."
        )
    if (backend := backend_of(TARGETS[report.target])).note:
        text += f" {backend.name}: {backend.note}."
    return text


def _nothing(report: ReportData) -> str:
    if not report.graphs:
        return (
            "nothing was fused: no graph was captured from this call (TORCH_LOGS=graph_breaks "
            "shows why)"
        )
    custom = f" (without a translator: {', '.join(report.custom_ops)})" if report.custom_ops else ""
    return (
        "nothing was fused: no call in these graphs has a translator that makes a grouped "
        f"product which can join others{custom}"
    )
