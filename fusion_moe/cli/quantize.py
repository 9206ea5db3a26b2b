"""fusion-moe quantize: experts from floats to NVFP4."""

from __future__ import annotations

import typer

from ..checkpoints import quantize as quantized
from .convert import Destination, Source
from .inspect import inspection
from .output import Json, finish


def quantize(context: typer.Context, src: Source, dst: Destination, json: Json = False) -> None:
    """Write SRC with its experts in NVFP4, from bfloat16, float16, float32 or FP8, without building
    the model.

    The numbers are those of nvidia-modelopt's weight quantization. Prints what `inspect DST`
    prints.
    """
    finish(context, lambda: inspection(quantized(src, dst)), json)
