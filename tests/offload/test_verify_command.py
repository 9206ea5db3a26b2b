"""verify: what experts are is said of every projection, and what is wrong or odd is a problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from tiny_qwen3 import qwen3_moe
from typer.testing import CliRunner

import fusion_moe
from fusion_moe import verify
from fusion_moe.cli.app import app
from fusion_moe.errors import UnsupportedError
from fusion_moe.lora.adapter import add_lora_
from fusion_moe.lora.files import load_lora_
from fusion_moe.offload import offload_

EXPERTS = "model.layers.{}.mlp.experts.{}_proj"


def model(**changes: Any) -> Any:
    return qwen3_moe(num_hidden_layers=2, num_experts=4, **changes)


def quantized() -> Any:
    result = model()
    fusion_moe.quantize_(result)
    return result


def peft(base: Any, **how: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"r": 2, "target_modules": [], "target_parameters": targets} | how
    result = get_peft_model(base, LoraConfig(**config))
    g = torch.Generator().manual_seed(1)
    for name, p in result.named_parameters():
        if "lora_" in name:
            p.data.normal_(generator=g)
    return result


def test_every_projection():
    found = verify(quantized(), strict=True).projections
    assert [p.name for p in found] == [
        EXPERTS.format(layer, kind) for layer in (0, 1) for kind in ("gate_up", "down")
    ]
    first = found[0]
    assert (first.encoding, first.shape, first.rank) == ("nvfp4", (4, 32, 32), 0)
    assert (first.where, first.trains, first.saved) == ("cpu", False, True)
    floats = verify(model(), strict=True).projections
    assert {(p.encoding, p.trains) for p in floats} == {("float32", True)}
    assert [p.shape for p in floats] == [p.shape for p in found]
    with pytest.raises(UnsupportedError, match="no experts in a Linear"):
        verify(torch.nn.Linear(2, 2))


def test_adapters_of_offloaded_experts():
    base = quantized()
    offload_(base, {"pretended": "100KB"}, experts_device="cpu", kv_tokens=4)
    add_lora_(base, rank=3)
    found = verify(base, strict=True)
    assert {(p.rank, p.trains, p.saved) for p in found.projections} == {(3, True, True)}
    assert found.projections[0].where == "the host's memory, 0 of 4 also on cpu"
    assert "adapter of rank 3, the host's memory" in str(found)


def test_what_is_odd():
    mixed = model()
    fusion_moe.quantize_(mixed, filter_fn=lambda module, name: "layers.1" in name)
    assert verify(mixed).problems == tuple(
        f"{EXPERTS.format(0, kind)}: in float32, others in nvfp4" for kind in ("gate_up", "down")
    )
    some = quantized()
    add_lora_(some, rank=2, targets="down", filter_fn=lambda module, name: "layers.0" in name)
    assert verify(some).problems == (f"{EXPERTS.format(1, 'down')}: no adapter, others have one",)
    add_lora_(some, rank=4, targets="down", filter_fn=lambda module, name: "layers.1" in name)
    some.model.layers[0].mlp.experts.down_lora.requires_grad_(False)
    assert verify(some).problems == (
        "adapters of ranks 2, 4",
        f"{EXPERTS.format(0, 'down')}: its adapter does not train, others do",
    )
    with pytest.raises(
        UnsupportedError, match=r"verify: 2 problems\n.*ranks 2, 4\n.*does not train"
    ):
        verify(some, strict=True)


def test_weights_without_values():
    with torch.device("meta"):
        found = verify(model())
    assert (
        found.problems[0] == f"{EXPERTS.format(0, 'gate_up')}: no values: it is on the meta device"
    )
    assert len(found.problems) == 4


@pytest.mark.judges("peft")
def test_adapters_of_peft():
    """Also around floats, where PEFT itself multiplies."""
    for base in (quantized(), model()):
        found = verify(peft(base), strict=True)
        assert {(p.rank, p.trains, p.saved) for p in found.projections} == {(2, True, True)}
        assert found.projections[0].name == f"base_model.model.{EXPERTS.format(0, 'gate_up')}"


@pytest.mark.judges("peft")
@pytest.mark.parametrize("of", [quantized, model])
def test_adapters_that_do_nothing(of):
    wrapped = peft(of())
    for name, p in wrapped.named_parameters():
        if "lora_A" in name:
            p.requires_grad_(False)
    assert {p.trains for p in verify(wrapped, strict=True).projections} == {True}
    for name, p in wrapped.named_parameters():
        if "lora_" in name:
            p.requires_grad_("lora_A" in name)
    assert verify(wrapped).problems[0].endswith("B of its adapter is frozen, A trains")
    wrapped.requires_grad_(False)
    assert {p.trains for p in verify(wrapped, strict=True).projections} == {False}
    with wrapped.disable_adapter():
        (*_, last) = verify(wrapped).problems
        assert last.endswith("its adapter is disabled: the model computes without it")
    wrapped.merge_adapter()
    problems = verify(wrapped).problems
    assert len(problems) == 4
    assert "its adapter is merged into the weight: the model computes without it" in problems[0]
    verify(wrapped.merge_and_unload(), strict=True)


def test_floats_without_a_contract():
    """Llama-4's experts do not say how they are stored."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 16}
    sizes |= {"num_local_experts": 4, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "interleave_moe_layer_step": 1}
    floats = Llama4ForCausalLM(Llama4TextConfig(**sizes))
    found = verify(floats, strict=True).projections
    assert [p.shape for p in found] == [(4, 32, 32), (4, 32, 16)]
    assert {p.encoding for p in found} == {"float32"}
    fusion_moe.quantize_(floats)
    again = verify(floats, strict=True).projections
    assert [(p.name, p.shape) for p in again] == [(p.name, p.shape) for p in found]


@pytest.mark.judges("peft")
def test_a_module_that_reads_factors_in_another_order(monkeypatch):
    """Such as of another version of PEFT."""
    from fusion_moe.integrations.peft import layers

    wrapped = peft(quantized())
    own = layers.b_from_peft
    monkeypatch.setattr(
        layers,
        "b_from_peft",
        lambda a, b, e, turned: own(a, b.unflatten(1, (e, -1)).mT.flatten(1), e, turned),
    )
    problems = verify(wrapped).problems
    assert len(problems) == 4
    assert "of default its module reads other factors than PEFT" in problems[0]


def swapped(directory: Path, experts: int) -> None:
    """Gives lora_B the columns of one expert after those of the other, zeros for the last one."""
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, t in tensors.items():
        if "lora_B" in name:
            columns = t.unflatten(1, (-1, experts))  # [N, r, E]
            columns[..., -1] = 0
            tensors[name] = columns.mT.flatten(1).contiguous()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.judges("peft")
@pytest.mark.parametrize("by", ["peft", "load_lora_", "floats"])
def test_a_file_in_another_order(by, tmp_path):
    from peft import PeftModel

    peft(quantized()).save_pretrained(tmp_path)
    for right in (True, False):
        if not right:
            swapped(tmp_path, 4)
        base = model() if by == "floats" else quantized()
        if by != "load_lora_":
            base = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
        else:
            load_lora_(base, tmp_path)
        problems = verify(base).problems
        assert len(problems) == (0 if right else 4)
    assert "lora_B has the columns of one expert after those of the other" in problems[0]


@pytest.mark.judges("peft")
def test_command(tmp_path):
    base = quantized()
    base.save_pretrained(tmp_path / "model")
    peft(base).save_pretrained(tmp_path / "adapter")
    arguments = [
        "verify",
        str(tmp_path / "model"),
        "--adapter",
        str(tmp_path / "adapter"),
        "--json",
    ]
    fine = CliRunner().invoke(app, arguments)
    assert fine.exit_code == 0, fine.output
    result = json.loads(fine.stdout)
    assert result["schema"] == "fusion_moe.verify/1"
    assert {p["rank"] for p in result["found"]["projections"]} == {2}
    swapped(tmp_path / "adapter", 4)
    text = CliRunner().invoke(app, arguments[:-1])
    assert text.exit_code == 1
    assert text.stdout.count("\nproblem: ") == 4


@pytest.mark.judges("peft")
def test_what_is_wrong_with_an_adapter_is_said_of_it(tmp_path):
    quantized().save_pretrained(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    arguments = ["verify", str(tmp_path / "model"), "--adapter", str(tmp_path / "empty")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3
    assert f"fusion-moe: {tmp_path / 'empty'}: " in result.output
