"""The head of the page: what was explained, how much of it is fused, and what to know first."""

from __future__ import annotations

from collections.abc import Iterator

from ..data import ReportData
from ..summary import warnings, what
from ..units import amount
from .markup import Html, element


def heading(report: ReportData) -> Html:
    """Title, shares, warnings."""
    options = ", ".join(f"{name} = {value}" for name, value in report.options)
    version = f"fusion_moe {report.version}{f'; {options}' if options else ''}"
    texts = [*warnings(report)]
    if not report.fusions:
        texts.append(f"nothing was fused: {report.why_nothing}")
    return element(
        "header",
        element("h1", "fusion_moe.explain"),
        element("p", what(report, with_segments=True), class_="lead"),
        element("div", *_tiles(report), class_="tiles"),
        *(element("p", text, class_="warning") for text in texts),
        element("p", version, class_="note"),
    )


def _tiles(report: ReportData) -> Iterator[Html]:
    for name, share, unit in (("flops", report.flops, ""), ("bytes", report.bytes, "B")):
        text = f"{name} fused: {amount(share.fused, unit)} of {amount(share.total, unit)}"
        percent = 100 * (share.fused or 0) / share.total if share.total else None
        yield _tile(str(share), text, percent)
    yield _tile(f"{report.fused_calls} of {report.calls}", "calls fused", None)


def _tile(number: str, name: str, percent: float | None) -> Html:
    bar = None
    if percent is not None:
        bar = element("div", element("div", style=f"width: {percent:.1f}%"), class_="share")
    return element("div", element("strong", number), bar, element("span", name), class_="tile")
