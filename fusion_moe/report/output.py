"""Output of text: the width of the terminal, and colours for rich."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any


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
