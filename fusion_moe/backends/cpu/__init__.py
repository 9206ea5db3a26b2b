"""The CPU backend: every segment as C++; all segments of a program are in one library and run by
one call.

A program uses two kinds of libraries. The libraries of kernels/fprop.cpp, int8.cpp, dgrad.cpp and
wgrad.cpp are the same for all programs: they contain the grouped products for a tier of
`runtime.isa` and an encoding of weights (readers.py). The other library is generated (unit.py) and
contains each segment's own code: loops over rows (loops.py), or the prologue and the epilogue of a
product (grouped_mm.py, wgrad.py), which the product calls (kernels/product.h), with the products
that the epilogue adds (kernels/added.h). Both are built when a program is first called, and kept in
the cache of `runtime.build`; the library of fprop may have come with the package (prebuilt.py).
"""

from __future__ import annotations

from ...ir.core import Fusion
from ...runtime import build, isa
from ...runtime.kernel import Kernel
from ...schedule.product import products
from ...schedule.segment import Segment
from ..cxx.product_plan import ACTIVATIONS, plan_product, plan_wgrad
from . import grouped_mm, loops, prebuilt, wgrad
from .join import join
from .launch import Launch, Library
from .readers import FLOATS, linear
from .segment import Source

__all__ = ["NAME", "emit", "join", "plan"]

NAME = "cpu"


def plan(fusion: Fusion, kind: str) -> Source | prebuilt.Product:
    """The C++ of a piece; without a compiler, the product that came with the package.
    UnsupportedError if there is none.
    """
    if build.find_compiler() is None:
        build.warn_of_no_compiler()
        return prebuilt.plan(fusion, kind)
    if kind != "grouped_gemm":
        return loops.source(fusion)
    if products(fusion)[0].kind == "wgrad":
        return wgrad.source(plan_wgrad(fusion, ACTIVATIONS, alike=False))
    return grouped_mm.source(plan_product(fusion, linear(), dgrad=linear(), of_added=FLOATS))


def emit(segment: Segment) -> Kernel:
    """The kernel of a planned segment, for the tier in force."""
    work = segment.plan.work
    if isinstance(work, prebuilt.Product):
        return Kernel(segment, NAME, str(segment.plan.fusion), work.evaluate, work.why)
    library = Library([work], isa.selected())
    return Kernel(segment, NAME, library.text, Launch(library, 0))
