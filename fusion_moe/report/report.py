"""The report that users see: its data, and the forms in which it is shown and saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .data import ReportData
from .details import details
from .html import page
from .output import Document
from .repro import script
from .summary import summary, what


@dataclass(frozen=True, repr=False)
class Report(ReportData, Document):
    """The result of `explain`: text in a terminal, a page in a notebook; its data are those of
    `ReportData`.
    """

    _kind = "a report"
    _forms: ClassVar = {
        ".html": page,
        ".json": ReportData.to_json,
        ".txt": lambda report: f"{report.details()}\n",
    }

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
        self._save(path)

    def __repr__(self) -> str:
        return f"<Report of fusion_moe.explain: {what(self)}, {self.flops} of flops fused>"

    def text(self, width: int) -> str:
        """The report on one screen, in at most `width` columns, 70 or more."""
        return summary(self, width)
