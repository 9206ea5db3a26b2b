"""The CUDA backend: segments as kernels in CUDA C++, compiled with NVRTC; for the pieces that have them.

source.py       what every segment has: a struct of its arrays, and kernels that are given it
loops.py        segments without a product
grouped_mm.py   products, with gather, routing and epilogue; columns.py: which columns a result is made of
readers.py      the readers of weights: which encodings and layouts have kernels
variants.py     the kernels of products as data; table.py, tables/: which are candidates for how many rows, by GPU; choice.py: the choice
launch.py       compiling and calling; join.py: the segments of a program in one call
kernels/        the kernels, fixed
"""

from __future__ import annotations

from ...arch import A100
from ...errors import UnsupportedError
from ...ir.core import Fusion
from ...runtime import cuda, nvrtc
from ...runtime.kernel import Kernel
from ...segment import Segment
from ..cxx.plan import plan as plan_product
from .grouped_mm import Product
from .join import join
from .launch import Launch
from .loops import Loops
from .readers import READERS
from .source import Source

__all__ = ["NAME", "emit", "join", "plan"]

NAME = "cuda"


def plan(fusion: Fusion, kind: str) -> Source:
    """The source of a piece's kernels. UnsupportedError with the sentence why there is none."""
    if why := nvrtc.why_missing() or cuda.why_too_old():
        raise UnsupportedError(why)
    source = Product(plan_product(fusion, READERS)) if kind == "grouped_gemm" else Loops(fusion)
    _text(source)  # which says what cannot be written
    return source


def emit(segment: Segment) -> Kernel:
    """The kernels of a planned segment."""
    source: Source = segment.plan.work
    launch = Launch(source)
    return Kernel(segment, NAME, _text(source), launch, graph_safe=True, chosen=launch.chosen)


def _text(source: Source) -> str:
    return "\n".join(kernel.text for kernel in source.launches(dict.fromkeys(source.fusion.symbols, 1), A100))
