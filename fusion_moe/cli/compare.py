"""fusion-moe compare: two recorded runs."""

from __future__ import annotations

from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..messages import check_file
from .output import Result
from .start import load

if TYPE_CHECKING:
    from rich.console import Console

    from ..recorder import Comparison

_Run = Annotated[Path, typer.Argument(help="JSON that run.save or --record wrote.")]


@dataclass(frozen=True)
class Compared(Result):
    """A comparison as a result of a command."""

    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON, schema fusion_moe.compare."""
        return loads(self.comparison.to_json())

    def print(self, console: Console) -> None:
        """Prints the comparison, as wide as the console."""
        from ..report.output import fitting

        console.print(self.comparison.text(fitting(console.width)), soft_wrap=True)


def compare(before: _Run, after: _Run) -> Compared:
    """What two recorded runs did differently. In steps, experts, kernels, and what was compiled."""
    for path in (before, after):
        check_file(path, "JSON that run.save wrote", "compare")
    load()
    from ..recorder import Run

    return Compared(Run.load(before).compare(Run.load(after)))
