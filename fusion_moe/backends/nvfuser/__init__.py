"""The nvFuser backend: a segment as an nvFuser FusionDefinition, and its launch.

library.py      the installed nvFuser, or what to install
writer.py       writes operations into a definition, equal ones once
definition.py   a Fusion -> a definition of its own, or operations inside of another one
values.py       how quantized values look in nvFuser
pointwise.py shapes.py rows.py products.py    what each kind of the IR becomes;  eight_bits.py:
    MXFP8
headers.py      the CUDA headers that sorts are compiled with, or what to install
launch.py       checks before a launch, and the launch
"""

from __future__ import annotations

from ...ir.core import Fusion
from ...runtime.kernel import Kernel
from ...schedule.segment import Segment
from .definition import define, inline
from .launch import launcher

__all__ = ["NAME", "define", "emit", "inline", "plan"]

NAME = "nvfuser"


def plan(fusion: Fusion, kind: str) -> None:
    """Whatever schedule/nvfuser.py accepts can be written; nvFuser need not be installed to say
    so.
    """


def emit(segment: Segment) -> Kernel:
    """A kernel whose source is the printed definition. UnsupportedError if nvFuser is not
    installed.
    """
    fusion = segment.plan.fusion
    definition = define(fusion)
    return Kernel(segment, NAME, str(definition.fd).strip(), launcher(definition, fusion))
