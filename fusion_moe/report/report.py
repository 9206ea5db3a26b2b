"""The report that users see: its data, and the forms in which it is shown and saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import OptionError
from .data import ReportData
from .details import details
from .html import frame, page
from .output import Shown
from .repro import script
from .summary import summary, what


@dataclass(frozen=True, repr=False)
class Report(ReportData, Shown):
    """The result of `explain`: text in a terminal, a page in a notebook; its data are those of
    `ReportData`.
    """

    def details(self) -> str:
        """The whole report as text, 120 columns wide."""
        return details(self)

    def repro(self, id: str = "fusion0") -> str:
        """A script that rebuilds a fusion, runs it on random inputs of its shapes, and compares the
        result with the reference.
        """
        return script(self.fusion(id), self.target if self.executed else "reference")

    def save(self, path: str | Path) -> None:
        """Writes a page to a path that ends in .html, JSON to .json, or the details to .txt; the
        file appears whole or not at all.

        OptionError for any other suffix.
        """
        path = Path(path)
        texts = {
            ".html": lambda: page(self),
            ".json": self.to_json,
            ".txt": lambda: f"{self.details()}\n",
        }
        if path.suffix not in texts:
            found = f"a report as {path.suffix or 'a file without a suffix'}"
            raise OptionError(found, expected=".html, .json or .txt", where=str(path))
        write(path, texts[path.suffix]())

    def __repr__(self) -> str:
        return f"<Report of fusion_moe.explain: {what(self)}, {self.flops} of flops fused>"

    def text(self, width: int) -> str:
        """The report on one screen, in at most `width` columns, 70 or more."""
        return summary(self, width)

    def _repr_html_(self) -> str:
        return frame(page(self))


def need_folder(path: Path) -> None:
    """OptionError if no file can be made there."""
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise OptionError(
            f"no folder {path.parent} to write to",
            expected="one that is there",
            todo="make it, or name another",
            where=str(path),
        )


def write(path: Path, text: str) -> None:
    """Writes a file, which appears whole or not at all. OptionError where there can be none."""
    need_folder(path)
    # in a shared folder too, nobody else can put a link into this one
    with TemporaryDirectory(dir=path.parent, prefix=".", ignore_cleanup_errors=True) as scratch:
        part = Path(scratch, path.name)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
