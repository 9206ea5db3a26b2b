"""The CUDA backend: segments as kernels in CUDA C++, compiled with NVRTC; for the pieces that have
them.

source.py       what every segment has: a struct of its arrays, and kernels that are given it
loops.py        segments without a product; copies.py: copies in few bits, made in these
product.py      products: the ways to compute each, and which one a call takes
grouped_mm.py   the way for weights in any encoding, with gather, routing and epilogue; columns.py:
                which columns a result is made of; reordering.py: of many rows, with weights that
                are not in tiles
added.py        a product that joins the accumulators of another, as an adapter's
fp8.py          products of rows in e4m3 codes
gemm.py         those of training: fprop with results of several widths, dgrad, wgrad of 16-bit
                matrices; dgrad of weights in few bits
routing.py      what runs before products: routers (router.py), and what sorts rows by expert
readers.py      the readers of weights: derived from descriptors, or written
variants.py     the kernels of products as data; table.py, tables/: which are candidates for how
                many rows, by GPU; heuristics.py: the choice for a product
dataflow.py     the segments of a call as facts; join.py: those of a program in one call
choose.py       parts, sizes, a GPU -> the Choice: kernels, what is chained, memory; launch.py:
                compiling and launching it
kernels/        the kernels, fixed
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import options
from ...arch import Arch
from ...encodings import NVFP4
from ...errors import UnsupportedError
from ...ir import Fusion
from ...runtime import cuda, nvrtc
from ...runtime.kernel import Kernel
from ...schedule import STANDARD
from ...schedule.segment import Segment
from ...target import Target
from .. import reference
from ..backend import Backend, source_of
from . import fp8, product
from .choose import Choice, Step
from .heuristics import check_variant
from .join import join
from .launch import Launch
from .loops import Loops
from .source import Sizes, Source
from .table import table_of
from .variants import Matrices

__all__ = ["BACKEND", "NAME", "choices"]

NAME = "cuda"


def plan(fusion: Fusion, kind: str) -> Source:
    """The source of a piece's kernels. UnsupportedError with the sentence why there is none."""
    if why := cuda.why_too_old():
        raise UnsupportedError(why)
    usual = product.source_of if kind == "grouped_gemm" else Loops
    source: Source = source_of(fusion, NAME, usual)(fusion)
    _text(source)  # which says what cannot be written
    return source


def emit(segment: Segment) -> Kernel:
    """The kernels of a planned segment. OptionError if no such variant exists."""
    variant = options.current().cuda_variant
    check_variant(variant)
    source: Source = segment.plan.work
    return Kernel(segment, NAME, _text(source), Launch(source, variant), ".cu", graph_safe=True)


def substitute(segment: Segment) -> Kernel | None:
    """Without NVRTC, the segment in plain torch."""
    why = nvrtc.why_missing()
    return reference.in_torch(segment, why) if why else None


def choices(
    fusion: Fusion, kernels: Sequence[Kernel], sizes: Sizes, arch: Arch, any_size: bool = False
) -> tuple[tuple[Choice, ...], tuple[Step | None, ...]]:
    """What a program launches for known sizes on a GPU: one Choice, or one for each segment if its
    kernels cannot be joined; and each kernel's Step, None for those of other backends. any_size:
    what it launches while these kernels are compiled.
    """
    if joined := join(fusion, kernels)[1]:
        choice = joined.choose(sizes, arch, any_size)
        return (choice,), choice.steps
    alone = [
        k.launch.choose(sizes, arch, any_size) if isinstance(k.launch, Launch) else None
        for k in kernels
    ]
    return tuple(choice for choice in alone if choice), tuple(
        choice.steps[0] if choice else None for choice in alone
    )


def _text(source: Source) -> str:
    """The kernels for one of everything."""
    sizes, gpu = dict.fromkeys(source.fusion.symbols, 1), cuda.facts()
    return "\n".join(k.text for k in source.launches(source.choose(sizes, gpu), sizes, gpu))


def _requantized_from(device: torch.device, groups: int, n: int, k: int) -> float:
    """By the GPU's table."""
    of = Matrices(groups, k, -(-n // 16), 1, 0, tiled=False)
    return table_of(cuda.facts()).change("folded", of)


def _transposed_columns() -> tuple[str, ...]:
    """Those of wgrads whose kernels run on the GPU."""
    return () if cuda.facts().why_not(fp8.CodesWgrad.needs) else fp8.COLUMNS


BACKEND = Backend(
    NAME,
    (
        Target(
            NAME,
            ("bf16", "fp8"),
            STANDARD,
            device="cuda",
            ran_on=((9, 0),),
            weight_layout="w16x64",
            added_features={"fprop": 64, "dgrad": 64},
            requires={"fp8": fp8.NEEDS},
            linear_weights={"fp8": fp8.LINEAR_WEIGHTS},
            quantized_results=fp8.ROWS,
            matrix_scales=(NVFP4.name,),
            requantized_from=_requantized_from,
            transposed_columns=_transposed_columns,
        ),
    ),
    plan,
    emit,
    interface=1,
    join=join,
    substitute=substitute,
    row_order=True,
)
