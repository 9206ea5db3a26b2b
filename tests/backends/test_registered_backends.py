"""Backends of packages: found by entry points or registered, used for what they can express, and
refused with both versions if they were written for another interface.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusion_moe
from fusion_moe import backends, options
from fusion_moe.backends import INTERFACE, TARGETS, register
from fusion_moe.compile import program_of
from fusion_moe.errors import OptionError, PluginError
from fusion_moe.ir.text import text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend" / "backends.md"
CPU = torch.device("cpu")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(changed): a package with the page's backend is on the path."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    before = dict(backends._registered)

    def install(change=lambda code: code):
        (tmp_path / "their_backend.py").write_text(change(code), encoding="utf-8")
        about = tmp_path / "their_lib-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-lib\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[fusion_moe.backends]\ntheirs = their_backend:BACKEND\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "their_backend", raising=False)
        monkeypatch.setattr(backends, "_failed", [])
        backends._registered.clear()
        backends._load.cache_clear()

    yield install
    backends._registered.clear()
    backends._registered.update(before)
    backends._load.cache_clear()


def exponential() -> fusion_moe.ir.core.Fusion:
    fd = fusion_moe.FusionDefinition()
    x, y = (fd.define_tensor(shape=[4, 8], dtype="f32") for _ in range(2))
    fd.add_output(fd.ops.exp(fd.ops.mul(fd.ops.add(x, y), y)))
    return fd.fusion()


def test_the_backend_of_a_package_compiles_what_it_can_express(installed):
    installed()
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 8, generator=g) for _ in range(2))
    with options.override(target="python"):
        (found,) = fusion_moe.run(exponential(), [x, y])
        first, rest = program_of(text(exponential()), CPU).kernels
    assert found.equal(torch.exp((x + y) * y))
    assert first.backend == "python"
    assert "t1=t0*i1" in first.source.replace(" ", "")
    assert (rest.backend, rest.why) == (
        "reference",
        "in plain torch: exp is not written in Python",
    )
    assert "python" in TARGETS


def test_a_backend_for_another_interface_is_refused_with_both_versions(installed, caplog):
    installed(lambda code: code.replace("interface=1", "interface=7"))
    says = (
        f"backend 'python': written for version 7 of the interface; expected version {INTERFACE}, "
    )
    with pytest.raises(OptionError, match="target 'python'; expected one of auto") as error:
        backends.find("python", CPU)
    assert says in str(error.value)
    assert says in caplog.text
    assert backends.find("cpu", CPU).name == "cpu"


def test_an_entry_point_that_fails_costs_its_own_targets_alone(installed, caplog):
    installed(lambda code: f"import no_such_module\n{code}")
    with pytest.raises(OptionError, match="their_lib|their-lib failed: ModuleNotFoundError"):
        backends.find("python", CPU)
    assert "theirs = their_backend:BACKEND of their-lib failed" in caplog.text
    assert backends.find("cpu", CPU).name == "cpu"


def test_a_target_has_one_backend():
    cpu = backends.backend_of(TARGETS["cpu"])
    assert register(cpu) is cpu
    with pytest.raises(PluginError, match="the target 'cpu', which another backend serves"):
        register(replace(cpu, name="mine"))
    with pytest.raises(PluginError, match="a str; expected a Backend"):
        register("cpu")


def test_targets_are_those_of_the_core_then_those_of_packages():
    assert [*TARGETS][:3] == ["cpu", "cuda", "reference"]
    assert {"sm_90", "sm_100"} <= {*TARGETS}
    assert all(name == target.name for name, target in TARGETS.items())
