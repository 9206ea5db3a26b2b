"""The report on one screen: how much is fused, what runs in plain torch, what was not fused and
why, and where to look next.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from ..frontends.float_experts import advice
from ..schedule.plan import REFERENCE
from .data import FusionReport, Report, SegmentReport
from .units import amount, count, duration, ratio

_SEGMENTS, _REASONS, _LINES = 8, 6, 3  # how many of each are shown; lines of a reason
NEXT = (
    ("report.details()", "every type, source line and boundary"),
    ('report.save("report.html")', "source, IR and kernels side by side"),
)


def one_line(report: Report) -> str:
    """The text that a prompt shows for a report."""
    return f"<Report of fusion_moe.explain: {_what(report)}, {report.flops} of flops fused>"


def summary(report: Report, width: int, next: Iterable[tuple[str, str]] = NEXT) -> str:
    """Text of at most `width` columns, 70 or more. next: what shows more, with a description."""
    parts = [
        [f"fusion_moe.explain: {_what(report)}"],
        _floats(report, width),
        _shares(report),
        _plain_torch(report, width),
        _marked(f"times are void: {report.void}", width) if report.void else [],
        _kernels(report, width),
        _backends(report, width),
        _not_fused(report, width),
        ["look next", *(f"  {name:<28}{what}" for name, what in next)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _what(report: Report) -> str:
    fusions = sum(f.times for f in report.fusions)
    where = report.target if report.executed else f"{report.target} (emitted, unexecuted)"
    return f"{count(report.graphs, 'graph')}, {count(fusions, 'fusion')} for {where}"


def _floats(report: Report, width: int) -> list[str]:
    return _marked(advice(report.float_experts), width) if report.float_experts else []


def _shares(report: Report) -> list[str]:
    if not report.fusions:
        return ["fused", f"  nothing: {report.why_nothing}"]
    shares = (("flops", "", report.flops), ("bytes", "B", report.bytes))
    told = (
        f"  {share!s:>5} of {name:<8}{amount(share.fused, unit)} of {amount(share.total, unit)}"
        for name, unit, share in shares
    )
    return ["fused", *told, f"  {report.fused_calls} of {count(report.calls, 'call')}"]


def _plain_torch(report: Report, width: int) -> list[str]:
    """The segments that no kernel computes, grouped by reason."""
    reasons = _grouped((s.backend_why, s.id) for s in report.segments if s.backend == REFERENCE)
    return [
        line
        for why, ids in reasons
        for line in _marked(f"plain torch runs {_some(ids)}: {why}", width)
    ]


def _kernels(report: Report, width: int) -> list[str]:
    shown = [(f, s) for f in report.fusions for s in f.segments]
    shown.sort(key=lambda pair: pair[1].backend != REFERENCE)
    if not shown:
        return []
    lines = [
        line
        for fusion, s in shown[:_SEGMENTS]
        for line in (_row(fusion, s, width), *([] if report.void else _measured(s)))
    ]
    return [
        f"segments{'':>{width - 27}}{'flops':>9}{'bytes':>10}",
        *lines,
        *_more(len(shown) - _SEGMENTS),
    ]


def _row(fusion: FusionReport, s: SegmentReport, width: int) -> str:
    mark = "!" if s.backend == REFERENCE else " "
    name = f"{s.id} x {fusion.times}" if fusion.times > 1 else s.id
    head = f"{mark} {name:<16}{s.backend:<10}"
    numbers = f"{amount(s.flops):>9}{amount(_bytes(s), 'B'):>10}"
    ops = textwrap.shorten(
        " ".join(dict.fromkeys(s.ops)),
        max(width - len(head) - len(numbers), 12),
        placeholder=" ...",
    )
    return f"{head}{ops:<{width - len(head) - len(numbers)}}{numbers}"


def _bytes(s: SegmentReport) -> int | None:
    return (
        None if s.bytes_read is None or s.bytes_written is None else s.bytes_read + s.bytes_written
    )


def _measured(s: SegmentReport) -> Iterator[str]:
    if m := s.measured:
        yield f"    {duration(m.seconds)}" + (
            f", {ratio(m.seconds / m.floor)} times its memory bound" if m.floor else ""
        )


def _backends(report: Report, width: int) -> list[str]:
    """Why kernels do not run, or not all that could."""
    reasons = _grouped(
        (s.backend_why, s.id)
        for s in report.segments
        if s.backend != REFERENCE and s.backend_why != "compiles it whole"
    )
    lines = [line for why, ids in reasons for line in _wrapped(f"{_some(ids)}: {why}", width)]
    return ["backends", *lines] if lines else []


def _not_fused(report: Report, width: int) -> list[str]:
    reasons = _grouped(
        (x.why, f"{x.op} x {x.times}" if x.times > 1 else x.op) for x in report.not_fused
    )
    lines = [
        line for why, ops in reasons[:_REASONS] for line in _wrapped(f"{_some(ops)}: {why}", width)
    ]
    return ["not fused", *lines, *_more(len(reasons) - _REASONS)] if lines else []


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(reason, its subjects), starting with the reason that has the most."""
    found: dict[str, list[str]] = {}
    for why, what in pairs:
        found.setdefault(why, []).append(what)
    return sorted(found.items(), key=lambda pair: -len(pair[1]))


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


def _more(n: int) -> Iterator[str]:
    if n > 0:
        yield f"  and {n} more"
