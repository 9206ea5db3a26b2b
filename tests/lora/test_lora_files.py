"""save_lora and load_lora_: a directory appears whole or not at all, and every tensor of it finds
its place.
"""

from __future__ import annotations

import doctest
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_peft import MADE
from safetensors.torch import load_file, save_file
from tiny_qwen3 import qwen3_moe

import fusion_moe
from fusion_moe import nn
from fusion_moe.errors import CheckpointError, DtypeError, NonFiniteError, UnsupportedError
from fusion_moe.lora.files import (
    directory as files,
    factors,
    load_lora_,
    save_lora,
)

LAYER = "base_model.model.model.layers.0.mlp.experts"


def quantized() -> Any:
    model = qwen3_moe().bfloat16()
    fusion_moe.quantize_(model)
    return model


def adapted(rank: int = 4) -> Any:
    """A model with random adapters."""
    model = quantized()
    nn.add_lora_(model, rank, 8)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(generator=torch.Generator().manual_seed(2))
    return model


def lora_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if "_lora." in name}


def test_round_trip(tmp_path):
    model, other = adapted(), quantized()
    assert save_lora(model, tmp_path / "saved") == tmp_path / "saved"
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "saved",
    ]
    assert load_lora_(other, tmp_path / "saved") == [
        f"model.layers.0.mlp.experts.{p}" for p in ("gate_up", "down")
    ]
    ours, theirs = lora_of(model), lora_of(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())
    assert (
        model.model.layers[0].mlp.experts.down_lora.scale
        == other.model.layers[0].mlp.experts.down_lora.scale
        == 2
    )


def test_dtype(tmp_path):
    model = quantized()
    load_lora_(model, MADE, dtype=torch.bfloat16)
    assert {p.dtype for n, p in model.named_parameters() if "_lora." in n} == {torch.bfloat16}
    tensors = load_file(save_lora(model, tmp_path / "saved") / files.TENSORS)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_nothing_is_left_of_what_fails(tmp_path, monkeypatch):
    model = adapted()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    said = r"not written: No space left on device: [\d.]+ .B free at first; free some space"
    with pytest.raises(CheckpointError, match=said):
        save_lora(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path):
    (tmp_path / "file").write_text("kept")
    for name in ("", "file"):
        with pytest.raises(CheckpointError, match="the destination exists; expected a new path"):
            save_lora(adapted(), tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"


def test_several_ranks_have_no_file(tmp_path):
    model = adapted(rank=4)
    model.model.layers[0].mlp.experts.down_lora = nn.Adapter(
        (3, 32, 16), 2, 8.0, torch.float32, torch.device("cpu")
    )
    says = (
        "save_lora: rank 2 with alpha 8.0 and rank 4 with alpha 8.0; expected adapters of one "
        "rank and one alpha"
    )
    with pytest.raises(UnsupportedError, match=says):
        save_lora(model, tmp_path / "saved")


def test_no_adapters(tmp_path):
    with pytest.raises(UnsupportedError, match="save_lora: no adapters"):
        save_lora(quantized(), tmp_path / "saved")


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def with_tensors(how: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / files.TENSORS)
        how(tensors)
        save_file(tensors, folder / files.TENSORS)

    return change


BAD = {
    "another kind": (
        with_config(peft_type="LOHA"),
        UnsupportedError,
        "peft_type = 'LOHA', bias = 'none'; expected LORA adapters",
    ),
    "DoRA": (
        with_config(use_dora=True),
        UnsupportedError,
        "use_dora = True; expected adapters of experts' parameters alone",
    ),
    "other modules": (
        with_config(target_modules=["q_proj"]),
        UnsupportedError,
        r"target_modules "
        r"= \['q_proj'\]",
    ),
    "ranks": (
        with_config(rank_pattern={"down_proj": 8}),
        UnsupportedError,
        r"rank_pattern = "
        r"\{'down_proj': 8\}",
    ),
    "no rank": (with_config(r=None), CheckpointError, "r = None; expected a positive integer"),
    "another rank": (
        with_config(r=3),
        CheckpointError,
        r"float32 \[6, 32\]; expected "
        r".*lora_A.weight of floats \[9, 32\]",
    ),
    "no alpha": (
        with_config(lora_alpha="x"),
        CheckpointError,
        "lora_alpha = 'x'; expected a finite number",
    ),
    **{
        f"r = {r:.0e}": (
            with_config(r=r),
            CheckpointError,
            rf"r = {str(r)[:18]}.{{0,40}}; "
            r"expected a positive integer of "
            r"31 bits$",
        )
        for r in (10**18, 10**300)
    },
    "r of 401 digits": (
        with_config(r=10**400),
        CheckpointError,
        r"r = 1.{30,40}0; expected a "
        r"positive integer of 31 bits$",
    ),
    "a large r": (
        with_config(r=2**31 - 1),
        CheckpointError,
        r"expected .*lora_A.weight of floats "
        r"\[6442450941, 32\]",
    ),
    "alpha of 401 digits": (
        with_config(lora_alpha=10**400),
        CheckpointError,
        r"lora_alpha = "
        r"1.{30,40}0; expected a finite number",
    ),
    "a large alpha": (
        with_config(lora_alpha=1e308),
        CheckpointError,
        r"lora_alpha = 1e\+308; "
        r"expected a finite number "
        r"in float32$",
    ),
    "NaN": (
        with_tensors(lambda t: t[f"{LAYER}.lora_B.weight"][1, 2:4].fill_(math.nan)),
        NonFiniteError,
        f"2 NaN .* {LAYER}.lora_B",
    ),
    "infinity": (
        with_tensors(lambda t: t[f"{LAYER}.lora_A.weight"][0, 0].fill_(math.inf)),
        NonFiniteError,
        "1 NaN or infinite among",
    ),
    "no targets": (
        with_config(target_parameters=None),
        CheckpointError,
        "target_parameters = None; expected names of experts'",
    ),
    "one target": (
        with_config(target_parameters=["down_proj"]),
        CheckpointError,
        "base_layer.lora_A.weight has no place",
    ),
    "no config": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        CheckpointError,
        "No such file",
    ),
    "no tensors": (
        lambda folder: (folder / files.TENSORS).unlink(),
        CheckpointError,
        "No such file",
    ),
    "pickled": (
        lambda folder: (folder / files.TENSORS).rename(folder / "adapter_model.bin"),
        UnsupportedError,
        "pickled tensors",
    ),
    "one missing": (
        with_tensors(lambda t: t.pop(f"{LAYER}.lora_B.weight")),
        CheckpointError,
        f"no {LAYER}.lora_B.weight; expected",
    ),
    "another layer": (
        with_tensors(
            lambda t: t.update({f"{LAYER.replace('0', '7')}.lora_A.weight": torch.zeros(6, 16)})
        ),
        CheckpointError,
        "adapters of model.layers.7.mlp.experts; expected modules with experts: "
        "model.layers.0.mlp.experts",
    ),
    "no tensor at all": (
        with_tensors(lambda t: t.clear()),
        CheckpointError,
        "no tensors; expected those of adapters",
    ),
    "a number beyond float32": (
        with_tensors(lambda t: t.update({k: v.double() * 1e300 for k, v in t.items()})),
        NonFiniteError,
        "expected numbers that are finite in torch.float32",
    ),
    "a foreign tensor": (
        with_tensors(lambda t: t.update({f"{LAYER}.lora_magnitude_vector": torch.zeros(1)})),
        CheckpointError,
        "lora_magnitude_vector has no place; expected adapters of experts alone",
    ),
}


@pytest.mark.parametrize(("change", "error", "says"), BAD.values(), ids=BAD)
def test_what_does_not_fit_changes_nothing(change, error, says, tmp_path):
    folder, model = Path(shutil.copytree(MADE, tmp_path / "made")), quantized()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    change(folder)
    with pytest.raises(error, match=says):
        load_lora_(model, folder)
    assert not lora_of(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


def test_a_layer_that_is_missing(tmp_path):
    """Targets that name both layers, and tensors of one."""
    folder, model = Path(shutil.copytree(MADE, tmp_path / "made")), qwen3_moe(num_hidden_layers=2)
    fusion_moe.quantize_(model)
    with pytest.raises(CheckpointError, match=f"no {LAYER.replace('0', '1')}.base_layer.lora_A"):
        load_lora_(model, folder)
    assert not lora_of(model)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.int8, DtypeError), (torch.float16, NonFiniteError)]
)
def test_a_dtype_that_does_not_hold_the_numbers(dtype, error, tmp_path):
    folder, model = Path(shutil.copytree(MADE, tmp_path / "made")), quantized()
    with_tensors(lambda t: t[f"{LAYER}.lora_A.weight"].fill_(1e5))(folder)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(error, match=str(dtype)):
        load_lora_(model, folder, dtype=dtype)
    assert not lora_of(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


def test_not_twice():
    model = quantized()
    load_lora_(model, MADE)
    with pytest.raises(
        UnsupportedError,
        match="load_lora_: model.layers.0.mlp.experts has adapters already; train these",
    ):
        load_lora_(model, MADE)


def test_doctest():
    assert doctest.testmod(factors).failed == 0
