"""A difference as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from .difference import Change, Difference, SegmentChange
from .units import count


def text(found: Difference, width: int) -> str:
    """Text of at most `width` columns, 70 or more."""
    title = (
        f"fusion_moe.diff: {count(len(found.segments), 'segment')} changed, {found.unchanged} not"
    )
    parts = [
        [title if found else "fusion_moe.diff: nothing differs"],
        _section("asked", _rows(found.asked, width)),
        _section("fused", _rows(found.fused, width)),
        _section("segments", (line for s in found.segments for line in _segment(s, width))),
        _section(
            "not fused", (line for change in found.not_fused for line in _call(change, width))
        ),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [title, *found] if found else []


def _rows(changes: Iterable[Change], width: int, indent: str = "  ") -> Iterator[str]:
    for change in changes:
        said = (
            f"{change.before or 'none'} -> {change.after or 'none'}"
            if change.name not in ("IR", "source")
            else change.after
        )
        yield from textwrap.wrap(
            said,
            width,
            initial_indent=f"{indent}{change.name:<20}",
            subsequent_indent=f"{indent}{'':20}",
            break_long_words=False,
        )


def _segment(s: SegmentChange, width: int) -> Iterator[str]:
    if not (s.before and s.after):
        sign = "-" if s.before else "+"
        yield from textwrap.wrap(
            f"{s.before or s.after}: {' '.join(s.ops)}",
            width,
            initial_indent=f"{sign} ",
            subsequent_indent="    ",
        )
        return
    yield f"  {s.before}" if s.before == s.after else f"  {s.before} -> {s.after}"
    yield from _rows(s.changes, width, "    ")


def _call(change: Change, width: int) -> Iterator[str]:
    sign = "+" if not change.before else "-" if not change.after else " "
    times = (
        f" ({change.before} -> {change.after})"
        if change.before and change.after
        else f" ({change.before or change.after})"
    )
    yield from textwrap.wrap(
        f"{change.name}{times}",
        width,
        initial_indent=f"{sign} ",
        subsequent_indent="    ",
        break_long_words=False,
    )
