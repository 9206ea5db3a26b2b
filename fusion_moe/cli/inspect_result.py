"""The result of `inspect`, `convert` and `quantize`, and its text, without torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from ..errors import printable
from ..messages import amount, count
from .output import Result, table
from .start import FINE, PROBLEMS

if TYPE_CHECKING:
    from rich.console import Console

    from ..checkpoints.comparing import WeightError


@dataclass(frozen=True)
class Group:
    """Tensors that are stored in one way. weights: matrices, or plain tensors; layers: that have
    some; runs: what multiplies by them.
    """

    format: str
    of: str
    weights: int
    layers: int
    bytes: int
    runs: str


@dataclass(frozen=True)
class Inspection(Result):
    """What was found. method: `quant_method`, "" if nothing is quantized; algorithm: what the
    method calls the format; scales: the rule that chose those of blocks, if the directory says it;
    errors: of weights, against those of another directory; written: whether it is there; notes:
    what loads without it, but is missed later.
    """

    schema = "fusion_moe.inspect/4"
    directory: str
    architectures: tuple[str, ...] = ()
    method: str = ""
    algorithm: str = ""
    scales: str = ""
    files: int = 0
    tensors: int = 0
    bytes: int = 0
    groups: tuple[Group, ...] = ()
    errors: tuple[WeightError, ...] = ()
    problems: tuple[str, ...] = ()
    written: bool = True
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The command's exit code: 1 with problems, else 0."""
        return PROBLEMS if self.problems else FINE

    def print(self, console: Console) -> None:
        """A head, a table of formats, problems."""
        what = "" if self.written else ", which is not written"
        console.print(f"{printable(self.directory)}{what}", soft_wrap=True)
        if self.files:
            scales = self.scales and f"scales by {self.scales}"
            by = ", ".join(filter(None, (self.method, self.algorithm, scales)))
            head = (
                ", ".join(self.architectures) or "no architecture",
                f"quantized by {by}" if by else "not quantized",
                f"{count(self.tensors, 'tensor')} in {count(self.files, 'file')}, "
                f"{amount(self.bytes, 'B')}",
            )
            console.print(printable("; ".join(head)), soft_wrap=True)
            names = "format", "of", "weights", "layers", "bytes", "runs here"
            groups = ((*row[:4], amount(row[4], "B"), row[5]) for row in map(astuple, self.groups))
            console.print("", table(names, groups, right=(2, 3, 4)), sep="\n")
        if self.errors:
            rows = (
                (e.name, e.matrices, f"{e.error:.4f}", f"{e.largest:.4f}", e.worst)
                for e in self.errors
            )
            columns = "weights", "matrices", "error", "largest", "in"
            console.print("", table(columns, rows, right=(1, 2, 3)), sep="\n")
        console.print()
        for problem in self.problems:
            console.print(f"problem: {' '.join(problem.split())}", soft_wrap=True)
        if not self.problems:
            console.print("no problems")
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True)
