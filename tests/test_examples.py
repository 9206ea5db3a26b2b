"""Each example says what it does and what its options are."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(
    f.name for f in EXAMPLES.glob("*.py") if "__main__" in f.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_has_a_sentence(name):
    calls = [
        n
        for n in ast.walk(ast.parse((EXAMPLES / name).read_text(encoding="utf-8")))
        if isinstance(n, ast.Call)
    ]
    options = [
        c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument"
    ]
    assert [ast.unparse(c) for c in options if "help" not in {k.arg for k in c.keywords}] == []


@pytest.mark.once
@pytest.mark.slow
def test_help():
    """Of all in one process, since importing takes longest: what an example does, by its docstring,
    and nothing is run. Then what one process cannot divide, and generate cannot measure.
    """
    pytest.importorskip("transformers")
    code = """
import runpy, sys
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
for name in names:
    sys.argv = [name, "--help"]
    try:
        runpy.run_path(f"{folder}/{name}", run_name="__main__")
    except SystemExit as done:
        assert done.code == 0, name
    print("\\f", end="")
sys.argv = ["expert_parallel.py", "--plan", "ep_tp"]
try:
    runpy.run_path(f"{folder}/expert_parallel.py", run_name="__main__")
except SystemExit as done:
    assert done.code == 2
sys.argv = ["generate.py", "--tokens", "1"]
runpy.run_path(f"{folder}/generate.py", run_name="__main__")
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES), *PROGRAMS],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 2, done.stderr
    assert "error: --plan ep_tp on 1 processes: expected an even number" in done.stderr
    assert "generate.py: error: --tokens 1: expected at least 2" in done.stderr
    shown = dict(zip(PROGRAMS, done.stdout.split("\f"), strict=False))
    for name in PROGRAMS:
        said = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8")))
        assert shown[name].startswith(f"usage: {name} [-h]")
        assert said.splitlines()[0] in shown[name]


@pytest.mark.once
def test_gpus_that_are_not_there():
    """inspect_blackwell.py shows definitions, or what to install."""
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "inspect_blackwell.py"))
    (machine, _) = example["MACHINES"]
    report = example["explained"](*machine)
    shown = " ".join(report.details().split())
    assert "for sm_100 (emitted, unexecuted); " in shown
    assert "never run on compute capability 10.0" in shown
    source = report.stage("source")
    if importlib.util.find_spec("nvfuser_direct") is None:
        assert "nvFuser is not installed; pip install '.[nvfuser]' in a clone" in source
    else:
        assert source.count("fd.ops.cutlass_nvfp4_grouped_mm(") == 2


@pytest.mark.once
@pytest.mark.slow
def test_offload(capsys, monkeypatch):
    """Equal texts and logits, whatever was copied, computed and learned."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["offload.py", "--tokens", "6"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(EXAMPLES / "offload.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert done.value.code == 0
    assert "the plain model's text: True; its logits, bit for bit: True" in said
    assert said.count("experts copied") == 4
    assert " 0 experts copied" not in said
    assert " 0 computed," not in said
    assert said.count(" slots' experts are there; ") == 4


@pytest.mark.once
@pytest.mark.exhaustive
@pytest.mark.judges("trl", "datasets")
def test_grpo(capsys, monkeypatch):
    """The reward rises, while steps have the experts of rollouts; four differences are shown."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(EXAMPLES / "grpo.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert done.value.code == 0
    assert re.search(r"reward: \d\.\d+ in the first 8 steps, \d\.\d+ in the last 8", said)
    shown = re.findall(r"^(neither|replay|order=.*?) +(\d\S+) +(\d\S+)$", said, re.MULTILINE)
    assert [name for name, *_ in shown] == [
        "neither",
        "replay",
        'order="row"',
        'order="row" and replay',
    ]
    assert all(0 < float(mean) < 0.1 and float(most) < 2 for _, mean, most in shown)
