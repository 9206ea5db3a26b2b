"""Docstrings here are plain text with `code` between backticks, not reStructuredText: this makes
them that, for autodoc.

`Args:`, `Returns:`, `Raises:` and `Attributes:` begin sections, whose lines `name, other: text` are
items of a list. Other indented paragraphs and doctests become code. In prose, a line that begins
with parameters of the function or class, `target, gpu: ...`, begins an item too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

CODE = re.compile(r"``?([^`]+)``?")
# what means something there, at the ends of lines too
SPECIAL = re.compile(r"([\\*_|]|^[^\w\s`(\[]|:(?=:?$))", re.MULTILINE)
LETTER = re.compile(r"(?=\w)")
ITEM = re.compile(r"(?P<names>\w+(?:, \w+)*): ")
SECTION = re.compile(r"(Args|Returns|Raises|Attributes):$")


def marked(text: str) -> str:
    """Prose: what stands between backticks, over the end of a line too, is code; all else is
    itself.
    """
    parts = CODE.split(text)
    return "".join(
        f"``{' '.join(part.split())}``"
        if i % 2
        else ("\\ " if i and LETTER.match(part) else "") + SPECIAL.sub(r"\\\1", part)
        for i, part in enumerate(parts)
    )


def items(paragraph: list[str], parameters: Collection[str]) -> Iterator[tuple[str, str]]:
    """The prose before the first parameter, then what is said of each: (names, text)."""
    names, lines = "", list[str]()
    for line in paragraph:
        found = ITEM.match(line)
        if found and set(found["names"].split(", ")) <= set(parameters):
            yield names, "\n".join(lines)
            names, lines, line = found["names"], [], line[found.end() :]
        lines.append(line.strip())
    yield names, "\n".join(lines)


def section(paragraph: list[str]) -> Iterator[str]:
    """A section as a field: its items, or prose."""
    depth = len(paragraph[1]) - len(paragraph[1].lstrip())
    entries: list[list[str]] = []
    for line in paragraph[1:]:
        if line[depth:].startswith(" ") and entries:
            entries[-1].append(line.strip())
        else:
            entries.append([line.strip()])
    yield from (f":{paragraph[0]}", "")
    for first, *rest in entries:
        named = ITEM.match(first)
        head = ", ".join(f"``{name}``" for name in named["names"].split(", ")) if named else ""
        text = marked("\n".join([first[named.end() :] if named else first, *rest]))
        entry = f"- {head}: {text}" if named else text
        yield from (f"    {line}" for line in entry.replace("\n", "\n  ").split("\n"))
    yield ""


def as_rst(lines: list[str], parameters: Collection[str]) -> Iterator[str]:
    """The lines of a docstring as reStructuredText."""
    for filled, run in groupby(lines, lambda line: bool(line.strip())):
        if not filled:
            continue
        paragraph = list(run)
        if SECTION.match(paragraph[0]):
            yield from section(paragraph)
            continue
        if paragraph[0].startswith((" ", ">>>")):
            language = "pycon" if paragraph[0].lstrip().startswith(">>>") else "none"
            yield from (
                "",
                f".. code-block:: {language}",
                "",
                *(f"    {line}" for line in paragraph),
                "",
            )
            continue
        if paragraph[0].startswith("- "):
            yield from (
                line[: -len(rest)] + marked(rest)
                for line in paragraph
                if (rest := line.lstrip(" -"))
            )
            yield ""
            continue
        for names, text in items(paragraph, parameters):
            if names:
                said = f"- {', '.join(f'``{name}``' for name in names.split(', '))}: {marked(text)}"
                yield from (said.replace("\n", "\n  ").split("\n"))
            elif text:
                yield from (*marked(text).split("\n"), "")
        yield ""


def _parameters(of: Any) -> Collection[str]:
    try:
        return inspect.signature(of).parameters
    except (TypeError, ValueError):
        return ()


def process(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines, _parameters(of))


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
