"""Output of text: the width of the terminal, colours for rich, files that appear whole or not at
all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError


def columns() -> int:
    """The width of the terminal, 80 without one, limited to what can be read well."""
    return fitting(shutil.get_terminal_size().columns)


def fitting(width: int) -> int:
    """`width`, limited to 70 to 120 columns."""
    return min(max(width, 70), 120)


def coloured(text: str) -> Any:
    """A rich Text: headings are bold, lines that start with "!" are yellow. rich colours only on
    terminals.
    """
    from rich.text import Text

    made = Text(text)
    made.highlight_regex(r"(?m)^\S.*$", "bold")
    made.highlight_regex(r"(?m)^\s*!.*$", "yellow")
    return made


class Shown:
    """An object to look at: as text in a terminal, as a page in a notebook."""

    def _text(self, width: int) -> str:
        """Text of at most `width` columns."""
        raise NotImplementedError

    def _page(self) -> str:
        """A page in one file."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Text as wide as the terminal, without colours: `rich.print` adds them."""
        return self._text(columns())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield coloured(self._text(fitting(options.max_width)))

    def _repr_html_(self) -> str:
        from .html import frame

        return frame(self._page())


def save(path: str | Path, what: str, formats: Mapping[str, Callable[[], str]]) -> None:
    """Writes the text in the format of a path's suffix; OptionError for a suffix not in `formats`,
    and for a folder that does not exist.
    """
    path = Path(path)
    if path.suffix not in formats:
        *some, last = formats
        found = f"{what} as {path.suffix or 'a file without a suffix'}"
        raise OptionError(found, expected=f"{', '.join(some)} or {last}", where=str(path))
    if not path.parent.is_dir():
        raise OptionError(f"no folder {path.parent}", expected="one that is there", where=str(path))
    text = formats[path.suffix]()
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=".", ignore_cleanup_errors=True
    ) as scratch:
        part = Path(scratch, path.name)  # in a shared folder too, nobody else can put a link there
        part.write_text(text, encoding="utf-8")
        part.replace(path)
