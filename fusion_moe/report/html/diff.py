"""The HTML page of a difference."""

from __future__ import annotations

from collections.abc import Sequence

from ..difference import Change, Difference, SegmentChange
from ..units import count
from .differences import folded
from .markup import Html, element, joined, section
from .page import document
from .segments import table


def diff_page(found: Difference) -> str:
    """The whole file, as self-contained as the page of a report."""
    said = (
        f"{count(len(found.segments), 'segment')} changed, {found.unchanged} not"
        if found
        else "Nothing differs."
    )
    parts = (
        element("header", element("h1", "fusion_moe.diff"), element("p", said, class_="lead")),
        _section("Asked", found.asked),
        _section("Fused", found.fused),
        _segments(found.segments),
        _section("Not fused", found.not_fused),
    )
    return document("fusion_moe.diff", joined(parts))


def _section(title: str, changes: Sequence[Change]) -> Html | None:
    return section(title, _table(changes)) if changes else None


def _table(changes: Sequence[Change]) -> Html:
    rows = ((c.name, c.before or "none", c.after or "none") for c in changes)
    return element("div", table(("", "before", "after"), rows), class_="changes")


def _segments(changed: Sequence[SegmentChange]) -> Html | None:
    return (
        section("Segments", *(part for s in changed for part in _segment(s))) if changed else None
    )


def _segment(s: SegmentChange) -> Sequence[Html]:
    if not (s.before and s.after):
        said = f"only before: {s.before}" if s.before else f"only after: {s.after}"
        return (element("h3", said), element("p", " ".join(s.ops), class_="note"))
    lines = {"IR": s.ir, "source": s.source}
    facts = [c for c in s.changes if c.name not in lines]
    folds = (folded(f"{c.name}: {c.after}", lines[c.name]) for c in s.changes if c.name in lines)
    return (
        element("h3", s.after if s.before == s.after else f"{s.before} → {s.after}"),
        *([_table(facts)] if facts else []),
        *folds,
    )
