"""Every family with experts, on its own class: what is saved after `quantize_`, and what `quantize`
makes of its files, loads again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file
from torch import Tensor

import fusion_moe
from fusion_moe.checkpoints import Directory, quantize
from fusion_moe.nn.frozen.packed import PackedModule
from fusion_moe.transformers import from_pretrained
from tests.families.decoded import relative
from tests.families.models import decorated
from tests.families.tiny import FAMILIES, tiny

pytestmark = pytest.mark.once


def logits(model: Any) -> Tensor:
    torch.manual_seed(0)  # a family has noise
    with torch.no_grad():
        return getattr(model, "thinker", model)(
            input_ids=torch.arange(3, 12)[None], use_cache=False
        )[0]


def same(a: Any, b: Any) -> bool:
    """Whether two models have the same class, and the same bytes in the same parameters and
    buffers.
    """
    return type(a) is type(b) and same_tensors(a.state_dict(), b.state_dict())


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(t.flatten().view(torch.uint8), b[name].flatten().view(torch.uint8))
        for name, t in a.items()
    )


def test_names_stay_when_a_model_is_saved_again(tmp_path: Path):
    model = tiny("mixtral")
    fusion_moe.quantize_(model)
    saved = []
    for _ in range(2):
        model.save_pretrained(tmp_path)
        saved.append(Directory.open(tmp_path).tensors.keys())
    assert saved[0] == saved[1]
    assert any(name.endswith("experts.0.w1.weight") for name in saved[0])


def test_every_family():
    assert FAMILIES.keys() >= {family for family, _ in decorated()}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trips(family: str, tmp_path: Path):
    """What is saved loads again; and `quantize` writes the same, or what loads as the same."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "floats")
    fusion_moe.quantize_(model)
    assert any(isinstance(m, PackedModule) for m in model.modules())
    model.save_pretrained(tmp_path / "saved")
    saved = from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert same(saved, model)
    assert relative(logits(saved), logits(model)) <= 1e-6
    files = tmp_path / "saved", quantize(tmp_path / "floats", tmp_path / "quantized")
    if not same_tensors(*(load_file(path / "model.safetensors") for path in files)):
        quantized = from_pretrained(files[1], dtype=torch.float32)
        assert relative(logits(quantized), logits(model)) <= 1e-6
        # the experts of its vision tower stay in floats: their files call them fc1 to fc3
        assert same(quantized, model) or family == "dots3_note"
