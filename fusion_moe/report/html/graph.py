"""The graph of segments: which segment reads from which and why each starts where it does, with the
calls that were not fused beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..data import FusionReport, NotFusedReport, ReportData, SegmentReport
from ..units import duration
from .markup import Html, element, joined, section

_WIDTH, _HEIGHT, _APART, _BELOW = 168, 62, 12, 34  # pixels
_SOURCES = 4  # how many are shown for equal calls
_NARROW = 360  # the width of a phone, where a wider drawing becomes a list


def graph(report: ReportData) -> Html:
    """A box for each segment, and an arrow from each segment to those that read from it."""
    if not report.fusions and not report.not_fused:
        return Html("")
    fusions = (_fusion(fusion, hues(report), not report.void) for fusion in report.fusions)
    note = (
        "Click a segment to find it below; hover to see why it begins there, or why a call was "
        "not fused."
    )
    return section(
        "Segments",
        element("p", note, class_="note"),
        element("div", *fusions, _unfused(report.not_fused), class_="graphs"),
    )


def hues(report: ReportData) -> dict[str, int]:
    """A colour for each segment, in degrees."""
    return {s.id: (210 + 67 * i) % 360 for i, s in enumerate(report.segments)}


def _fusion(fusion: FusionReport, hues: dict[str, int], timed: bool) -> Html:
    places = _places(fusion.segments)
    width = max(x for x, _ in places.values()) + _WIDTH
    height = max(y for _, y in places.values()) + _HEIGHT
    times = f", {fusion.times} times" if fusion.times > 1 else ""
    title = f"{fusion.id}{times}{', backward' if fusion.backward else ''}"
    arrows = element(
        "svg", *_arrows(fusion.segments, places), width=width, height=height, aria_hidden="true"
    )
    boxes = (_box(s, places[s.id], hues[s.id], timed) for s in fusion.segments)
    class_name = "drawing broad" if width > _NARROW else "drawing"
    drawing = element(
        "div", arrows, *boxes, class_=class_name, style=f"width: {width}px; height: {height}px"
    )
    return element("figure", element("figcaption", title), drawing)


def _places(segments: Sequence[SegmentReport]) -> dict[str, tuple[int, int]]:
    """The upper left corner of each segment's box: below all segments that it reads from."""
    depth: dict[str, int] = {}
    places = {}
    for s in segments:
        depth[s.id] = max((depth[id] + 1 for id in s.after), default=0)
        across = sum(d == depth[s.id] for d in depth.values()) - 1
        places[s.id] = (across * (_WIDTH + _APART), depth[s.id] * (_HEIGHT + _BELOW))
    return places


def _arrows(
    segments: Sequence[SegmentReport], places: dict[str, tuple[int, int]]
) -> Iterator[Html]:
    for s in segments:
        x, y = places[s.id][0] + _WIDTH // 2, places[s.id][1]
        for id in s.after:
            x0, y0 = places[id][0] + _WIDTH // 2, places[id][1] + _HEIGHT
            yield element(
                "path", d=f"M{x0},{y0} C{x0},{y0 + 20} {x},{y - 20} {x},{y - 6}", class_="edge"
            )
        if s.after:
            yield element("path", d=f"M{x - 5},{y - 8} L{x + 5},{y - 8} L{x},{y} Z", class_="tip")


def _box(s: SegmentReport, place: tuple[int, int], hue: int, timed: bool) -> Html:
    second_line = duration(s.measured.seconds) if timed and s.measured else s.kind
    why = f"after {', '.join(s.after)}: {s.boundary}" if s.after else "reads from no other segment"
    style = (
        f"left: {place[0]}px; top: {place[1]}px; width: {_WIDTH}px; height: {_HEIGHT}px; "
        f"--hue: {hue}"
    )
    return element(
        "button",
        element("b", s.id),
        element("span", f"{s.backend}, {second_line}"),
        element("small", " ".join(dict.fromkeys(s.ops))),
        tip(why),
        type="button",
        class_=f"box {'plain' if s.backend == 'reference' else ''}",
        style=style,
        data_segments=s.id,
        aria_pressed="false",
    )


def _unfused(calls: Sequence[NotFusedReport]) -> Html | None:
    """A box for calls with the same operation and the same reason."""
    if not calls:
        return None
    equal: dict[tuple[str, str], list[NotFusedReport]] = {}
    for x in calls:
        equal.setdefault((x.op, x.why), []).append(x)
    boxes = (_call(op, why, found) for (op, why), found in equal.items())
    return element(
        "figure", element("figcaption", "not fused"), element("ul", *boxes, class_="unfused")
    )


def _call(op: str, why: str, calls: Sequence[NotFusedReport]) -> Html:
    times, sources = (
        sum(x.times for x in calls),
        list(dict.fromkeys(x.source for x in calls if x.source)),
    )
    places = [
        *(element("code", source) for source in sources[:_SOURCES]),
        *(["..."] if len(sources) > _SOURCES else []),
    ]
    return element(
        "li",
        element("b", f"{op} x {times}" if times > 1 else op),
        tip(joined([why, *places])),
        tabindex=0,
    )


def tip(text: str) -> Html:
    """A tooltip, shown while the element around it is hovered or focused."""
    return element("span", text, class_="tip", role="tooltip")
