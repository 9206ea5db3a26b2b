"""Lines of programs and sources: the changes between two texts, and the segments that lines belong
to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from .data import FusionReport


def differences(before: str, now: str) -> list[str]:
    """Lines that start with "+", "-" or " ", and "..." for lines left out. Values that differ only
    in their number count as the same.
    """
    old, new = before.splitlines(), now.splitlines()
    matcher = SequenceMatcher(None, _unnumbered(old), _unnumbered(new), autojunk=False)
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(2):
        lines.append("...")
        for tag, i, i1, j, j1 in group:
            if tag == "equal":
                lines += [f"  {line}" for line in new[j:j1]]
            else:
                lines += [f"- {line}" for line in old[i:i1]] + [f"+ {line}" for line in new[j:j1]]
    return lines[1:]


def _unnumbered(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"\b[tie]\d+\b", "_", line) for line in lines]


def changed_lines(lines: Sequence[str]) -> str:
    """A summary of the result of `differences`, as "3 lines more, 2 less"; "" if there is no
    change.
    """
    more, less = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"{more} lines more, {less} less" if lines else ""


def blocks_of(fusion: FusionReport, stage: str) -> Iterator[tuple[str, str]]:
    """(segment, its text) of a stage that has a block for each segment, which starts with "#
    <segment>: ".
    """
    text = dict(fusion.stages)[stage]
    starts, at = [], 0
    for s in fusion.segments:
        at = text.index(f"# {s.id}: ", at)
        starts.append(at)
    for s, start, end in zip(fusion.segments, starts, [*starts[1:], len(text)], strict=True):
        yield s.id, text[start:end].rstrip()
