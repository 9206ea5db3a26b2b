"""The costs of each segment and what runs it, the kernels that CUDA launches, times as bars with
their memory bounds inside, and the rows of each expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..data import FusionReport, Load, Measured, ReportData, SegmentReport
from ..units import amount, count, duration, ratio
from .markup import Html, element, section

_COSTS = ("segment", "flops", "read", "written", "avoided", "flop/B", "backend", "why")


def segments(report: ReportData) -> Html:
    """A table of all segments."""
    if not report.fusions:
        return Html("")
    return section("Costs of one call", table(_COSTS, map(_row, report.segments)))


def launches(report: ReportData) -> Html:
    """CUDA's kernels for the sizes of the call and for other sizes, if there are any."""
    rows = [
        (s.id, f.gpu, amount(f.workspace, "B"), s.launched)
        for f in report.fusions
        for s in f.segments
        if s.launched
    ]
    if not rows:
        return Html("")
    others = map(_other_sizes, (fusion for fusion in report.fusions if fusion.launched_at))
    return section("Launches", table(("segment", "GPU", "workspace", "kernels"), rows), *others)


def _other_sizes(fusion: FusionReport) -> Html:
    """The kernels of a fusion's segments for other values of its open size."""
    ((symbol, _),) = fusion.sizes
    rows = ((f"{size:,}", *kernels) for size, kernels in fusion.launched_at)
    shown = table((symbol, *(s.id for s in fusion.segments)), rows)
    return element("details", element("summary", f"{fusion.id}, for other sizes {symbol}"), shown)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table that scrolls if it is too wide."""
    cells = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    return element(
        "div",
        element("table", element("tr", *(element("th", name) for name in head)), *cells),
        class_="wide",
        tabindex=0,
    )


def _row(s: SegmentReport) -> Sequence[str]:
    costs = (amount(n, "B") for n in (s.bytes_read, s.bytes_written, s.bytes_avoided))
    return (
        s.id,
        amount(s.flops),
        *costs,
        "?" if s.intensity is None else f"{s.intensity:.3g}",
        s.backend,
        s.backend_why,
    )


def times(report: ReportData) -> Html:
    """Bars on one scale; if nothing was measured, how to measure."""
    rows = []
    for f in report.fusions:
        rows += [(s.id, s.measured) for s in f.segments] + [(f"{f.id}, whole", f.measured)]
    measured = [(name, m) for name, m in rows if m]
    if not measured:
        note = "Not measured: fusion_moe.explain(..., measure=True)." if report.fusions else ""
        return section("Times", element("p", note, class_="note")) if note else Html("")
    if report.void:
        return section("Times", element("p", "Void: ", report.void, class_="note"))
    where = None
    if m := report.machine:
        name = m.gpu or f"{m.cpu}, {m.threads} threads"
        where = element("p", f"{name}; reads {amount(m.bytes_per_second, 'B/s')}", class_="note")
    longest = max(max(m.seconds, m.floor) for _, m in measured)
    note = (
        "Filled: the time to read the kernel's bytes, its memory bound. Outlined: what it took "
        "beyond that."
    )
    return section(
        "Times",
        element("p", note, class_="note"),
        where,
        *(_bar(name, m, longest) for name, m in measured),
    )


def _bar(name: str, m: Measured, longest: float) -> Html:
    whole, floor = (f"width: {100 * seconds / longest:.2f}%" for seconds in (m.seconds, m.floor))
    against = f", {ratio(m.seconds / m.floor)} x memory bound" if m.floor else ""
    bar = element(
        "div",
        element("div", class_="took", style=whole),
        element("div", class_="floor", style=floor),
        class_="bar",
    )
    return element(
        "div", element("b", name), bar, element("span", duration(m.seconds), against), class_="time"
    )


_SHOWN = 8


def loads(report: ReportData) -> Html:
    """A chart for each run of a program; none if loads were not recorded."""
    charts = [_chart(f"{f.id}, {load.partition}", load) for f in report.fusions for load in f.loads]
    if not charts:
        return Html("")
    rest = (
        element("details", element("summary", f"{len(charts) - _SHOWN} more"), *charts[_SHOWN:])
        if len(charts) > _SHOWN
        else None
    )
    return section("Rows of each expert", *charts[:_SHOWN], rest)


def _chart(name: str, load: Load) -> Html:
    most = max(load.rows, default=0)
    heights = ((i, n, f"height: {100 * n / max(most, 1):.0f}%") for i, n in enumerate(load.rows))
    bars = (
        element("i", style=style, title=f"expert {i}: {count(n, 'row')}") for i, n, style in heights
    )
    empty = sum(not n for n in load.rows)
    text = (
        f"{count(sum(load.rows), 'row')} in {count(len(load.rows), 'group')}, at most {most}, "
        f"{empty} empty"
    )
    return element(
        "div",
        element("p", element("b", name), f": {text}"),
        element("div", *bars, class_="chart"),
        class_="load",
    )
