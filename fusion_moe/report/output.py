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


def fitting(width: int) -> int:
    """`width`, limited to 70 to 120 columns."""
    return min(max(width, 70), 120)


def coloured(text: str) -> Any:
    """A rich Text: headings are bold, lines that start with "!" are yellow. rich colours only on
    terminals.
    """
    from rich.text import Text

    rich = Text(text)
    rich.highlight_regex(r"(?m)^\S.*$", "bold")
    rich.highlight_regex(r"(?m)^\s*!.*$", "yellow")
    return rich


class Shown:
    """An object to look at, as text in a terminal."""

    def text(self, width: int) -> str:
        """Text of at most `width` columns."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Text as wide as the terminal, without colours: `rich.print` adds them."""
        return self.text(fitting(shutil.get_terminal_size().columns))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield coloured(self.text(fitting(options.max_width)))


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
