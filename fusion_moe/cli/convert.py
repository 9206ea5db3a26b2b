"""fusion-moe convert: a directory in another form, without loss."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..checkpoints import convert as converted
from ..errors import OptionError
from .inspect import inspection
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
    Path, typer.Argument(metavar="SRC", help="A directory with config.json and safetensors.")
]
Destination = Annotated[
    Path,
    typer.Argument(metavar="DST", help="The directory to write; it appears once it is complete."),
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
    json: Json = False,
) -> None:
    """Write SRC in another form, without loss, read it again and compare.

    Prints what `inspect DST` prints.
    """
    finish(
        context, lambda: inspection(converted(src, dst, to.value, dtype=_dtype(to, dtype))), json
    )


def _dtype(to: Format, dtype: Floats | None) -> torch.dtype:
    if dtype is not None and to is not Format.DENSE:
        raise OptionError(
            f"--dtype {dtype.value} with --to {to.value}",
            expected="--to dense, which alone it applies to",
            where="convert",
        )
    found: torch.dtype = getattr(torch, (dtype or Floats.FLOAT32).value)
    return found
