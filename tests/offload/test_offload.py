"""offload_ and from_pretrained: what is where, errors before anything moves, and models that
compute what they did before, bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from files import MADE
from safetensors import SafetensorError
from tiny_qwen3 import qwen3_moe
from transformers import AutoModelForCausalLM

import fusion_moe
from fusion_moe import NVFP4Config, quantize_
from fusion_moe.checkpoints import Directory
from fusion_moe.errors import OptionError, UnsupportedError
from fusion_moe.messages.units import bytes_of
from fusion_moe.nn.frozen.experts import Experts
from fusion_moe.offload import (
    OffloadedExperts,
    counters,
    explain,
    folder,
    learn_,
    loading,
    offload_,
    plan,
)
from fusion_moe.offload.loading import offloaded
from fusion_moe.offload.machine import EXPECTED
from fusion_moe.runtime.host_memory import pages
from fusion_moe.transformers import from_pretrained

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
NAME = "modelopt-qwen3_moe"


@pytest.fixture(scope="module")
def want() -> torch.Tensor:
    with torch.no_grad():
        return from_pretrained(MADE / NAME)(IDS).logits


def room(slots: int, tokens: int = 16) -> int:
    """Bytes of a device on which so many of the 4 experts of each layer fit."""
    model = plan.Model.of_directory(Directory.open(MADE / NAME))
    experts = slots * sum(layer.nbytes for layer in model.layers)
    return model.rest + model.kv * tokens + experts + 1500  # and buffers


def test_model_of_a_directory_and_of_a_module():
    """The same sizes, before and after loading."""
    of_files = plan.Model.of_directory(Directory.open(MADE / NAME))
    loaded = from_pretrained(MADE / NAME)
    experts = {n: m for n, m in loaded.named_modules() if isinstance(m, Experts)}
    of_module = plan.Model.of_module(loaded, experts)
    assert len(of_files.layers) == len(of_module.layers) > 0
    for a, b in zip(of_files.layers, of_module.layers, strict=True):
        assert (a.name, a.experts, a.macs, a.slots) == (b.name, b.experts, b.macs, b.slots)
        assert abs(a.nbytes - b.nbytes) <= 24  # activation scales, which are not loaded
    assert of_files.kv == of_module.kv > 0
    assert abs(of_files.rest / of_module.rest - 1) < 0.1  # buffers


def test_what_eight_bits_take_in_memory(tmp_path):
    """Scales of 128 x 128, a row each; linear layers, which become floats beside 4 bits."""
    model = from_pretrained(MADE / "bf16-qwen3_moe")
    quantize_(model, "fp8")
    model.save_pretrained(tmp_path)
    for path in tmp_path, MADE / "modelopt-qwen3_5_moe-mixed":
        loaded = from_pretrained(path)
        experts = {n: m for n, m in loaded.named_modules() if isinstance(m, Experts)}
        of_module = plan.Model.of_module(loaded, experts)
        of_files = plan.Model.of_directory(Directory.open(path))
        assert of_files.experts == pytest.approx(of_module.experts, rel=1e-3)
        assert of_files.rest == pytest.approx(of_module.rest, rel=0.02)


def test_layers_that_predict_further_tokens_are_not_planned(monkeypatch):
    directory = Directory.open(MADE / "modelopt-qwen3_5_moe-mixed")
    whole = plan.Model.of_directory(directory)
    monkeypatch.setitem(directory.config, "num_hidden_layers", len(whole.layers) - 1)
    fewer = plan.Model.of_directory(directory)
    assert fewer.layers == whole.layers[:-1]
    assert fewer.rest < whole.rest


def test_offload(want):
    model = from_pretrained(MADE / NAME)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    found = offload_(model, {"pretended": room(3)}, kv_tokens=16, every=1)
    assert not found.whole
    assert set(found.slots) == {3}
    for _ in range(4):
        assert model(IDS).logits.equal(want)
    said = counters(model)
    assert list(said) == [layer.name for layer in found.model.layers]
    assert all(c.steps == 4 and c.hits and c.misses for c in said.values())
    assert not any(p.requires_grad for p in model.parameters())
    assert all(t.equal(state[name]) for name, t in model.state_dict().items())
    what = explain(model, IDS)
    assert what.count(" slots' experts are there; ") == len(said)
    assert "# add       device          the rows of each token" in what
    assert "fd.ops.place(" in what
    assert learn_(model) >= 0
    said = " ".join(str(fusion_moe.explain(model, IDS)).split())
    assert re.search(
        r"experts of 1 layer are offloaded, 1 of 4 .* route, split, copy, resident", said
    )
    with pytest.raises(UnsupportedError, match="offloaded already"):
        offload_(model, {"pretended": "1GB"})


def test_inside_of_inference_mode(want):
    model = from_pretrained(MADE / NAME)
    with torch.inference_mode():
        offload_(model, {"pretended": room(3)}, kv_tokens=16, every=1)
        assert model(IDS).logits.equal(want)
    with torch.no_grad():
        assert model(IDS).logits.equal(want)


def test_save_and_load(tmp_path, want):
    memory = {"pretended": room(3, tokens=0)}
    model = from_pretrained(MADE / NAME, max_memory=memory, experts_device="auto", kv_tokens=0)
    assert any(isinstance(m, OffloadedExperts) for m in model.modules())
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert not any(isinstance(m, OffloadedExperts) for m in again.modules())
    with torch.no_grad():
        assert again(IDS).logits.equal(want)


@pytest.mark.parametrize("experts_device", ["auto", "cpu", "cuda"])
def test_from_pretrained(experts_device, want):
    """accelerate's words; experts_device says more."""
    size = {"cuda": "1GiB", "auto": room(3), "cpu": room(0)}[experts_device]
    more = {} if experts_device == "auto" else {"experts_device": experts_device}
    model, info = from_pretrained(
        MADE / NAME,
        device_map="auto",
        max_memory={"pretended": size, "cpu": "1GiB"},
        output_loading_info=True,
        kv_tokens=16,
        **more,
    )
    assert not info["missing_keys"]
    assert model(IDS).logits.equal(want)
    said = counters(model).values()
    if experts_device == "cuda":
        assert not said
    elif experts_device == "cpu":
        assert all(c.computed and not c.hits and not c.bytes_copied for c in said)
    else:
        assert all(c.hits for c in said)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A folder, and weights that are large enough to lie there."""
    monkeypatch.setattr(folder, "_IN_MEMORY", ())
    monkeypatch.setattr(pages, "PAGE", 64)
    return tmp_path


def stored(model) -> list[bool]:
    """Whether the storage of each layer's experts is in files."""
    return [bool(m.storage.in_files) for m in model.modules() if isinstance(m, OffloadedExperts)]


@pytest.mark.parametrize("slots", [0, 3])
def test_short_memory(slots, disk, want, tmp_path_factory):
    """Experts are read into files; all else is as with memory, but for what is copied in a step."""
    more = {"experts_device": "auto" if slots else "cpu", "kv_tokens": 16, "offload_folder": disk}
    memory = {"pretended": room(slots), "cpu": 100}
    model = from_pretrained(MADE / NAME, max_memory=memory, **more)
    assert stored(model) == [True]
    assert list(disk.iterdir()) == []  # files without names
    for _ in range(3):
        assert model(IDS).logits.equal(want)
        learn_(model)
    (said,) = counters(model).values()
    assert said.computed
    assert not said.copied
    assert bool(said.hits) == bool(said.loaded) == bool(slots)
    saved = tmp_path_factory.mktemp("saved")
    model.save_pretrained(saved)
    with torch.no_grad():
        assert from_pretrained(saved)(IDS).logits.equal(want)
    model = from_pretrained(MADE / NAME, max_memory=memory | {"cpu": "1GB"}, **more)
    assert stored(model) == [False]


def test_a_checkpoint_that_changes_while_its_experts_are_read(
    disk, want, tmp_path_factory, monkeypatch
):
    """An error before any step; when it is whole again, it may go there."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(MADE / NAME, source, dirs_exist_ok=True)
    file, free = source / "model.safetensors", folder.free
    whole = file.read_bytes()
    how = {"max_memory": {"pretended": room(3), "cpu": 100}, "experts_device": "auto"}
    how |= {"kv_tokens": 16, "offload_folder": disk}

    def shorter(*args: Any) -> int:
        os.truncate(file, len(whole) // 2)
        return free(*args)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "free", shorter)
        with pytest.raises(SafetensorError, match="not fully covered"):
            from_pretrained(source, **how)
    assert list(disk.iterdir()) == []
    file.write_bytes(whole)
    assert from_pretrained(source, **how)(IDS).logits.equal(want)


def test_short_memory_of_a_loaded_model(disk, want):
    model = from_pretrained(MADE / NAME)
    memory = {"pretended": room(3), "cpu": 100}
    found = offload_(model, memory, kv_tokens=16, offload_folder=disk)
    assert (found.in_files, stored(model)) == (1, [True])
    assert model(IDS).logits.equal(want)


def test_folders(disk, monkeypatch):
    model, memory = from_pretrained(MADE / NAME), {"pretended": room(3), "cpu": 100}
    for where, match in (
        (disk / "none", "there is no such folder"),
        (MADE / NAME / "config.json", "there is no such folder"),
        ("/dev/shm", "a tmpfs, which lies in memory"),
    ):
        monkeypatch.setattr(folder, "_IN_MEMORY", ("tmpfs",) if where == "/dev/shm" else ())
        with pytest.raises(OptionError, match=f"offload_folder = .*{match}"):
            offload_(model, memory, offload_folder=where)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OptionError, match=r"1 kB free in offload_folder; expected .* last 1 layer"):
        offload_(model, memory, offload_folder=disk, kv_tokens=0)
    assert not stored(model)


def test_quantized_model():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MADE / "bf16-qwen3_moe", dtype=torch.bfloat16)
    quantize_(model, NVFP4Config())
    with torch.no_grad():
        want = model(IDS).logits
    experts = {n: m for n, m in model.named_modules() if isinstance(m, Experts)}
    sizes = plan.Model.of_module(model, experts)
    memory = sizes.rest + 3 * sum(layer.nbytes for layer in sizes.layers)
    assert not offload_(model, {"pretended": memory}, kv_tokens=0).whole
    assert model(IDS).logits.equal(want)


def test_errors_come_first(monkeypatch):
    model = from_pretrained(MADE / NAME)
    layer = plan.Model.of_directory(Directory.open(MADE / NAME)).layers[0]
    assert layer.experts >= 4
    for memory, more, match in (
        (
            {"pretended": "1KB"},
            {},
            r"1 kB of the device's memory; expected .* 3 experts of each la",
        ),
        (
            {"pretended": room(1)},
            {"kv_tokens": 16},
            r"raise max_memory \(--gpu-memory\), or leave room",
        ),
        ({"pretended": room(3), "cpu": "1KB"}, {"kv_tokens": 16}, "1 kB of memory; expected"),
        ({"pretended": room(3)}, {"experts_device": "cuda"}, "and all experts"),
        ({"pretended": "much"}, {}, "'20GiB'"),
        ({"cpu": "1GiB"}, {}, "expected one device"),
        ({0: 1, 1: 1}, {}, "expected one device"),
        ({"pretended": 1}, {"experts_device": "gpu"}, "experts_device = 'gpu'"),
        ({"pretended": room(3)}, {"kv_tokens": -1}, "kv_tokens = -1; expected 0 or more"),
    ):
        with pytest.raises(OptionError, match=match):
            offload_(model, memory, **more)
        if "pretended" in memory and "experts_device" not in more:
            with pytest.raises(OptionError, match=match):
                from_pretrained(MADE / NAME, max_memory=memory, experts_device="auto", **more)
    assert not any(isinstance(m, OffloadedExperts) for m in model.modules())
    with pytest.raises(UnsupportedError, match=r"no experts of fusion_moe.nn .*quantize_"):
        offload_(torch.nn.Linear(2, 2), {"pretended": "1GB"})
    with pytest.raises(UnsupportedError, match="experts in floats"):
        from_pretrained(
            MADE / "bf16-qwen3_moe", max_memory={"pretended": 1, "cpu": 1}, experts_device="auto"
        )
    with pytest.raises(OptionError, match=r"every = 1.5; expected 0 or more"):
        offload_(model, {"pretended": room(3)}, every=1.5)
    monkeypatch.setattr(loading, "_available", lambda: 1000)
    with pytest.raises(OptionError, match=r"0 B of memory; expected .* offload_folder"):
        from_pretrained(MADE / NAME, max_memory={"pretended": room(3)}, kv_tokens=16)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no GPU for cuda:0"):
            offload_(model, {0: "1GB"})
        for memory in ({0: "1GB"}, {0: "1GB", "cpu": "1GB"}):
            with pytest.raises(UnsupportedError, match="no GPU for cuda:0"):
                from_pretrained(MADE / NAME, max_memory=memory, device_map="auto")


@pytest.mark.parametrize("cpu", [{}, {"cpu": "1GB"}])
def test_max_memory_alone_offloads(cpu, monkeypatch, want, tmp_path):
    """Of one GPU, whether or not it says how much of the host's memory there is: accelerate would
    place what has no room on a disk.
    """

    def pretended(memory: dict[int | str, int]) -> tuple[str, int]:
        return "pretended", memory[0]

    monkeypatch.setattr(fusion_moe.offload.offload, "device_and_bytes", pretended)
    monkeypatch.setattr(loading, "device_and_bytes", pretended)
    memory = {0: room(3, tokens=plan.KV_TOKENS)}
    model = from_pretrained(MADE / NAME, device_map="auto", max_memory=memory | cpu)
    assert len(stored(model)) == 1
    assert model(IDS).logits.equal(want)
    # by a name on the Hub, whose files are in its cache
    repo = tmp_path / "models--org--model"
    shutil.copytree(MADE / NAME, repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    hub = {"cache_dir": str(tmp_path), "local_files_only": True}
    model = from_pretrained("org/model", device_map="auto", max_memory=memory | cpu, **hub)
    assert len(stored(model)) == 1
    assert model(IDS).logits.equal(want)
    with pytest.raises(OptionError, match="from_pretrained: .*raise max_memory"):  # before it reads
        from_pretrained("org/model", device_map="auto", max_memory={0: 1, "cpu": "1GB"}, **hub)


def test_accelerate_places_what_is_not_offloaded(caplog):
    """Experts in floats, and models that cannot be offloaded, if only max_memory asked for it."""
    pytest.importorskip("accelerate")
    memory = {"cpu": "1GiB", "disk": "1GiB"}
    for name in ("bf16-qwen3_moe", NAME):
        with caplog.at_level("INFO", "fusion_moe"):
            model = from_pretrained(MADE / name, device_map="auto", max_memory=memory)
        assert f"{name}: accelerate places whole modules, no experts: max_memory" in caplog.text
        assert not any(isinstance(m, OffloadedExperts) for m in model.modules())

    def load(**kwargs: object) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    given = {"device_map": "auto", "max_memory": {"pretended": "1GB", "cpu": "1GB"}}
    assert offloaded(load, None, None, None, None, given) is None
    assert "nothing is offloaded: offload_: no experts" in caplog.text
    with pytest.raises(UnsupportedError, match="no experts"):
        offloaded(load, None, None, "auto", None, given)


@pytest.mark.once
def test_sizes():
    for text, want in (
        ("20GiB", 20 << 30),
        ("1.5 kb", 1500),
        ("3MB", 3 * 10**6),
        (7, 7),
        ("5B", 5),
    ):
        assert bytes_of(text) == want
    for bad in ("20", "GiB", -1, True, None, "1.5.1GB"):
        with pytest.raises((OptionError, ValueError)):
            bytes_of(bad)


@pytest.mark.once
def test_expected_speed():
    """More slots are never slower; a model that fits is as fast as its bytes are read."""
    layer = plan.Layer("experts", 256, 24_800_000, 44 * 10**6, 8)
    layers = (layer,) * 58
    model = plan.Model(layers, 20 * 10**9, 50_000)
    times = []
    for memory in (40, 80, 140, 400):
        found = plan.make(model, memory * 10**9, 10**12)
        times.append(found.seconds(EXPECTED["H100"]))
        assert found.whole == (memory == 400)
        used = sum(found.slots) * layer.nbytes
        assert used + model.rest < memory * 10**9
    assert times == sorted(times, reverse=True)
    held = plan.make(model, 140 * 10**9, 10**12)
    filed = plan.make(model, 140 * 10**9, 200 * 10**9, disk=10**12)
    assert (held.in_files, filed.in_files) == (0, 27)  # of 6.35 GB
    assert len(filed.in_memory) == 31
    assert filed.slots == held.slots
    assert filed.seconds(EXPECTED["H100"]) > 2 * held.seconds(EXPECTED["H100"])
    read = (model.rest + 58 * 8 * 24_800_000) / EXPECTED["H100"].gpu
    assert times[-1] == pytest.approx(read)


@pytest.mark.once
def test_command(tmp_path, monkeypatch):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from fusion_moe.cli.app import app

    def run(*arguments: object):
        return CliRunner().invoke(app, ["plan", *map(str, arguments)])

    small = f"{room(3, tokens=0) + 2**30}B"
    found = run(MADE / NAME, "--gpu-memory", small, "--ram", 1, "--kv-tokens", 0)
    assert found.exit_code == 0
    assert "3 slots a layer" in found.stdout
    assert "on an H100, the default of --gpu, beside" in found.stdout
    assert "of 20 GiB (21.5 GB):" in run(MADE / NAME, "--gpu-memory", "20GiB").stdout
    assert "on an H200 beside" in run(MADE / NAME, "--gpu", "H200").stdout
    shown = json.loads(run(MADE / NAME, "--json").stdout)
    assert (shown["whole"], shown["resident"], shown["gpu"]) == (True, 1, "H100")
    short = [MADE / NAME, "--gpu-memory", small, "--ram", "1KB", "--kv-tokens", 0]
    assert "--offload-folder" in run(*short).output
    monkeypatch.setattr(folder, "_IN_MEMORY", ())
    filed = run(*short, "--offload-folder", tmp_path).stdout
    assert "of experts in 1 layer, which the CPU computes" in filed
    assert "and a disk of 3 GB/s" in filed
    layers = len(shown["plan"]["model"]["layers"])
    assert shown["tokens_per_second"] == pytest.approx(1 / layers / plan.LAUNCHES)
    assert run(MADE / NAME, "--gpu-memory", "1KB").exit_code == 2
    assert "on an H200 beside" in run(MADE / NAME, "--gpu", "nvidia h200").stdout
    for gpu in ("T4", "NVIDIA GeForce RTX 4090"):
        other = run(MADE / NAME, "--gpu", gpu)
        assert other.exit_code == 2
        assert "one of H100, H200: how fast experts are copied to others" in other.output
    assert run(MADE / "nowhere").exit_code == 1
    floats = run(MADE / "bf16-qwen3_moe")
    assert floats.exit_code == 3
    assert "experts in floats; expected experts in few bits" in floats.output
    assert (
        ", of 0.5 GiB"
        in run(MADE / NAME, "--gpu-memory", small, "--ram", "0.5", "--kv-tokens", 0).stdout
    )


@pytest.mark.once
def test_nobody_else_imports_it():
    code = (
        "import sys; from fusion_moe.transformers import from_pretrained; "
        f"from_pretrained({str(MADE / NAME)!r}); "
        "sys.exit(any(n.startswith('fusion_moe.offload') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_a_folder_that_is_full_in_the_middle_loses_nothing(disk):
    """Where there seemed to be room; the model is as it was, and may go elsewhere."""
    model = qwen3_moe(num_hidden_layers=2).bfloat16()
    quantize_(model)
    layers = [m for m in model.modules() if isinstance(m, Experts)]
    ids = IDS % 32
    with torch.no_grad():
        want = model(ids).logits
    memory, more = {"pretended": "1GB", "cpu": 100}, {"kv_tokens": 0, "experts_device": "cpu"}
    before, largest = resource.getrlimit(resource.RLIMIT_FSIZE), layers[0].gate_up_proj.nbytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))  # smaller ones fit
    try:
        with pytest.raises(OSError, match="File too large"):
            offload_(model, memory, offload_folder=disk, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not stored(model)
    with torch.no_grad():
        assert model(ids).logits.equal(want)
    offload_(model, memory, offload_folder=disk, **more)
    assert stored(model) == [True, True]
    with torch.no_grad():
        assert model(ids).logits.equal(want)
