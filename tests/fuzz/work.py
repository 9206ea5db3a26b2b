"""One worker: runs cases of a range of seeds on a level and notes each in a journal, so that a
crash is known by its seed.

python -m tests.fuzz.work LEVEL FIRST LAST JOURNAL
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from fusion_moe.ir.text import one_line
from fusion_moe.runtime import build

from . import cxx, files, hostile, states, traced
from .builder import Found, Skip
from .case import Case, case_of
from .case import tensor_text as case_text
from .compare import outcome
from .journal import Journal
from .regions import Run, evaluated
from .shrink import shrunk

SANITIZED = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
AT_ONCE = 40  # seeds whose C++ is compiled together
HOSTILE_AT_ONCE = 10


def main(level: str, seeds: range, journal: Journal) -> None:
    """All seeds, in order."""
    torch.set_num_threads(1)
    if level in ("sanitize", "hostile"):
        # for compilers, which take twice as long with ASan's allocator
        os.environ.pop("LD_PRELOAD", None)
        build.BASE_FLAGS = (*build.BASE_FLAGS, *SANITIZED)
    if level in ("cxx", "sanitize"):
        for first in range(seeds.start, seeds.stop, AT_ONCE):
            _batch(range(first, min(first + AT_ONCE, seeds.stop)), journal, cxx.FLAGS)
    elif level == "hostile":
        for first in range(seeds.start, seeds.stop, HOSTILE_AT_ONCE):
            _hostile(range(first, min(first + HOSTILE_AT_ONCE, seeds.stop)), journal)
    elif level in ("files", "states"):
        files.limit_memory()
        for seed in seeds:
            journal.note(at=seed)
            wrong, repro = (files if level == "files" else states).judged(seed)
            if wrong:
                journal.note(seed=seed, wrong=wrong, repro=repro)
    else:
        judge = {
            "evaluate": lambda case: evaluated(case).wrong,
            "traced": lambda case: traced.judged(case, traced.without_code),
            "inductor": lambda case: traced.judged(case, traced.with_inductor),
        }[level]
        for case in _cases(seeds, journal):
            _judged(case, judge, journal)
    journal.note(done=True)


def _cases(seeds: range, journal: Journal) -> Iterator[Case]:
    for seed in seeds:
        journal.note(at=seed)
        try:
            yield case_of(seed)
        except Skip:
            pass
        except Found as found:
            journal.note(seed=seed, wrong=str(found), repro="")


def _judged(case: Case, judge: Callable[[Case], str], journal: Journal, tries: int = 300) -> bool:
    wrong = judge(case)
    if wrong:
        small, wrong = shrunk(case, wrong, judge, tries)
        journal.note(seed=case.seed, wrong=wrong, repro=str(small))
    return not wrong


def _batch(seeds: range, journal: Journal, flags: Sequence[str]) -> None:
    """The cases of some seeds: evaluated one by one, then their regions in C++ together."""
    tier, programs, cases = (
        cxx.tier_of(seeds.start // AT_ONCE),
        list[cxx.Compiled](),
        dict[int, Case](),
    )
    for case in _cases(seeds, journal):
        judged = evaluated(case)
        if judged.wrong:
            journal.note(
                seed=case.seed,
                wrong=judged.wrong,
                repro=str(shrunk(case, judged.wrong, lambda c: evaluated(c).wrong)[0]),
            )
            continue
        cases[case.seed] = case
        made = outcome(lambda runs=judged.runs, seed=case.seed: list(cxx.emitted(seed, runs, tier)))
        if isinstance(made, Exception):
            journal.note(
                seed=case.seed,
                wrong=f"the C++ is not written: {type(made).__name__}: {made}",
                repro=str(case),
            )
        else:
            programs += made
    journal.note(compiling=len(programs))
    broken = {id(p): wrong for p, wrong in cxx.build(programs, tier, flags)}
    for p in programs:
        journal.note(at=p.seed, program=one_line(p.run.fusion), sizes=p.run.sizes, tier=tier)
        wrong = broken.get(id(p)) or cxx.differs(p)
        if wrong:
            text = (
                f"# tier {tier}, contract_rounding {p.contract}, sizes "
                f"{p.run.sizes}\n{p.run.fusion}"
            )
            small = _smaller(cases[p.seed], wrong, tier, flags)
            journal.note(seed=p.seed, wrong=wrong, repro=f"{small}\n\n{text}")
        else:
            journal.note(ran=p.seed)


def _hostile(seeds: range, journal: Journal) -> None:
    """Changed programs of the cases of some seeds, sanitized, each run on two sets of inputs."""
    tier, compiled = cxx.tier_of(seeds.start // HOSTILE_AT_ONCE), list[cxx.Compiled]()
    for case in _cases(seeds, journal):
        rng = hostile.numbers(case.seed)
        try:
            for run in evaluated(case).runs[:1]:
                made = (
                    (f, hostile.program_of(f, tier))
                    for f in islice(hostile.verified(rng, run.fusion), 6)
                )
                compiled += [
                    cxx.Compiled(case.seed, replace(run, fusion=f), p, True)
                    for f, p in made
                    if p is not None
                ]
        except Found as found:
            journal.note(seed=case.seed, wrong=str(found), repro="")
    journal.note(compiling=len(compiled))
    broken = {id(c): wrong for c, wrong in cxx.build(compiled, tier, cxx.FLAGS)}
    for c in compiled:
        rng, fusion = hostile.numbers(c.seed), c.run.fusion
        for given in filter(None, (hostile.inputs_of(rng, fusion) for _ in range(2))):
            journal.note(
                at=c.seed,
                program=one_line(fusion),
                sizes=given[1],
                tier=tier,
                inputs=list(map(case_text, given[0])),
            )
            if wrong := broken.get(id(c)) or hostile.wrong(c.program, *given):
                journal.note(
                    seed=c.seed, wrong=wrong, repro=f"# tier {tier}, sizes {given[1]}\n{fusion}"
                )
            else:
                journal.note(ran=c.seed)


def _smaller(case: Case, wrong: str, tier: str, flags: Sequence[str]) -> Case:
    """The smallest case found whose regions in C++ are wrong in the same way."""

    def judge(c: Case) -> str:
        runs: list[Run] = evaluated(c).runs
        programs = outcome(lambda: list(cxx.emitted(c.seed, runs, tier)))
        if isinstance(programs, Exception):
            return ""
        broken = list(cxx.build(programs, tier, flags))
        return broken[0][1] if broken else next(filter(None, map(cxx.differs, programs)), "")

    return shrunk(case, wrong, judge, 40)[0]


if __name__ == "__main__":
    main(sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3])), Journal(Path(sys.argv[4])))
