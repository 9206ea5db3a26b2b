"""fusion-moe doctor: what it says is what the library does."""

import json
import platform

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from typer.testing import CliRunner

import fusion_moe
from fusion_moe.cli.app import app
from fusion_moe.runtime import build, isa


def found(**env: str):
    result = CliRunner(env=env).invoke(app, ["doctor", "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_this_machine():
    code, shown = found()
    there = {check["name"]: check["there"] for check in shown["checks"]}
    assert [tier for tier in isa.TIERS if there[f"CPU, {tier}"]] == list(isa.available())
    assert there["C++ compiler"] == (build.find_compiler() is not None)
    assert code == (0 if shown["runs"] else 1)
    versions = shown["versions"]
    assert (versions["python"], versions["fusion_moe"]) == (platform.python_version(), fusion_moe.__version__)
    assert versions["torch"] == torch.__version__
    assert all(check["found"] for check in shown["checks"] if not check["there"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA kernels run here")
def test_without_a_compiler_nothing_runs():
    code, shown = found(PATH="/nowhere", CXX="")
    assert (code, shown["runs"]) == (1, "")
    text = CliRunner(env={"PATH": "/nowhere", "CXX": ""}).invoke(app, ["doctor"])
    assert text.exit_code == 1
    assert text.stdout.startswith("problem: nothing can be compiled here")


def test_text():
    """A line for each check, with what to do."""
    _, shown = found()
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert lines[0] == shown["runs"]
    for check in shown["checks"]:
        assert any(line.startswith(check["name"]) for line in lines)
