"""benchmarks/offload.py, tried without a GPU: it goes on where it ended, and writes its page."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_on_cpu import folder
from test_cuda_on_cpu import gpu as cuda_on_cpu

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import offload
import offload_layers
import offload_training
import results

pytest.importorskip("transformers")
pytestmark = [pytest.mark.once, pytest.mark.slow]
__all__ = ["cuda_on_cpu", "folder"]
CELLS = ["--resident", "37", "--tokens", "1,2", "--routings", "zipf,recorded", "--prompts", "200"]


class Cuda(offload_layers.Pretend):
    """What a GPU does, but for graphs and clocks of it."""

    def __init__(self):
        self._shared = {}

    make = offload_layers.Gpu.make


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Texts of the small model."""
    monkeypatch.setattr(offload_layers, "_RECORDED", 64)


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["offload.py", *map(str, arguments)])
    offload.main()


@pytest.mark.parametrize("on", [offload_layers.Pretend, Cuda])
@pytest.mark.exhaustive
def test_all_of_it(on, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(offload, "Pretend", on)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    file, sizes = tmp_path / "found.json", ["--models", "qwen3-235b", "--layers", 2, "--steps", 3]
    given = ["--pretended", "--json", file, *CELLS, *sizes]
    run(monkeypatch, *given, "--seconds", 0)
    assert "run it again" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rows"]) == 1
    run(monkeypatch, *given)
    out = capsys.readouterr().out
    assert "all cells are there" in out
    has_kt = bool(find_spec("kt_kernel"))
    assert ("cpu_peers.py says how to install it" in out) != has_kt
    found = json.loads(file.read_text())
    assert [(r["routing"], r["tokens"]) for r in found["rows"]] == [
        (routing, n) for routing in ("zipf", "recorded") for n in (1, 2)
    ]
    assert all(r["steps"] == 3 and 0 < r["hits"] < 1 and r["missed"] for r in found["rows"])
    assert all(bool(r["kt"]) == has_kt for r in found["rows"])
    (beside,) = found["beside"]
    assert beside["experts"] == 8
    assert all(rate > 0 for name, rate in beside.items() if name != "model")
    assert [p["tokens"] for p in found["prompts"]] == [200, 200]
    run(monkeypatch, "--json", file, "--page")
    page = (tmp_path / "offload.md").read_text()
    assert "| qwen3-235b | recorded | 37 | 2 | 3 | 0." in page
    assert f"| qwen3-235b | {beside['threads']} | 8 |" in page


def test_routings():
    """The most often named ones are the first; a token names none twice."""
    for routing in ("uniform", "zipf", "recorded"):
        ids = offload_layers.drawn(routing, offload_layers.MODELS["gpt-oss-120b"], 5, 40)
        assert ids.shape == (40, 5, 4)
        uses = torch.bincount(ids.flatten(), minlength=128)
        assert len(uses) == 128
        assert (ids.sort(-1).values.diff() > 0).all()
        if routing != "uniform":
            assert int(uses[:32].sum()) > 2 * int(uses[32:].sum()) / 3
    one = offload_layers.drawn("recorded", offload_layers.MODELS["deepseek-v3"], 1000, 1)
    assert one.shape == (1, 1000, 8)


def test_of_training(monkeypatch, capsys):
    monkeypatch.setattr(offload_training, "DEVICE", torch.device("cpu"))
    given = ["--model", "tiny", "--layers", "2", "--tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["offload_training.py", *given])
    with torch.enable_grad():
        offload_training.main()
    assert "11 of 11 equal" in capsys.readouterr().out


def test_of_training_with_attention(monkeypatch, capsys):
    pytest.importorskip("peft")
    import finetune_peers

    for module in (offload_training, finetune_peers):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(offload_training, "TIMES", 1)
    given = ["--model", "tiny", "--layers", "2", "--tokens", "64", "--resident", "0.4"]
    monkeypatch.setattr(sys, "argv", ["offload_training.py", *given, "--attention"])
    with torch.enable_grad():
        offload_training.main()
    assert capsys.readouterr().out.rstrip().endswith("with attention")


def test_what_many_steps_leave(monkeypatch, capsys):
    monkeypatch.setattr(offload_training, "DEVICE", torch.device("cpu"))
    given = ["--model", "tiny", "--layers", "3", "--tokens", "8", "--steps", "10"]
    monkeypatch.setattr(sys, "argv", ["offload_training.py", *given])
    with torch.enable_grad():
        offload_training.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "5", "10"]


def test_libraries_train_the_same_model(tmp_path, monkeypatch):
    """Ours, with experts on the device and away: the same losses."""
    pytest.importorskip("peft")
    import finetune_peers

    monkeypatch.setattr(finetune_peers, "DEVICE", "cpu")
    monkeypatch.setattr(finetune_peers, "WARM", 1)
    monkeypatch.setattr(finetune_peers, "STEPS", 1)
    args = argparse.Namespace(
        config="tiny", layers=2, tokens=[64], resident=0.4, out=tmp_path, vocabulary=None
    )
    losses = list[Any]()
    with torch.enable_grad():
        for name in ("fusion_moe", "offloaded"):
            finetune_peers.measure(args, name)
            losses.append(json.loads((tmp_path / f"{name}-64.json").read_text())["losses"])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
