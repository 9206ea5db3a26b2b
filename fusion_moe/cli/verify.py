"""fusion-moe verify: what the experts of a directory are once they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UnsupportedError
from ..messages import check_checkpoint, install
from .models import a_model, quietly
from .output import Result
from .start import FINE, PROBLEMS, load

if TYPE_CHECKING:
    from rich.console import Console

    from ..offload.verification import Verification


@dataclass(frozen=True)
class Verified(Result):
    """What was loaded of a directory, and of an adapter's."""

    schema = "fusion_moe.verify/1"
    directory: str
    adapter: str | None
    found: Verification

    @property
    def exit_code(self) -> int:
        """1 with problems, else 0."""
        return PROBLEMS if self.found.problems else FINE

    def print(self, console: Console) -> None:
        """A line for each projection, then problems."""
        console.print(str(self.found), soft_wrap=True)
        if not self.found.problems:
            console.print("no problems")


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with config.json and safetensors.")
    ],
    adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A PEFT adapter to put on the model.")
    ] = None,
) -> Verified:
    """What experts of a model are: formats, adapters, what is odd.

    Loads the model into memory.
    """
    check_checkpoint(directory)
    load()
    from ..integrations.transformers import from_pretrained
    from ..offload import verify as verified

    with quietly():
        with a_model(directory):
            model = from_pretrained(directory)
        if adapter is not None:
            with a_model(adapter, "an adapter of PEFT for this model"):
                model = _peft().from_pretrained(model, adapter)
    return Verified(str(directory), None if adapter is None else str(adapter), verified(model))


def _peft() -> Any:
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed", todo=install("finetune")) from None
    return PeftModel
