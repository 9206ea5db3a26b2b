"""Adapters pass between PEFT and this library, in both directions, with the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from by_peft import DELTAS, MADE, adapted, deltas, make
from safetensors.torch import load_file
from tiny import tiny
from tiny_qwen3 import qwen3_moe
from torch import Tensor

import fusion_moe
from fusion_moe import nn
from fusion_moe.encodings import dequantize
from fusion_moe.lora.files import load_lora_, save_lora

TOKENS = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))


def quantized_and_decoded() -> tuple[Any, Any]:
    """A model with NVFP4 experts, and the same in bf16 with the numbers that those stand for."""
    model = qwen3_moe().bfloat16()
    quantized = copy.deepcopy(model)
    fusion_moe.quantize_(quantized)
    experts, ours = model.model.layers[0].mlp.experts, quantized.model.layers[0].mlp.experts
    experts.gate_up_proj.data, experts.down_proj.data = (
        dequantize(ours.weight_of(p)).bfloat16() for p in ours.projections
    )
    return quantized, model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


def assert_as_near(ours: Any, theirs: Any) -> None:
    """Both are as far from float32 as bf16's rounding takes them."""
    truth = logits(copy.deepcopy(theirs).float())
    found, known = ((logits(m) - truth).norm() / truth.norm() for m in (ours, theirs))
    assert known < 0.03
    assert found < 2 * known


def test_what_peft_made_loads():
    """Bit for bit what PEFT adds: which is committed, so that this runs without PEFT."""
    model, want = qwen3_moe().bfloat16(), load_file(MADE / DELTAS)
    fusion_moe.quantize_(model)
    assert load_lora_(model, MADE) == [
        f"model.layers.0.mlp.experts.{p}" for p in ("gate_up", "down")
    ]
    experts = model.model.layers[0].mlp.experts
    for name, adapter in (("gate_up_proj", experts.gate_up_lora), ("down_proj", experts.down_lora)):
        assert torch.equal(torch.stack([adapter.delta(e) for e in range(3)]), want[name].float())
    assert {n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {
        "model.layers.0.mlp.experts.gate_up_lora",
        "model.layers.0.mlp.experts.down_lora",
    }


@pytest.mark.judges("peft")
def test_peft_still_makes_it(tmp_path):
    make(tmp_path)
    for file in ("adapter_model.safetensors", DELTAS):
        now, then = load_file(tmp_path / file), load_file(MADE / file)
        assert now.keys() == then.keys()
        assert all(torch.equal(t, then[name]) for name, t in now.items())


@pytest.mark.judges("peft")
@pytest.mark.parametrize(
    "how", [{}, {"targets": ("experts.down_proj",)}, {"rank": 3, "use_rslora": True}], ids=str
)
def test_from_peft(how, tmp_path):
    """The logits of PEFT on the decoded model."""
    quantized, model = quantized_and_decoded()
    wrapped = adapted(model, **{"alpha": 0.5} | how)
    wrapped.save_pretrained(tmp_path / "saved")
    before = logits(quantized)
    load_lora_(quantized, tmp_path / "saved")
    assert (logits(quantized) - before).norm() > 0.1 * before.norm()
    assert_as_near(quantized, wrapped)


@pytest.mark.judges("peft")
@pytest.mark.parametrize("targets", [("gate_up", "down"), ("down",)])
def test_to_peft(targets, tmp_path):
    from peft import PeftModel

    quantized, model = quantized_and_decoded()
    nn.add_lora_(quantized, 4, 8, targets)
    torch.manual_seed(2)
    for p in quantized.parameters():
        if p.requires_grad:
            p.data.normal_(0, 0.2)
    wrapped = PeftModel.from_pretrained(model, save_lora(quantized, tmp_path / "saved")).eval()
    assert_as_near(quantized, wrapped)
    assert sum(p.numel() for n, p in wrapped.named_parameters() if "lora" in n) == sum(
        p.numel() for n, p in quantized.named_parameters() if "lora" in n
    )


@pytest.mark.judges("peft")
@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h"])
def test_families(family, tmp_path):
    """Weights stored either way, gate and up interleaved, no gate: the same is added to the weights
    as they are here.
    """
    model = tiny(family)
    ours = copy.deepcopy(model)
    name = next(n for n, m in model.named_modules() if nn.contract_of(m))
    contract = nn.contract_of(model.get_submodule(name))
    fusion_moe.quantize_(ours)
    wrapped = adapted(model, targets=(f"{name}.{contract.up_name}", f"{name}.down_proj"))
    wrapped.save_pretrained(tmp_path / "saved")
    load_lora_(ours, tmp_path / "saved")
    added = deltas(wrapped)
    for parameter, order in ((contract.up_name, contract.up), ("down_proj", contract.down)):
        adapter, want = (
            ours.get_submodule(f"{name}.{parameter.removesuffix('_proj')}_lora"),
            order(added[parameter].float()),
        )
        assert torch.equal(torch.stack([adapter.delta(e) for e in range(len(want))]), want)
    again = load_file(save_lora(ours, tmp_path / "ours") / "adapter_model.safetensors")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert again.keys() == saved.keys()
    assert all(torch.equal(t, again[key]) for key, t in saved.items())
