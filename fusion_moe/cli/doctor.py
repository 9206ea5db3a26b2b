"""fusion-moe doctor: what this machine runs, why not the rest, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .output import Result
from .start import FINE, PROBLEMS, load

if TYPE_CHECKING:
    from rich.console import Console

    from ..env import Environment


@dataclass(frozen=True)
class Diagnosis(Result):
    """What `python -m fusion_moe.env` says, as the result of a command."""

    environment: Environment

    @property
    def exit_code(self) -> int:
        """1 where nothing is compiled, and all is computed in plain torch; or where an option is
        wrong, by its name or its value.
        """
        return FINE if self.environment.runs and not self.environment.problems else PROBLEMS

    def to_json(self) -> dict[str, Any]:
        """The fields of the environment."""
        return self.environment.to_json()

    def print(self, console: Console) -> None:
        """What runs, problems, what there is, versions, options."""
        console.print(str(self.environment), soft_wrap=True)


def doctor() -> Diagnosis:
    """What this machine runs, why not the rest, and what to do. CPU, GPU, compilers, nvFuser,
    thunder, versions.
    """
    load()
    from ..env import environment

    return Diagnosis(environment())
