"""fusion-moe convert: a directory in another form, without loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import OptionError
from ..messages import check_checkpoint, destination
from .inspect_result import Inspection
from .start import load

if TYPE_CHECKING:
    from ..checkpoints import Directory

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
    src: Source,
    dst: Destination,
    to: Annotated[
        Literal["modelopt", "compressed-tensors", "dense"],
        typer.Option(
            help="ModelOpt's NVFP4, compressed-tensors' integers and MXFP4, or plain floats."
        ),
    ] = "modelopt",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="With --to dense. float32, the default, holds every number; others round."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> Inspection:
    """Write SRC in another form, without loss.

    Reads it again and compares. Prints what `inspect DST` prints.
    """
    if dtype is not None and to != "dense":
        raise OptionError(
            f"--dtype {dtype} with --to {to}",
            expected="--to dense with it",
            where="convert",
        )
    check_checkpoint(src)
    destination(dst)
    load()
    import torch

    from ..checkpoints import convert as converted

    floats = getattr(torch, dtype or "float32")
    return written(src, partial(converted, src, dst, to, dtype=floats), dry_run)


def written(
    src: Path, write: Callable[..., Path], dry_run: bool, against: Path | None = None
) -> Inspection:
    """What was written, or would be. src: whose other files are copied; write: takes the argument
    dry_run; against: what errors are relative to.
    """
    from .inspect_directory import inspect_directory

    if not dry_run:
        return inspect_directory(write(), against=against)
    planned: list[Directory] = []
    dst = write(dry_run=planned.append)
    return inspect_directory(dst, planned=planned[0], files=src if src.is_dir() else dst)
