"""The pipeline, from a Fusion to a Program. The only file that names every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from . import options, schedule, target
from .emit import BACKENDS
from .errors import UnsupportedError
from .ir.core import Fusion
from .ir.text import parse, text
from .options import Options
from .passes import PASSES, contract_rounding
from .runtime.program import Program
from .segment import Segment, split
from .target import Target


def compile_fusion(fusion: Fusion, to: Target, with_: Options) -> Program:
    """The program of a Fusion for a target: passes, segments, schedules, kernels. UnsupportedError for a target that is only emitted."""
    _check(fusion, to)
    stages = [("translated", fusion)]
    for run in PASSES:
        fusion = run(fusion, to).verify()
        stages.append((run.__name__, fusion))
    segments = [_contracted(s) if with_.contract_rounding else s for s in split(fusion, to)]
    schedules = [schedule.named(s.kind).choose(s.fusion, to) for s in segments]
    kernels = tuple(BACKENDS[to.name](s, c) for s, c in zip(segments, schedules, strict=True))
    return Program(tuple(stages), kernels, to)


def program_of(source: str, device: torch.device) -> Program:
    """The program of a printed Fusion for a device, under the options in force; compiled once."""
    return _program(source, target.find(options.current().target, device).name, options.current())


@lru_cache(maxsize=1024)
def _program(source: str, to: str, with_: Options) -> Program:
    return compile_fusion(parse(source), target.TARGETS[to], with_)


def run(fusion: Fusion, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compiles a Fusion for the device of its inputs and runs it: `fusion_moe.run(fd.fusion(), [x, y])`."""
    device = tensors[0].device if tensors else torch.device("cpu")
    return program_of(text(fusion), device)(tensors)


def _contracted(segment: Segment) -> Segment:
    return replace(segment, fusion=contract_rounding(segment.fusion))


def _check(fusion: Fusion, to: Target) -> None:
    if not to.executed:
        raise UnsupportedError(f"target {to.name}", expected=f"one of {', '.join(BACKENDS)}", todo="this version runs nothing on it")
    for op in fusion.ops:
        if op.kind.role == "grouped" and op.values[0].type.quantized:
            target.check_formats(to, op.values[0].type.dtype, op.kind.name)


