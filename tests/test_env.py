"""python -m fusion_moe.env: what a bug report needs, and no more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion_moe
from fusion_moe import env, options


def test_the_command(tmp_path):
    """Without packages but torch; what is in the home folder is named without it."""
    home = tmp_path / "somebody"
    (home / ".cache" / "fusion_moe").mkdir(parents=True)
    (home / ".cache" / "fusion_moe" / "kernel.so").touch()
    variables = {
        k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "FUSION_MOE_CACHE_DIR")
    }
    variables |= {
        "HOME": str(home),
        "FUSION_MOE_CPU_ISA": "generic",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    variables["FUSION_MOE_CPU_IS"] = "avx2"  # misspelled
    done = subprocess.run(
        [sys.executable, "-m", "fusion_moe.env"],
        capture_output=True,
        text=True,
        env=variables,
        check=True,
    )
    assert "somebody" not in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "cpu_isa generic" in lines
    (problem,) = (line for line in lines if line.startswith("problem: "))
    assert "FUSION_MOE_CPU_IS is ignored" in problem
    assert "did you mean 'FUSION_MOE_CPU_ISA'?" in problem
    assert f"package yes {Path(fusion_moe.__file__).parent}" in lines
    assert "cache yes ~/.cache/fusion_moe: 1 files" in lines
    assert f"torch {torch.__version__}" in lines


def test_a_folder_below_home_is_written_with_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with options.override(cache_dir=str(tmp_path / "kernels")):
        found = env.environment()
    assert found.options["cache_dir"] == "~/kernels"
    assert {c.name: c.found for c in found.checks}["cache"] == "~/kernels: 0 files"
    assert str(tmp_path) not in str(found)


def test_a_cache_folder_that_is_not_used(tmp_path):
    (tmp_path / "file").touch()
    with options.override(cache_dir=str(tmp_path / "file" / "kernels")):
        (cache,) = (c for c in env.environment().checks if c.name == "cache")
    assert not cache.there
    assert "kernels cannot be created (File exists); a temporary folder is used" in cache.found
    assert cache.todo == "set FUSION_MOE_CACHE_DIR to another folder"


def test_an_installation_without_kernels(monkeypatch, tmp_path):
    """As of a wheel that was built without a compiler."""
    monkeypatch.setattr(env.readers, "SHIPPED", tmp_path)
    for compiler, said in ((object(), "compiled when first used"), (None, "plain torch computes")):
        monkeypatch.setattr(env.build, "find_compiler", lambda found=compiler: found)
        check = env._prebuilt()
        assert not check.there
        assert check.found.startswith("0 of 6 for ")
        assert said in check.found
        assert bool(check.todo) == (compiler is None)


def test_what_is_said_is_what_is_there():
    found = env.environment()
    assert found.versions["fusion_moe"] == fusion_moe.__version__
    assert all(check.found for check in found.checks if not check.there)
    assert str(found).startswith(found.runs or "problem: nothing can be compiled here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA kernels run here")
def test_no_cuda_here():
    assert not env.has_cuda()
    assert {c.name: c.there for c in env.environment().checks}["GPU"] is False
