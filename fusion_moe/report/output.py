"""Output of text: the width of the terminal, colours for rich; and files, which appear whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from ..messages import check_writable
from ..runtime import store


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


class Document(Shown):
    """An object that is also saved, and shown in notebooks. Subclasses say what errors call it, and
    what files have of it by the ends of their names.
    """

    _kind: ClassVar[str]
    _forms: ClassVar[Mapping[str, Callable[[Any], str]]]

    @classmethod
    def form_of(cls, path: str | Path) -> Callable[[Any], str]:
        """The form that a file has by its name. OptionError for another name, and where no file
        can be made.
        """
        path = Path(path)
        form = next((form for end, form in cls._forms.items() if path.name.endswith(end)), None)
        check_writable(path, cls._kind, cls._forms)
        assert form
        return form

    def _save(self, path: str | Path) -> None:
        text = self.form_of(path)(self)
        # in a shared folder too, nobody else can put a link into the place of this file
        with store.whole(Path(path)) as result:
            result.write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page inside of a notebook, isolated from the rest of it."""
        style = "width: 100%; height: 42rem; border: 1px solid #8888"
        return (
            f'<iframe sandbox="allow-scripts" title="fusion_moe report" style="{style}" '
            f'srcdoc="{escape(self._forms[".html"](self))}"></iframe>'
        )
