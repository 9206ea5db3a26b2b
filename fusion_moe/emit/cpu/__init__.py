"""The CPU backend: C++ for segments with a grouped product of NVFP4 weights, the reference for the rest.

Two libraries make a kernel. kernels/product.cpp, the same for all segments, has the grouped product of a tier of `runtime.isa`. The other
is generated: what is the segment's own, gather, routing and epilogue, which the product calls (kernels/product.h). Both are built when
a kernel is first called, and kept in the cache of `runtime.build`.
There are kernels of the tiers avx512, avx2 and generic; amx runs those of avx512.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ...runtime import build, isa
from ...runtime.kernel import Kernel
from ...segment import Segment
from .. import reference
from ..cxx.plan import plan
from .grouped_mm import text
from .launch import Launch

NAME = "cpp"


def emit(segment: Segment, schedule: object) -> Kernel:
    """A kernel in C++ for the tier in force; that of the reference, which says why, where this backend has none."""
    try:
        if segment.kind != "grouped_gemm":
            raise UnsupportedError(f"{segment.kind} segments have no C++ kernels yet")
        if build.find_compiler() is None:
            raise UnsupportedError(build.why_no_compiler())
        planned, tier = plan(segment.fusion), isa.selected()
        source = text(planned)
    except UnsupportedError as error:
        return replace(reference.emit(segment, schedule), why=str(error))
    return Kernel(segment, schedule, NAME, source, Launch(planned, source, tier))
