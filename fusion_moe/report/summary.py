"""The report on one screen: how much is fused, what runs in plain torch, what was not fused and
why, and where to look next.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from ..frontends.float_experts import advice
from ..schedule.plan import REFERENCE
from .data import FusionReport, ReportData, SegmentReport, total
from .units import amount, count, duration, ratio

_SEGMENTS, _REASONS, _LINES = 8, 6, 3  # how many of each are shown; lines of a reason
NEXT = (
    ("report.details()", "every type, source line and boundary"),
    ('report.save("report.html")', "source, IR and kernels side by side"),
)


def summary(report: ReportData, width: int, next: Iterable[tuple[str, str]] = NEXT) -> str:
    """Text of at most `width` columns, 70 or more. next: what shows more, with a description."""
    shares = ["fused", f"  nothing: {report.why_nothing}"]
    if report.fusions:
        told = (
            f"  {share!s:>5} of {name:<8}{amount(share.fused, unit)} of {amount(share.total, unit)}"
            for name, unit, share in (("flops", "", report.flops), ("bytes", "B", report.bytes))
        )
        shares = ["fused", *told, f"  {report.fused_calls} of {count(report.calls, 'call')}"]
    parts = [
        [f"fusion_moe.explain: {what(report)}"],
        shares,
        [line for text in warnings(report) for line in _marked(text, width)],
        _kernels(report, width),
        _backends(report, width),
        _not_fused(report, width),
        ["look next", *(f"  {name:<28}{text}" for name, text in next)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def what(report: ReportData, with_segments: bool = False) -> str:
    """What was explained, for titles."""
    fusions = count(sum(f.times for f in report.fusions), "fusion")
    if with_segments:
        fusions += (
            f" with {count(sum(len(f.segments) * f.times for f in report.fusions), 'segment')}"
        )
    where = report.target if report.executed else f"{report.target} (emitted, unexecuted)"
    return f"{count(report.graphs, 'graph')}, {fusions} for {where}"


def warnings(report: ReportData) -> Iterator[str]:
    """What to know first: experts in floats, segments that no kernel computes, times that mean
    nothing.
    """
    if report.float_experts:
        yield advice(report.float_experts)
    for why, ids in _grouped((s.backend_why, s.id) for s in report.segments if is_plain(s)):
        yield f"plain torch runs {_some(ids)}: {why}"
    if report.void:
        yield f"times are void: {report.void}"


def is_plain(s: SegmentReport) -> bool:
    """Whether plain torch computes a segment."""
    return s.backend == REFERENCE


def _kernels(report: ReportData, width: int) -> list[str]:
    shown = [(f, s) for f in report.fusions for s in f.segments]
    if not shown:
        return []
    shown.sort(key=lambda pair: not is_plain(pair[1]))
    lines = [f"segments{'':>{width - 27}}{'flops':>9}{'bytes':>10}"]
    for fusion, s in shown[:_SEGMENTS]:
        lines.append(_row(fusion, s, width))
        if (m := s.measured) and not report.void:
            bound = f", {ratio(m.seconds / m.floor)} times its memory bound" if m.floor else ""
            lines.append(f"    {duration(m.seconds)}{bound}")
    return lines + _more(len(shown) - _SEGMENTS)


def _row(fusion: FusionReport, s: SegmentReport, width: int) -> str:
    mark = "!" if is_plain(s) else " "
    name = f"{s.id} x {fusion.times}" if fusion.times > 1 else s.id
    head = f"{mark} {name:<16}{s.backend:<10}"
    moved = total((s.bytes_read, s.bytes_written))
    numbers = f"{amount(s.flops):>9}{amount(moved, 'B'):>10}"
    room = max(width - len(head) - len(numbers), 12)
    ops = textwrap.shorten(" ".join(dict.fromkeys(s.ops)), room, placeholder=" ...")
    return f"{head}{ops:<{room}}{numbers}"


def _backends(report: ReportData, width: int) -> list[str]:
    """Why kernels do not run, or not all that could."""
    reasons = _grouped(
        (s.backend_why, s.id)
        for s in report.segments
        if not is_plain(s) and s.backend_why != "compiles it whole"
    )
    lines = [line for why, ids in reasons for line in _wrapped(f"{_some(ids)}: {why}", width)]
    return ["backends", *lines] if lines else []


def _not_fused(report: ReportData, width: int) -> list[str]:
    reasons = _grouped(
        (x.why, f"{x.op} x {x.times}" if x.times > 1 else x.op) for x in report.not_fused
    )
    lines = [
        line for why, ops in reasons[:_REASONS] for line in _wrapped(f"{_some(ops)}: {why}", width)
    ]
    return ["not fused", *lines, *_more(len(reasons) - _REASONS)] if lines else []


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(reason, its subjects), starting with the reason that has the most."""
    groups: dict[str, list[str]] = {}
    for why, subject in pairs:
        groups.setdefault(why, []).append(subject)
    return sorted(groups.items(), key=lambda pair: -len(pair[1]))


def _some(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _marked(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="! ", subsequent_indent="  ", break_long_words=False
    )


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        max_lines=_LINES,
        placeholder=" ...",
    )


def _more(n: int) -> list[str]:
    return [f"  and {n} more"] if n > 0 else []
