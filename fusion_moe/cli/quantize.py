"""fusion-moe quantize: experts from floats to NVFP4."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from ..checkpoints import quantize as quantized
from .convert import Destination, Source
from .inspect import inspection
from .output import Json, finish


class Scales(str, Enum):
    """How the scale of a block is chosen."""

    MAX = "max"
    FOUR_OVER_SIX = "four_over_six"
    MSE = "mse"


def quantize(
    context: typer.Context,
    src: Source,
    dst: Destination,
    scales: Annotated[
        Scales,
        typer.Option(
            help="How the scale of a block is chosen: from its largest magnitude; or what has the "
            "least squared error, of two candidates or of twelve."
        ),
    ] = Scales.MAX,
    json: Json = False,
) -> None:
    """Write SRC with its experts in NVFP4, from bfloat16, float16, float32 or FP8, without building
    the model.

    The numbers are those of nvidia-modelopt's weight quantization, unless --scales says otherwise.
    Prints what `inspect DST` prints.
    """
    finish(context, lambda: inspection(quantized(src, dst, scales=scales.value)), json)
