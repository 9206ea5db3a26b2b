"""The CPU backend: every segment as C++; all segments of a program are in one library and run by
one call.

A program uses two kinds of libraries. The libraries of kernels/fprop.cpp, int8.cpp, dgrad.cpp and
wgrad.cpp are the same for all programs: they contain the grouped products for an ISA level of
`runtime.isa`, an encoding and a layout of weights (readers.py). The other library is generated
(unit.py) and contains each segment's own code: loops over rows (loops.py), or the prologue and the
epilogue of a product (grouped_mm.py, wgrad.py), which the product calls (kernels/product.h), with
the products that the epilogue adds (kernels/added.h). Both are built when a program is first
called, and kept in the cache of `runtime.build`; the library of fprop may have come with the
package (prebuilt.py), and then also serves machines without a compiler.
"""

from __future__ import annotations

from ...errors import UnsupportedError
from ...ir import Fusion
from ...runtime import build, isa
from ...runtime.kernel import Kernel
from ...schedule import STANDARD
from ...schedule.product import products
from ...schedule.segment import Segment
from ...target import Target
from .. import reference
from ..backend import Backend, source_of
from ..cxx import ACTIVATIONS, plan_product, plan_wgrad
from . import grouped_mm, loops, prebuilt, wgrad
from .join import join
from .launch import Launch, Library
from .readers import FLOATS, readable
from .segment import Source

__all__ = ["BACKEND", "NAME"]

NAME = "cpu"


def plan(fusion: Fusion, kind: str) -> Source:
    """What a CPU kernel of the piece is emitted from: its C++ and the values in memory. kind: the
    name of the scheduler that took the piece. UnsupportedError, with the reason, if no kernel
    computes it.
    """
    usual = _of_product if kind == "grouped_gemm" else loops.source
    source: Source = source_of(fusion, NAME, usual)(fusion)
    return source


def _of_product(fusion: Fusion) -> Source:
    if products(fusion)[0].kind == "wgrad":
        return wgrad.source(plan_wgrad(fusion, ACTIVATIONS, alike=False))
    return grouped_mm.source(plan_product(fusion, readable(), dgrad=readable(), of_added=FLOATS))


def emit(segment: Segment) -> Kernel:
    """The kernel of a planned segment, for the ISA level in force."""
    library = Library([segment.plan.work], isa.selected())
    return Kernel(segment, NAME, library.text, Launch(library, 0), ".cpp")


def substitute(segment: Segment) -> Kernel | None:
    """Without a compiler, the segment in plain torch around the product that came with the package;
    all of it in plain torch if none came.
    """
    if build.find_compiler() is not None:
        return None
    build.warn_of_no_compiler()
    try:
        evaluate, why = prebuilt.product(segment.plan.fusion)
    except UnsupportedError as error:
        return reference.in_torch(segment, str(error))
    return Kernel(segment, NAME, str(segment.plan.fusion), evaluate, why=why)


BACKEND = Backend(
    NAME,
    (
        Target(
            NAME,
            ("bf16", "int8"),
            STANDARD,
            device="cpu",
            added_features={"fprop": 256, "dgrad": 256},
        ),
    ),
    plan,
    emit,
    interface=1,
    join=join,
    substitute=substitute,
    row_order=True,
)
