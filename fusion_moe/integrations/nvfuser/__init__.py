"""The nvFuser backend: a segment as an nvFuser FusionDefinition, and its launch.

targets.py      the two kinds of GPU; scheduler.py: what a definition can express
library.py      the installed nvFuser, or what to install
writer.py       writes operations into a definition, equal ones once
definition.py   a Fusion -> a definition of its own, or operations inside of another one
values.py       how quantized values look in nvFuser
pointwise.py, shapes.py, rows.py, products.py, eight_bits.py (MXFP8)
                what each kind of the IR becomes
headers.py      the CUDA headers that sorts are compiled with, or what to install
launch.py       checks before a launch, and the launch
"""

from __future__ import annotations

from ...backends.backend import Backend
from ...ir import Fusion
from ...runtime.kernel import Kernel
from ...schedule.segment import Segment
from . import library
from .definition import define
from .launch import launcher
from .targets import BLACKWELL, HOPPER

__all__ = ["BACKEND"]

NAME = "nvfuser"


def plan(fusion: Fusion, kind: str) -> None:
    """Whatever scheduler.py accepts can be written."""


def emit(segment: Segment) -> Kernel:
    """A kernel whose source is the printed definition. UnsupportedError if nvFuser is not
    installed.
    """
    fusion = segment.plan.fusion
    definition = define(fusion)
    source = str(definition.fd).strip()
    return Kernel(segment, NAME, source, launcher(definition, fusion), ".py")


BACKEND = Backend(
    NAME,
    (HOPPER, BLACKWELL),
    plan,
    emit,
    interface=1,
    why_missing=library.why_missing,
    note="one definition, which nvFuser splits into kernels; the traffic between them counts as "
    "avoided",
)
