"""The kernels' times as bars, with their memory bounds inside."""

from __future__ import annotations

from collections.abc import Iterator

from ..data import Measured, Report
from ..units import amount, duration, ratio
from .markup import Html, element, section


def times(report: Report) -> Html:
    """Bars on one scale; if nothing was measured, how to measure."""
    rows = list(_measured(report))
    if not rows:
        said = "Not measured: fusion_moe.explain(..., measure=True)." if report.fusions else ""
        return section("Times", element("p", said, class_="note")) if said else Html("")
    if report.void:
        return section("Times", element("p", "Void: ", report.void, class_="note"))
    longest = max(max(m.seconds, m.floor) for _, m in rows)
    said = (
        "Filled: the time to read the kernel's bytes, its memory bound. Outlined: what it took "
        "beyond that."
    )
    return section(
        "Times",
        element("p", said, class_="note"),
        *_machine(report),
        *(_bar(name, m, longest) for name, m in rows),
    )


def _machine(report: Report) -> Iterator[Html]:
    if m := report.machine:
        where = m.gpu or f"{m.cpu}, {m.threads} threads"
        yield element("p", f"{where}; reads {amount(m.bytes_per_second, 'B/s')}", class_="note")


def _measured(report: Report) -> Iterator[tuple[str, Measured]]:
    for fusion in report.fusions:
        yield from ((s.id, s.measured) for s in fusion.segments if s.measured)
        if fusion.measured:
            yield f"{fusion.id}, whole", fusion.measured


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
