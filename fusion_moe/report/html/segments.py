"""The cost of each segment and what runs it; the kernels that CUDA launches for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..data import FusionReport, Report, SegmentReport
from ..units import amount
from .markup import Html, element, section

_COSTS = ("segment", "flops", "read", "written", "avoided", "flop/B", "backend", "why")


def segments(report: Report) -> Html:
    """A table of all segments."""
    if not report.fusions:
        return Html("")
    return section("Costs of one call", table(_COSTS, map(_row, report.segments)))


def launches(report: Report) -> Html:
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
