"""Reports as pages: files that load nothing from the network and run no script but their own.

base.html and page.html are templates of Jinja, which escapes every text; here is what a report's
page shows beside the report's data. recorder/ has a page.html of its own.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

from ...messages import amount, count, duration, ratio
from ..data import FusionReport, Listing, Measured, ReportData, SegmentReport
from ..difference import changed_lines, differences
from ..summary import WAYS, after, warnings, what
from .colours import coloured

# of the boxes of segments and between them, pixels; BROAD: of boxes that have no other beside them
WIDTH, BROAD, HEIGHT, APART, BELOW = 168, 320, 62, 12, 34


def page(report: ReportData) -> str:
    """The report as one file of HTML."""
    times = _times(report)
    return rendered(
        _part("page.html"),
        f"fusion_moe.explain{report.of and f': {report.of}'}",
        report=report,
        warnings=list(warnings(report)),
        hues={s.id: (210 + 67 * i) % 360 for i, s in enumerate(report.segments)},
        left_out=_left_out(report),
        listings=[(listing, list(_lines(listing, report))) for listing in report.listings],
        loads=[(fusion.id, load) for fusion in report.fusions for load in fusion.loads],
        times=times,
        longest=max((max(m.seconds, m.floor) for _, m in times), default=0),
    )


def rendered(template: str, title: str, **shown: Any) -> str:
    """The page of a template's text: its content security policy forbids loading anything and
    running any script but the page's own.
    """
    script = _part("script.js")
    text: str = (
        _environment()
        .from_string(template)
        .render(
            title=title,
            script=script,
            digest=b64encode(sha256(script.encode()).digest()).decode(),
            style=_part("style.css"),
            **shown,
        )
    )
    return text


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Any:
    from jinja2 import Environment, FunctionLoader  # which torch needs

    loader = FunctionLoader(_part)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        amount=amount,
        changed=changed_lines,
        coloured=coloured,
        count=count,
        duration=duration,
        ratio=ratio,
    )
    environment.globals.update(
        after=after,
        arrows=_arrows,
        boxes=_boxes,
        changes=_changes,
        ways=WAYS,
        what=what,
    )
    return environment


def _boxes(segments: Sequence[SegmentReport]) -> dict[str, tuple[int, int, int, int]]:
    """Left, top, width and height of each segment's box: below all segments that it reads from."""
    cells: dict[str, tuple[int, int]] = {}
    for s in segments:
        down = max((cells[id][1] + 1 for id in s.after), default=0)
        cells[s.id] = (sum(row == down for _, row in cells.values()), down)
    width = WIDTH if any(across for across, _ in cells.values()) else BROAD
    return {
        id: (across * (width + APART), down * (HEIGHT + BELOW), width, HEIGHT)
        for id, (across, down) in cells.items()
    }


def _arrows(
    segments: Sequence[SegmentReport], boxes: dict[str, tuple[int, int, int, int]]
) -> Iterator[tuple[str, str]]:
    """(class, path) of a curve from each segment to those that read from it, and of its tip."""
    for s in segments:
        left, y, width, height = boxes[s.id]
        x = left + width // 2
        for id in s.after:
            x0, y0 = boxes[id][0] + width // 2, boxes[id][1] + height
            yield "edge", f"M{x0},{y0} C{x0},{y0 + 20} {x},{y - 20} {x},{y - 6}"
        if s.after:
            yield "tip", f"M{x - 5},{y - 8} L{x + 5},{y - 8} L{x},{y} Z"


def _left_out(report: ReportData) -> dict[tuple[str, str], tuple[int, list[str]]]:
    """By operation and reason of the calls that were not fused: how many, and their source
    lines.
    """
    equal: dict[tuple[str, str], tuple[int, list[str]]] = {}
    for x in report.not_fused:
        times, sources = equal.get((x.op, x.why), (0, []))
        new = [x.source] if x.source and x.source not in sources else []
        equal[x.op, x.why] = times + x.times, [*sources, *new]
    return equal


class _Line(NamedTuple):
    """A line of the user's program, as HTML: the segments that are made from it, and why its calls
    were not fused.
    """

    number: int
    html: str
    segments: list[str]
    reasons: list[str]


def _lines(listing: Listing, report: ReportData) -> Iterator[_Line]:
    text = listing.text.rstrip("\n")
    for n, (line, html) in enumerate(
        zip(text.split("\n"), coloured(text).split("\n"), strict=True), listing.first_line
    ):
        start, end = f"{listing.file}:{n}, in ", f": {line.strip()}"

        def here(source: str, start: str = start, end: str = end) -> bool:
            return source.startswith(start) and source.endswith(end)

        left = dict[str, dict[str, None]]()
        for x in report.not_fused:
            if here(x.source):
                left.setdefault(x.why, {})[x.op] = None
        reasons = [f"{', '.join(ops)}: {why}" for why, ops in left.items()]
        segments = [s.id for s in report.segments if any(map(here, s.sources))]
        yield _Line(n, html, segments, reasons)


def _changes(fusion: FusionReport) -> Iterator[tuple[str, list[str]]]:
    """(name, what it changes) of each program of a fusion but the first."""
    texts = list(fusion.programs.items())
    for (_, before), (name, text) in pairwise(texts):
        yield name, differences(before, text)


def _times(report: ReportData) -> list[tuple[str, Measured]]:
    rows: list[tuple[str, Measured | None]] = []
    for f in report.fusions:
        rows += [(s.id, s.measured) for s in f.segments] + [(f"{f.id}, whole", f.measured)]
    return [(name, m) for name, m in rows if m]
