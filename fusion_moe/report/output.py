"""Where text goes: how wide the terminal is, colours for rich, files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError


def columns() -> int:
    """As wide as the terminal, 80 without one, as far as text can be read."""
    return fitting(shutil.get_terminal_size().columns)


def fitting(width: int) -> int:
    """A number of columns from 70 to 120."""
    return min(max(width, 70), 120)


def coloured(text: str) -> Any:
    """A rich Text: headings bold, lines that start with "!" yellow. rich colours on terminals only."""
    from rich.text import Text

    made = Text(text)
    made.highlight_regex(r"(?m)^\S.*$", "bold")
    made.highlight_regex(r"(?m)^\s*!.*$", "yellow")
    return made


class Shown:
    """What people look at: text in a terminal, a page in a notebook."""

    def _text(self, width: int) -> str:
        """Text of at most `width` columns."""
        raise NotImplementedError

    def _page(self) -> str:
        """A page in one file."""
        raise NotImplementedError

    def __str__(self) -> str:
        """As wide as the terminal, without colours: `rich.print` has them."""
        return self._text(columns())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield coloured(self._text(fitting(options.max_width)))

    def _repr_html_(self) -> str:
        from .html import frame

        return frame(self._page())


def save(path: str | Path, what: str, formats: Mapping[str, Callable[[], str]]) -> None:
    """Writes the text of a path's suffix; OptionError for a suffix that `formats` lacks, and for a folder that is not there."""
    path = Path(path)
    if path.suffix not in formats:
        *some, last = formats
        found = f"{what} as {path.suffix or 'a file without a suffix'}"
        raise OptionError(found, expected=f"{', '.join(some)} or {last}", where=str(path))
    if not path.parent.is_dir():
        raise OptionError(f"no folder {path.parent}", expected="one that is there", where=str(path))
    text = formats[path.suffix]()
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
