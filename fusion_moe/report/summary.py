"""The report on one screen: how much is fused, what runs in plain torch, what was not fused and
why, and where to look next.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..frontends.float_experts import advice
from ..messages import amount, count, duration, ratio, some
from ..passes.canonicalize import PRODUCTS
from ..schedule.plan import REFERENCE
from .data import FusionReport, ReportData, SegmentReport, total

_SEGMENTS, _REASONS, _LINES = 8, 6, 3  # how many of each are shown; lines of a reason
NEXT = (
    ("report.details()", "every type, source line and boundary"),
    ('report.save("report.html")', "source, IR and kernels side by side"),
)


def summary(report: ReportData, width: int, next: Iterable[tuple[str, str]] = NEXT) -> str:
    """Text of at most `width` columns, 70 or more. next: what shows more, with a description."""
    shares = ["fused", f"  nothing: {report.why_nothing}"]
    if report.fusions:
        message = (
            f"  {share!s:>5} of {name:<8}{amount(share.fused, unit)} of {amount(share.total, unit)}"
            for name, unit, share in (("flops", "", report.flops), ("bytes", "B", report.bytes))
        )
        shares = ["fused", *message, f"  {report.fused_calls} of {count(report.calls, 'call')}"]
    marked = textwrap.TextWrapper(
        width, initial_indent="! ", subsequent_indent="  ", break_long_words=False
    )
    backends = (
        (s.backend_why, s.id)
        for s in report.segments
        if not is_plain(s) and s.backend_why != "compiles it whole"
    )
    not_fused = ((x.why, x.op if x.times == 1 else f"{x.op} x {x.times}") for x in report.not_fused)
    steps = (
        line
        for step in report.advice
        for line in textwrap.wrap(
            step, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False
        )
    )
    of = textwrap.shorten(report.of, width - 2, placeholder=" ...")
    looks = (f"  {name:<28}{text}" for name, text in next)
    parts = [
        [f"fusion_moe.explain: {what(report)}", *([f"  {of}"] if of else [])],
        times(report),
        ["do next", *steps] if report.advice else [],
        shares,
        [line for text in warnings(report) for line in marked.wrap(text)],
        _kernels(report, width),
        _reasons("backends", backends, width),
        _reasons("not fused", not_fused, width),
        _reasons("bits of a row that may depend on its batch", _by_batch(report), width),
        ["look next", *looks] if report.calls or report.not_fused else [],
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
    if report.options.get("order") == "row":
        where += ", no row changes another one's bits"
    if failed := len({x.op for x in report.not_fused if x.broken}):
        where += f", {count(failed, 'translator')} failed"
    return f"{count(report.graphs, 'graph')}, {fusions} for {where}"


WAYS = {
    "here": "the programs of this call",
    "unfused": "the same, each operation a kernel of its own",
    "bf16": "torch's products alone, weights in bf16",
}


def times(report: ReportData) -> list[str]:
    """How long the programs of a call take, and other ways to compute the same; which kernels take
    most of it.
    """
    seconds = report.call_seconds
    if not seconds:
        return []
    here = seconds["here"]
    lines = [
        f"  {way:<10}{duration(took):>8}"
        + (f"  {took / here:>5.3g}x as long" if way != "here" else " " * 17)
        + f"  {WAYS[way]}"
        for way, took in seconds.items()
    ]
    most = sorted(report.time_shares.items(), key=lambda pair: -pair[1])[:4]
    return ["time", *lines, "  kernels   " + ", ".join(f"{id} {share:.0%}" for id, share in most)]


def warnings(report: ReportData) -> Iterator[str]:
    """What to know first: experts in floats, segments that no kernel computes, times that mean
    nothing.
    """
    if report.float_experts:
        yield advice(report.float_experts)
    if report.requantized:
        yield report.requantized
    for why, ids in _grouped((s.backend_why, s.id) for s in report.segments if is_plain(s)):
        yield f"plain torch runs {some(ids)}: {why}"
    if report.void:
        yield f"times are void: {report.void}"


def after(s: SegmentReport) -> str:
    """Why a segment begins where it does."""
    return f"after {', '.join(s.after)}: {s.boundary}" if s.after else "reads from no other segment"


def is_plain(s: SegmentReport) -> bool:
    """Whether plain torch computes a segment."""
    return s.backend == REFERENCE


def _by_batch(report: ReportData) -> Iterator[tuple[str, str]]:
    """(why, segment or call) for what adds up in an order that depends on the number of rows."""
    if report.options.get("order") != "row":
        why = "the order of a product's sums is chosen by the number of rows; order='row' fixes it"
        yield from ((why, s.id) for s in report.segments if {*s.ops} & {*PRODUCTS})
    yield from (("torch chooses the kernel by sizes", op) for op in report.chosen_by_sizes)


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


def _reasons(title: str, pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    """(reason, its subject), those with the same reason together."""
    reasons = _grouped(pairs)
    lines = [
        line
        for why, subjects in reasons[:_REASONS]
        for line in textwrap.wrap(
            f"{some(subjects)}: {why}",
            width,
            initial_indent="  ",
            subsequent_indent="    ",
            max_lines=_LINES,
            placeholder=" ...",
        )
    ]
    return [title, *lines, *_more(len(reasons) - _REASONS)] if lines else []


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(reason, its subjects), starting with the reason that has the most."""
    groups = defaultdict[str, list[str]](list)
    for why, subject in pairs:
        groups[why].append(subject)
    most = sorted(groups.items(), key=lambda pair: -len(pair[1]))
    return [(why, list(dict.fromkeys(subjects))) for why, subjects in most]


def _more(n: int) -> list[str]:
    return [f"  and {n} more"] if n > 0 else []
