"""The command `fusion-moe inspect`: what a directory holds. Arguments alone; the work is in
inspect_directory.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckpointError
from ..messages import check_checkpoint
from .inspect_result import Inspection
from .start import load


def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A directory with config.json and safetensors, or a file of GGUF."
        ),
    ],
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Read all scales too, and report numbers that no quantizer writes.",
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A directory with the same weights in floats: also says how far each layer is "
            "from it, relative to its norm. Reads all weights.",
        ),
    ] = None,
) -> Inspection:
    """What a directory holds, and what is wrong with it.

    Its weights by format, their bytes, what multiplies by them here. Reads headers alone.
    """
    try:
        check_checkpoint(directory)
    except CheckpointError as error:
        return Inspection(str(directory), problems=(str(error),))
    if against is not None:
        check_checkpoint(against)
    load()
    from .inspect_directory import inspect_directory

    return inspect_directory(directory, values, against)
