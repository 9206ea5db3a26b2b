"""fusion-moe doctor: what it says is what the library does."""

import json
import platform

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from typer.testing import CliRunner

import fusion_moe
from fusion_moe import options
from fusion_moe.backends.cpu import readers
from fusion_moe.cli.app import app
from fusion_moe.cli.inspect_directory import kernels_for
from fusion_moe.encodings import NVFP4
from fusion_moe.runtime import build, isa


def found(**env: str):
    result = CliRunner(env=env).invoke(app, ["doctor", "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_this_machine():
    code, shown = found()
    there = {check["name"]: check["there"] for check in shown["checks"]}
    assert [tier for tier in isa.LEVELS if there[f"CPU, {tier}"]] == list(isa.available())
    assert there["C++ compiler"] == (build.find_compiler() is not None)
    assert code == (0 if shown["runs"] else 1)
    versions = shown["versions"]
    assert (versions["python"], versions["fusion_moe"]) == (
        platform.python_version(),
        fusion_moe.__version__,
    )
    assert versions["torch"] == torch.__version__
    assert all(check["found"] for check in shown["checks"] if not check["there"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA kernels run here")
def test_without_a_compiler_what_came_with_the_package_runs(monkeypatch, tmp_path):
    """If nothing came, nothing runs. What commands say of an encoding agrees."""
    no_compiler = {"PATH": "/nowhere", "CXX": ""}
    monkeypatch.setattr(readers, "SHIPPED", tmp_path)
    code, shown = found(**no_compiler)
    assert (code, shown["runs"]) == (1, "")
    text = CliRunner(env=no_compiler).invoke(app, ["doctor"])
    assert text.exit_code == 1
    assert text.stdout.startswith("problem: nothing can be compiled here")
    for encoding in readers.BUILT_IN:
        readers.library_source(isa.selected(), encoding).came_with().touch()
    code, shown = found(**no_compiler)
    prebuilt = f"prebuilt C++ products for {isa.selected()}, plain torch around them"
    assert (code, shown["runs"].partition(":")[0]) == (0, prebuilt)
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_compiler", lambda: None)
        assert kernels_for(NVFP4).startswith(f"prebuilt C++, {isa.selected()}")
        readers.library_source(isa.selected(), "nvfp4").came_with().unlink()
        assert kernels_for(NVFP4) == "plain torch: no compiler"


@pytest.mark.compiler
def test_options_that_are_wrong_are_problems():
    """A name that no option has, beside the name that was meant; a value that raises at the first
    call.
    """
    assert found()[1]["problems"] == []
    code, shown = found(FUSION_MOE_CUDA_VARIAN="small_m")
    assert (code, len(shown["problems"])) == (1, 1)
    assert "FUSION_MOE_CUDA_VARIAN is ignored" in shown["problems"][0]
    assert "did you mean 'FUSION_MOE_CUDA_VARIANT'?" in shown["problems"][0]
    for name in ("target", "cpu_isa", "cuda_variant", "cuda_arch"):
        with options.override(**{name: "nope"}):
            result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == 1
        (problem,) = (line for line in result.stdout.splitlines() if line.startswith("problem: "))
        assert "'nope'; expected " in problem


def test_text():
    """A line for each check, with what to do."""
    _, shown = found()
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert lines[0] == shown["runs"]
    for check in shown["checks"]:
        assert any(line.startswith(check["name"]) for line in lines)
