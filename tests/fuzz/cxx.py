"""The regions of many cases in C++, in one library, against what their segments mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.errors import BuildError
from fusion_moe.options import Options
from fusion_moe.runtime import isa
from fusion_moe.runtime.program import Program

from .batch import FLAGS, Batch
from .compare import difference, outcome
from .regions import Run, by_segments, lowered_of


@dataclass
class Compiled:
    """A run of a region, and its program."""

    seed: int
    run: Run
    program: Program
    contract: bool


def emitted(seed: int, runs: Sequence[Run], tier: str) -> Iterator[Compiled]:
    """The programs of a case's regions for the CPU; contracted or not, as the seed says."""
    contract = bool(Random(seed).getrandbits(1))
    for run in runs:
        if not any(
            op.kind.role == "grouped" and op.values[0].type.quantized for op in run.fusion.ops
        ):
            with_ = Options().replace(cpu_isa=tier, contract_rounding=contract)
            yield Compiled(seed, run, compile_fusion(run.fusion, TARGETS["cpu"], with_), contract)


def tier_of(seed: int) -> str:
    """The tier that a batch is compiled for: all that this machine has, in turn."""
    return isa.available()[seed % len(isa.available())]


def build(
    programs: Sequence[Compiled], tier: str, flags: Sequence[str] = FLAGS
) -> Iterator[tuple[Compiled, str]]:
    """Compiles programs together. -> those that the compiler does not take, found by halving."""
    if not programs:
        return
    with options.override(cpu_isa=tier):
        failed = outcome(lambda: Batch([p.program for p in programs], tier, flags)._loaded)
        if not isinstance(failed, BuildError):
            return
        if len(programs) == 1:
            yield programs[0], f"does not compile: {failed.found[:500]}"
            return
        half = len(programs) // 2
        yield from build(programs[:half], tier, flags)
        yield from build(programs[half:], tier, flags)


def differs(compiled: Compiled) -> str:
    """What the compiled region gives otherwise than its segments mean, in one call or kernel by
    kernel.
    """
    run, program = compiled.run, compiled.program
    lowered = lowered_of(run.fusion, compiled.contract)
    want = outcome(lambda: by_segments(lowered, run))
    ways: dict[str, Callable[[], Any]] = {
        "in one call": lambda: program(run.inputs, run.sizes),
        "kernel by kernel": lambda: program._one_by_one(
            run.inputs, program.sizes(run.inputs, run.sizes)
        ),
    }
    for how, way in ways.items():
        if wrong := difference(outcome(way), want, run.rough):
            return f"{how}: {wrong}"
    return ""
