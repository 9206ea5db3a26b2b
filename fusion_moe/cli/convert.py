"""fusion-moe convert: a directory in another form, without loss."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..checkpoints import Directory
from ..checkpoints import convert as converted
from ..errors import OptionError
from .inspect import Inspection, inspection
from .output import Json, finish


class Format(str, Enum):
    """What to write: ModelOpt's NVFP4, compressed-tensors' integers and MXFP4, or plain floats."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"
    DENSE = "dense"


class Floats(str, Enum):
    """Of dense weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC", help="A directory with config.json and safetensors, or a file of GGUF."
    ),
]
Destination = Annotated[
    Path,
    typer.Argument(metavar="DST", help="The directory to write; it appears once it is complete."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Write nothing, and print what inspect DST would print."),
]


def convert(
    context: typer.Context,
    src: Source,
    dst: Destination,
    to: Annotated[
        Format,
        typer.Option(
            help="ModelOpt's NVFP4, compressed-tensors' integers and MXFP4, or plain floats."
        ),
    ] = Format.MODELOPT,
    dtype: Annotated[
        Floats | None,
        typer.Option(
            help="Of --to dense: float32, as without it, holds every number; others round."
        ),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write SRC in another form, without loss, read it again and compare.

    Prints what `inspect DST` prints.
    """
    finish(
        context,
        lambda: written(
            src, partial(converted, src, dst, to.value, dtype=_dtype(to, dtype)), dry_run
        ),
        json,
    )


def written(
    src: Path, write: Callable[..., Path], dry_run: bool, against: Path | None = None
) -> Inspection:
    """What was written, or would be. src: whose other files are copied; write: takes the argument
    dry_run; against: what errors are relative to.
    """
    if not dry_run:
        return inspection(write(), against=against)
    planned: list[Directory] = []
    dst = write(dry_run=planned.append)
    return inspection(dst, planned=planned[0], files=src if src.is_dir() else dst)


def _dtype(to: Format, dtype: Floats | None) -> torch.dtype:
    if dtype is not None and to is not Format.DENSE:
        raise OptionError(
            f"--dtype {dtype.value} with --to {to.value}",
            expected="--to dense, which alone it applies to",
            where="convert",
        )
    found: torch.dtype = getattr(torch, (dtype or Floats.FLOAT32).value)
    return found
