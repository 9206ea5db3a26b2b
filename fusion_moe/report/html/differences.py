"""The stages of each fusion: the first whole, of the others what they change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from ..data import FusionReport, Report
from .markup import Html, element, section

_WHOLE = ("schedules", "choice")  # these are no programs
_IN_PANES = ("segments", "source")


def stages(report: Report) -> Html:
    """Closed until they are wanted."""
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
    more, less = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return element("details", element("summary", f"{name}: {more} lines more, {less} less"), element("pre", *map(_coloured, lines)))


def differences(before: str, now: str) -> list[str]:
    """Lines that start with "+", "-" or " ", and "..." where some are left out. Values that only have another number are the same."""
    old, new = before.splitlines(), now.splitlines()
    groups = SequenceMatcher(None, _unnumbered(old), _unnumbered(new), autojunk=False).get_grouped_opcodes(2)
    return [line for group in groups for line in ("...", *_group(group, old, new))][1:]


def _group(group: Sequence[tuple[str, int, int, int, int]], old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    for kind, i, i1, j, j1 in group:
        if kind == "equal":
            yield from (f"  {line}" for line in new[j:j1])
        else:
            yield from (f"- {line}" for line in old[i:i1])
            yield from (f"+ {line}" for line in new[j:j1])


def _unnumbered(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"\b[ti]\d+\b", "_", line) for line in lines]


def _coloured(line: str) -> Html:
    kinds = {"+": "more", "-": "less", ".": "at"}
    return element("span", f"{line}\n", class_=kinds.get(line[:1]))
