"""`dispatch` and `combine_from` with their kernels, for the table of operations."""

from __future__ import annotations

from dataclasses import replace

from . import cpu, cuda, scheduler
from .kinds import TABLE
from .peers import use_of

_SOURCES = {"cpu": cpu.source, "cuda": cuda.Collective}
OPERATIONS = tuple(
    replace(kind, scheduler=scheduler, sources=_SOURCES, handle=use_of) for kind in TABLE
)
