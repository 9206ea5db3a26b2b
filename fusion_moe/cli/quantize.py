"""fusion-moe quantize: experts from floats to few bits."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Annotated

import typer

from ..checkpoints import quantize as quantized
from ..checkpoints.directory import GGUF
from .convert import Destination, DryRun, Source, written
from .output import Json, finish


class To(str, Enum):
    """The format of the result."""

    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    INT4 = "int4"
    FP8 = "fp8"


class Scales(str, Enum):
    """How the scale of a block is chosen."""

    MAX = "max"
    FOUR_OVER_SIX = "four_over_six"
    MSE = "mse"


def quantize(
    context: typer.Context,
    src: Source,
    dst: Destination,
    to: Annotated[
        To,
        typer.Option(
            help="NVFP4 in ModelOpt's form, MXFP4 or INT4 in that of compressed-tensors, FP8 as "
            "DeepSeek-V3."
        ),
    ] = To.NVFP4,
    scales: Annotated[
        Scales | None,
        typer.Option(
            help="How the scale of a block is chosen: from its largest magnitude (max: in NVFP4 "
            "the bytes of nvidia-modelopt); or what has the least squared error, of two candidates "
            "or of some more (mse: the default for NVFP4 and INT4)."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of experts that stay as they are, such as '*.layers.0.*'; may be repeated."
        ),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write SRC with its experts in few bits, from bfloat16, float16, float32 or FP8, without
    building the model.

    Prints what `inspect DST` prints; for a file of GGUF with `--against SRC`.
    """
    rule = scales and scales.value
    write = partial(quantized, src, dst, to=to.value, scales=rule, skip=skip or ())
    in_gguf = src if src.suffix == GGUF else None
    finish(context, lambda: written(src, write, dry_run, in_gguf), json)
