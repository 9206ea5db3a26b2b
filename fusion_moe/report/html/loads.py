"""The rows of each expert, as bars."""

from __future__ import annotations

from ..data import Load, Report
from ..units import count
from .markup import Html, element, section

_SHOWN = 8


def loads(report: Report) -> Html:
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
    said = (
        f"{count(sum(load.rows), 'row')} in {count(len(load.rows), 'group')}, at most {most}, "
        f"{empty} empty"
    )
    return element(
        "div",
        element("p", element("b", name), f": {said}"),
        element("div", *bars, class_="chart"),
        class_="load",
    )
