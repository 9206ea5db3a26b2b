"""The stages of each fusion: the first in full, the others as changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..data import FusionReport, ReportData
from ..lines import changed_lines, differences
from .markup import Html, element, section

_WHOLE = ("schedules", "choice")  # these are not programs
_IN_PANES = ("segments", "source")


def stages(report: ReportData) -> Html:
    """The stages, folded until they are opened."""
    if not report.fusions:
        return Html("")
    return section("Stages", *(part for fusion in report.fusions for part in _fusion(fusion)))


def _fusion(fusion: FusionReport) -> Iterator[Html]:
    yield element("h3", fusion.id)
    before = ""
    for name, text in fusion.stages:
        if name in _IN_PANES:
            continue
        if not before or name in _WHOLE:
            yield element("details", element("summary", name), element("pre", text))
        else:
            yield _changed(name, differences(before, text))
        before = text if name not in _WHOLE else before


def _changed(name: str, lines: Sequence[str]) -> Html:
    if not lines:
        return element("p", f"{name}: unchanged", class_="unchanged")
    title = element("summary", f"{name}: {changed_lines(lines)}")
    return element("details", title, element("pre", *map(_coloured, lines)))


def _coloured(line: str) -> Html:
    kinds = {"+": "more", "-": "less", ".": "at"}
    return element("span", f"{line}\n", class_=kinds.get(line[:1]))
