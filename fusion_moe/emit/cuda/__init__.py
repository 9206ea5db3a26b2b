"""The CUDA backend: segments as kernels in CUDA C++, compiled with NVRTC; the reference for what has none.

source.py       what every segment has: a struct of its arrays, and kernels that are given it
loops.py        segments without a product
grouped_mm.py   products, with gather, routing and epilogue; columns.py: which columns a result is made of
readers.py      the readers of weights: which encodings and layouts have kernels
variants.py     the kernels of products as data, and which are chosen for how many rows
launch.py       compiling and calling; join.py: the segments of a program in one call
kernels/        the kernels, fixed
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ...runtime import cuda, nvrtc
from ...runtime.kernel import Kernel
from ...segment import Segment
from .. import reference
from ..cxx.plan import plan
from .grouped_mm import Product
from .join import join
from .launch import Launch
from .loops import Loops
from .readers import READERS

__all__ = ["NAME", "emit", "join"]

NAME = "cuda"


def emit(segment: Segment, schedule: object) -> Kernel:
    """The kernels of a segment; that of the reference, which says why, where this backend has none."""
    try:
        if why := nvrtc.why_missing() or cuda.why_too_old():
            raise UnsupportedError(why)
        fusion = segment.fusion
        source = Product(plan(fusion, READERS)) if segment.kind == "grouped_gemm" else Loops(fusion)
        text = "\n".join(launched.text for launched in source.launches(dict.fromkeys(fusion.symbols, 1), "sm_80"))
    except UnsupportedError as error:
        return replace(reference.emit(segment, schedule), why=str(error))
    except RecursionError:
        return replace(reference.emit(segment, schedule), why="too many operations in one expression")
    launch = Launch(source)
    return Kernel(segment, schedule, NAME, text, launch, graph_safe=True, chosen=launch.chosen)
