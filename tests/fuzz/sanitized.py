"""python -m tests.fuzz.sanitized FIRST LAST: programs of cases of these seeds, as they are and
changed at random, built with sanitizers and run on any bits; each is printed before it runs. The
process preloads libasan.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from random import Random
from typing import Any

import torch

from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.errors import Error
from fusion_moe.ir.text import one_line
from fusion_moe.options import Options
from fusion_moe.runtime import build, isa
from fusion_moe.runtime.program import Program

from . import hostile
from .batch import FLAGS, Batch
from .case import case_of
from .compare import outcome
from .regions import Evaluated

SANITIZED = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def main(seeds: range) -> None:
    torch.set_num_threads(1)
    # for compilers, which take twice as long with ASan's allocator
    os.environ.pop("LD_PRELOAD", None)
    build.BASE_FLAGS = (*build.BASE_FLAGS, *SANITIZED)
    tier, programs = isa.selected(), []
    for rng in map(Random, seeds):
        runs = Evaluated(case_of(rng)).runs
        fusions = [run.fusion for run in runs if not run.quantizes]
        changed = [f for fusion in fusions[:1] for f in islice(hostile.verified(rng, fusion), 3)]
        for fusion in (*fusions, *changed):
            found = outcome(lambda fusion=fusion: compiled(fusion, tier))
            assert isinstance(found, (Program, Error)), f"{found!r}\n{fusion}"
            programs += [(rng, found)] if isinstance(found, Program) else []
    with options.override(cpu_isa=tier):
        assert Batch([program for _, program in programs], tier, FLAGS)._loaded
    for rng, program in programs:
        for given in filter(None, (hostile.inputs_of(rng, program.fusion) for _ in range(2))):
            print(one_line(program.fusion), given[1], [(t.dtype, t.tolist()) for t in given[0]])
            sys.stdout.flush()
            check(program, *given)


def compiled(fusion: Any, tier: str) -> Program:
    return compile_fusion(fusion, TARGETS["cpu"], Options().replace(cpu_isa=tier))


def check(program: Program, inputs: list[Any], sizes: dict[str, int]) -> None:
    """Beside what a sanitizer sees: an error of ours must be raised by both or by none."""
    want = outcome(lambda: program.fusion.evaluate(*inputs, sizes=sizes))
    found = outcome(lambda: program(inputs, sizes))
    assert isinstance(found, Exception) or not isinstance(want, Error), want
    assert isinstance(want, Exception) or not isinstance(found, Exception), found


if __name__ == "__main__":
    main(range(*map(int, sys.argv[1:])))
