"""fusion-moe compare, and files that --record is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fusion_moe.cli.app import app
from fusion_moe.recorder import Run
from fusion_moe.recorder.data import KernelRun, LayerRun, RunData


@pytest.fixture
def files(tmp_path):
    layer = LayerRun("layers.0", 3, [4, 2])
    before = RunData([layer], [], [], 3, [0.0, 0.2, 0.4], 1.0, "none was asked for")
    for name, run in (("before", before), ("after", replace(before, begun=[0.0, 0.1, 0.2]))):
        Run(data=run).save(tmp_path / f"{name}.json")
    return [str(tmp_path / f"{name}.json") for name in ("before", "after")]


def invoke(*arguments: str):
    return CliRunner().invoke(app, [*arguments])


def test_two_files_are_compared(files):
    done = invoke("compare", *files)
    assert done.exit_code == 0
    assert " ".join(done.output.split()).count("200 ms -> 100 ms 2x as fast") == 1
    unbroken = "".join(done.output.split())  # a long name continues in the next line
    assert all(file in unbroken for file in files)
    found = json.loads(invoke("compare", "--json", *files).output)
    assert found["changes"][0] == {
        "name": "step",
        "before": "200 ms",
        "after": "100 ms",
        "said": "2x as fast",
    }


def test_what_only_one_run_has_and_other_work_is_said(files):
    kernel = KernelRun("program0.0", "mm", {"T": 1}, [], 2, 2.0, 1.0, 3.0, 4.0, 9, 9, 1.0, 0, 0)
    before, after = (Run.load(file) for file in files)
    a = Run(data=replace(before.data, kernels=[kernel, replace(kernel, sizes={"T": 2})]))
    layer = LayerRun("layers.0", 3, [8, 4], [[4, 0], [2, 2], [2, 2]])
    b = replace(after.data, layers=[layer], kernels=[kernel, replace(kernel, rank=1)], made="b")
    found = a.compare(Run(data=b))
    said = {name: rest for name, *rest in found.changes}
    assert said["step"] == ["200 ms", "100 ms", "for other rows"]
    assert said["rows of a step"] == ["2", "4", ""]
    assert said["T = 1: mm"] == ["2 s", "2 s", "1x as fast"]
    assert said["T = 2: mm"] == ["2 s", "", "only in A"]
    assert said["rank 1, T = 1: mm"] == ["", "2 s", "only in B"]
    assert "compiling" not in said
    assert max(map(len, found.text(120).splitlines())) < 75


def test_other_files_are_refused(files, tmp_path):
    done = invoke("compare", files[0], str(tmp_path / "none.json"))
    assert (done.exit_code, "no file" in done.output) == (2, True)
    done = invoke("run", str(tmp_path), "a prompt", "--record", str(tmp_path / "no" / "run.html"))
    assert (done.exit_code, "to write to" in done.output) == (2, True)
    done = invoke("run", str(tmp_path), "a prompt", "--record", "run.png")
    assert done.exit_code == 2
    assert "a run as run.png; expected .trace.json, .json, .html, .txt" in done.output
