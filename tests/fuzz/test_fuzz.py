"""Random graphs of fixed seeds, on each level a few; `python -m tests.fuzz` runs as many as one
likes. And the tools they are run with.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_moe import FusionDefinition, options
from fusion_moe.errors import CheckpointError, GroupsError, ShapeError

from . import cxx, files, hostile, run, traced
from .case import REFERENCE, case_of
from .compare import difference
from .journal import kind
from .regions import evaluated
from .shrink import shrunk

pytestmark = pytest.mark.once


def told(level: str, seed: int, graphs: int) -> str:
    """What was found on a level; "" if nothing was, and all graphs were run."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        # which has the products, from other tests
        patch.setenv("FUSION_MOE_CACHE_DIR", options.current().cache_dir)
        result = run.fuzz(level, seed, graphs, 600, said.append)
    assert result.graphs == graphs
    return "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "graphs"), [("evaluate", 300), ("traced", 8)])
def test_the_front_end(level, graphs):
    assert told(level, 0, graphs) == ""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("level", "graphs"), [("cxx", 80), ("inductor", 3)])
def test_the_c_plus_plus(level, graphs):
    assert told(level, 1000, graphs) == ""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("level", "graphs"), [("sanitize", 20), ("hostile", 8)])
def test_nothing_is_read_or_written_outside_of_a_tensor(level, graphs):
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("no libasan beside g++")
    assert told(level, 2000, graphs) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "graphs"), [("files", 100), ("states", 500)])
def test_what_comes_from_elsewhere(level, graphs):
    assert told(level, 0, graphs) == ""


# The tools ----------------------------------------------------------------------------------------


def test_a_case_is_of_its_seed():
    """in whatever process: its text, run by Python, computes what it does"""
    for seed in (0, 1, 2, 3):
        case = case_of(seed)
        assert str(case) == str(case_of(seed))
        names: dict = {}
        exec(str(case), names)
        with options.using(REFERENCE):
            found = names["f"](*names["inputs"])
        assert difference(found, case.eager(), [False] * len(case.outputs)) == ""


def test_a_fault_is_found_and_made_small(monkeypatch):
    """relu that forgets what is negative: the smallest case has little more than it"""
    from fusion_moe.ir.kinds import KINDS

    broken = replace(KINDS["relu"], evaluate=lambda x: (x,))
    monkeypatch.setitem(KINDS, "relu", broken)

    def judge(case):
        return evaluated(case).wrong

    found = [
        (case, wrong)
        for case in map(case_of, range(60))
        if "aten.relu" in str(case) and (wrong := judge(case))
    ]
    assert found
    case, wrong = found[0]
    small, still = shrunk(case, wrong, judge)
    assert kind(still) == kind(wrong)
    assert "aten.relu" in str(small)
    assert sum(n.op == "call_function" for n in small.graph.nodes) <= min(
        6, sum(n.op == "call_function" for n in case.graph.nodes)
    )


def test_values_become_inputs_of_their_own():
    """one after the other, and each case runs as it is printed"""
    case = case_of(1)
    small, _ = shrunk(case, "kept", lambda c: "kept" if "nvfp4_grouped_mm" in str(c) else "")
    exec(str(small), {})
    assert sum(n.op == "call_function" for n in small.graph.nodes) < sum(
        n.op == "call_function" for n in case.graph.nodes
    )


def test_a_worker_that_hangs_before_its_first_case_does_not_start(monkeypatch):
    monkeypatch.setitem(run.HANGS, "evaluate", 0)
    with pytest.raises(RuntimeError, match="does not start"):
        run.fuzz("evaluate", 0, 1, 60)


def test_errors_of_ours_come_out_of_compiled_graphs():
    """of numbers that are not finite, which are not quantized"""
    assert traced.judged(case_of(42300133), traced.without_code) == ""


@pytest.mark.compiler
def test_a_program_that_does_not_compile_is_found_among_others():
    programs = [
        c for seed in range(4) for c in cxx.emitted(seed, evaluated(case_of(seed)).runs, "generic")
    ]
    bad = programs[len(programs) // 2]
    library = next(k.launch.library for k in bad.program.kernels if hasattr(k.launch, "library"))
    library.sources = tuple(replace(s, text=f"{s.text}\nthis is no C++") for s in library.sources)
    ((found, wrong),) = cxx.build(programs, "generic")
    assert found is bad
    assert "does not compile" in wrong


def test_what_a_file_makes_of_a_reader_is_said(monkeypatch, tmp_path):
    """an error of another kind, a message that a terminal would obey, and what is left behind"""
    source = shutil.copytree(files.MADE[0], tmp_path / "src")
    assert files.wrong(source) == ""

    def breaks(error):
        def convert(src, dst, **how):
            raise error

        return convert

    for error, said in (
        (TypeError("oh"), "convert raises TypeError: oh"),
        (CheckpointError("x" * 9999), "convert raises a message of 9999 characters"),
    ):
        monkeypatch.setattr(files, "convert", breaks(error))
        assert files.wrong(source).startswith(said)
    monkeypatch.setattr(files, "convert", lambda src, dst, **how: (tmp_path / "left").touch())
    assert files.wrong(source) == "convert leaves ['left']"


def test_what_differs_is_said():
    x = torch.tensor([1.0, float("nan")])
    assert difference([x], [x.clone()], [False]) == ""
    assert difference([x], [x + 2**-10], [False]) == "output 0 differs"
    assert difference([x], [x + 2**-12], [True]) == ""
    assert difference([x], [x.double()], [True]).startswith("output 0 is torch.float32 [2]")
    assert difference(GroupsError("a"), GroupsError("b"), []) == ""
    assert difference(GroupsError("a"), ShapeError("b"), []).startswith(
        "GroupsError where ShapeError is right"
    )
    assert difference([x], GroupsError("b"), []).startswith("returns where GroupsError is right")


def test_changed_texts_verify_or_are_refused():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[fd.define_size("m"), 16], dtype="f32")
    fd.add_output(fd.ops.mul(fd.ops.neg(x), 2.0))
    changed = list(hostile.verified(hostile.numbers(0), fd.fusion()))
    assert len({str(f) for f in changed}) > 3
    for fusion in changed:
        given = hostile.inputs_of(hostile.numbers(1), fusion)
        if given is not None:
            fusion.bind(*given)
