"""The head of the page: what was explained, how much of it is fused, and what to know first."""

from __future__ import annotations

from collections.abc import Iterator

from ...frontends.float_experts import advice
from ...schedule.plan import REFERENCE
from ..data import Report, Share
from ..units import amount, count
from .markup import Html, element, joined


def heading(report: Report) -> Html:
    """Title, shares, warnings."""
    fusions, segments = (
        sum(f.times for f in report.fusions),
        sum(len(f.segments) * f.times for f in report.fusions),
    )
    what = (
        f"{count(report.graphs, 'graph')}, {count(fusions, 'fusion')} with "
        f"{count(segments, 'segment')} for {report.target}"
    )
    return element(
        "header",
        element("h1", "fusion_moe.explain"),
        element("p", what, "" if report.executed else " (emitted, unexecuted)", class_="lead"),
        element("div", *_tiles(report), class_="tiles"),
        *(element("p", text, class_="warning") for text in _warnings(report)),
        _settings(report),
    )


def _tiles(report: Report) -> Iterator[Html]:
    yield _share("flops fused", report.flops, "")
    yield _share("bytes fused", report.bytes, "B")
    yield _tile(f"{report.fused_calls} of {report.calls}", "calls fused", None)


def _share(name: str, share: Share, unit: str) -> Html:
    said = f"{name}: {amount(share.fused, unit)} of {amount(share.total, unit)}"
    return _tile(str(share), said, 100 * (share.fused or 0) / share.total if share.total else None)


def _tile(number: str, name: str, percent: float | None) -> Html:
    bar = (
        None
        if percent is None
        else element("div", element("div", style=f"width: {percent:.1f}%"), class_="share")
    )
    return element("div", element("strong", number), bar, element("span", name), class_="tile")


def _warnings(report: Report) -> Iterator[str]:
    if report.float_experts:
        yield advice(report.float_experts)
    reasons = dict.fromkeys(s.backend_why for s in report.segments if s.backend == REFERENCE)
    for why in reasons:
        ids = [s.id for s in report.segments if s.backend == REFERENCE and s.backend_why == why]
        yield f"plain torch runs {', '.join(ids)}: {why}"
    if report.void:
        yield f"times are void: {report.void}"
    if not report.fusions:
        yield f"nothing was fused: {report.why_nothing}"


def _settings(report: Report) -> Html:
    options = ", ".join(f"{name} = {value}" for name, value in report.options)
    return element(
        "p",
        joined([f"fusion_moe {report.version}", f"; {options}" if options else ""]),
        class_="note",
    )
