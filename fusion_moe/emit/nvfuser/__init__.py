"""The nvFuser backend: a segment as an nvFuser FusionDefinition, and its launch.

library.py      the installed nvFuser, or what to install
writer.py       writes operations into a definition, equal ones once
definition.py   a Fusion -> a definition of its own, or operations inside of another one
values.py       how quantized values look in nvFuser
pointwise.py shapes.py rows.py products.py    what each kind of the IR becomes
headers.py      the CUDA headers that sorts are compiled with, or what to install
launch.py       checks before a launch, and the launch
"""

from __future__ import annotations

from ...runtime.kernel import Kernel
from ...segment import Segment
from .. import reference
from .definition import define, inline
from .launch import launcher

__all__ = ["NAME", "define", "emit", "inline"]

NAME = "nvfuser"


def emit(segment: Segment, schedule: object) -> Kernel:
    """A kernel whose source is the printed definition; segments that nvFuser does not take run by their meaning.

    UnsupportedError if nvFuser is not installed.
    """
    if segment.kind != NAME:
        return reference.emit(segment, schedule)
    definition = define(segment.fusion)
    return Kernel(segment, schedule, NAME, str(definition.fd).strip(), launcher(definition, segment.fusion))
