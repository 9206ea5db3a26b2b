"""fusion-moe quantize: experts from floats to few bits."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from ..messages import GGUF, check_checkpoint, destination
from .convert import Destination, DryRun, Source, written
from .inspect_result import Inspection
from .start import load

To = Literal["nvfp4", "mxfp4", "int4", "fp8"]


def quantize(
    src: Source,
    dst: Destination,
    to: Annotated[
        To,
        typer.Option(
            help="NVFP4 in ModelOpt's form, MXFP4 or INT4 in that of compressed-tensors, FP8 as "
            "DeepSeek-V3."
        ),
    ] = "nvfp4",
    scales: Annotated[
        Literal["max", "four_over_six", "mse"] | None,
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
) -> Inspection:
    """Write SRC with its experts in few bits.

    From bfloat16, float16, float32 or FP8, without building the model. Prints what `inspect DST`
    prints; for a file of GGUF with `--against SRC`.
    """
    check_checkpoint(src)
    destination(dst)
    load()
    from ..checkpoints import quantize as quantized

    write = partial(quantized, src, dst, to=to, scales=scales, skip=skip or ())
    return written(src, write, dry_run, against=src if src.suffix == GGUF else None)
