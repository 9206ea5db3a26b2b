"""The user's program, the IR and the kernels' sources, side by side: lines and blocks are linked to
the segments that they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..data import Listing, ReportData
from ..lines import blocks_of
from .graph import hues
from .markup import Html, element, section

_AT = re.compile(r"(?P<file>.*?):(?P<line>\d+), in (?P<function>.*?): (?P<code>.*)", re.DOTALL)
_Lines = dict[str, list[str]]  # a source line -> the segments that are made from it


def panes(report: ReportData) -> Html:
    """Three panes side by side, or one below the other if there is little room."""
    if not report.fusions:
        return Html("")
    blocks = [(id, text) for fusion in report.fusions for id, text in blocks_of(fusion, "segments")]
    kernels = [(id, text) for fusion in report.fusions for id, text in blocks_of(fusion, "source")]
    colours = hues(report)
    return section(
        "Source, IR, kernels",
        element(
            "div",
            _pane("source", _sources(report)),
            _pane("IR", _blocks(blocks, colours)),
            _pane("kernels", _blocks(kernels, colours)),
            class_="panes",
        ),
    )


def _pane(title: str, content: Iterable[Html]) -> Html:
    return element(
        "div",
        element("h3", title),
        element("div", *content, class_="scroll", tabindex=0),
        class_="pane",
    )


def _blocks(blocks: Sequence[tuple[str, str]], colours: Mapping[str, int]) -> Iterator[Html]:
    for id, text in blocks:
        title, _, body = text.removeprefix("# ").partition("\n")
        yield element(
            "div",
            element("h4", title),
            element("pre", body),
            data_segments=id,
            class_="block",
            style=f"--hue: {colours[id]}",
        )


def _sources(report: ReportData) -> Iterator[Html]:
    segments: _Lines = {}
    for s in report.segments:
        for source in s.sources:
            segments.setdefault(source, []).append(s.id)
    reasons: dict[str, list[str]] = {}
    for x in report.not_fused:
        reasons.setdefault(x.source, []).append(f"{x.op}: {x.why}")
    # the lines alone, if the program's files cannot be read
    alone = filter(None, map(_AT.fullmatch, {**segments, **reasons}))
    listed = report.listings or [Listing(m["file"], int(m["line"]), m["code"]) for m in alone]
    colours = hues(report)
    for listing in listed:
        yield element("h4", f"{listing.file}:{listing.first_line}")
        yield element(
            "pre",
            *(
                _line(
                    number,
                    line,
                    _find(listing, number, line, segments),
                    _find(listing, number, line, reasons),
                    colours,
                )
                for number, line in enumerate(listing.text.splitlines(), listing.first_line)
            ),
        )


def _find(
    listing: Listing, number: int, line: str, of_sources: Mapping[str, list[str]]
) -> list[str]:
    """What `of_sources` has for a line: segments, or reasons."""
    start, end = f"{listing.file}:{number}, in ", f": {line.strip()}"
    return [
        x
        for source, said in of_sources.items()
        if source.startswith(start) and source.endswith(end)
        for x in said
    ]


def _line(
    number: int, line: str, ids: Sequence[str], reasons: Sequence[str], colours: Mapping[str, int]
) -> Html:
    content = element("i", f"{number:>4}"), f" {line}\n"
    if ids:
        style = f"--hue: {colours[ids[0]]}"
        return element(
            "span",
            *content,
            class_="line fused",
            data_segments=" ".join(ids),
            style=style,
            title=", ".join(ids),
        )
    return element(
        "span",
        *content,
        class_=f"line {'left' if reasons else ''}",
        title="\n".join(dict.fromkeys(reasons)) or None,
    )
