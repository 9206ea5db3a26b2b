"""The CPU backend: every segment as C++, those of a program in one library and one call; the reference for what has no C++.

Two kinds of libraries make a program. kernels/product.cpp, the same for all, has the grouped product of a tier of `runtime.isa` and an
encoding of weights (readers.py). The other is generated (unit.py): of each segment what is its own, loops over rows (loops.py), or gather,
routing and epilogue of a product (grouped_mm.py), which the product calls (kernels/product.h). Both are built when a program is first
called, and kept in the cache of `runtime.build`; the first may have come with the package (prebuilt.py).
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ...runtime import build, isa
from ...runtime.kernel import Kernel
from ...segment import Segment
from .. import reference
from ..cxx.plan import plan
from . import grouped_mm, loops, prebuilt
from .join import join
from .launch import Launch, Library
from .readers import linear

__all__ = ["NAME", "emit", "join"]

NAME = "cpu"


def emit(segment: Segment, schedule: object) -> Kernel:
    """A kernel in C++ for the tier in force; that of the reference, which says why, where this backend has none.

    Without a compiler: plain torch around the product that came with the package.
    """
    try:
        if build.find_compiler() is None:
            return _without_compiler(segment, schedule)
        fusion = segment.fusion
        source = grouped_mm.source(plan(fusion, linear())) if segment.kind == "grouped_gemm" else loops.source(fusion)
    except UnsupportedError as error:
        return replace(reference.emit(segment, schedule), why=str(error))
    except RecursionError:
        return replace(reference.emit(segment, schedule), why="too many operations in one expression")
    library = Library([source], isa.selected())
    return Kernel(segment, schedule, NAME, library.text, Launch(library, 0))


def _without_compiler(segment: Segment, schedule: object) -> Kernel:
    if segment.kind != "grouped_gemm":
        raise UnsupportedError(build.why_no_compiler())
    why = f"the product that came with the package for {isa.selected()}, plain torch around it: {build.why_no_compiler()}"
    return Kernel(segment, schedule, NAME, str(segment.fusion), prebuilt.evaluate(segment), why)
