"""Adapters of a model that transformers loaded from encoded weights: transformers lets it train,
and saves them beside it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from files import MADE
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM
from transformers.trainer_utils import validate_quantization_for_training

from fusion_moe import quantize_
from fusion_moe.checkpoints import convert
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import add_lora_
from fusion_moe.transformers import from_pretrained

pytestmark = pytest.mark.usefixtures("meaning")


@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "ct-qwen3_moe"])
def test_loaded_models_train_and_are_saved_with_adapters(name, tmp_path, caplog):
    model = from_pretrained(MADE / name, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    adapted = add_lora_(model, 4)
    validate_quantization_for_training(model)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert len(adapted) == 2 * len(model.model.layers)
    assert {
        n.partition("_lora.")[0] for n, p in model.named_parameters() if p.grad is not None
    } == set(adapted)
    model.save_pretrained(tmp_path / "adapted")
    for file in (tmp_path / "base").iterdir():
        assert file.read_bytes() == (tmp_path / "adapted" / file.name).read_bytes()
    loaded, state = (
        from_pretrained(tmp_path / "adapted", dtype=torch.float32).state_dict(),
        model.state_dict(),
    )
    assert loaded.keys() == state.keys()
    assert all(torch.equal(t.float(), loaded[key].float()) for key, t in state.items())
    assert not caplog.records


def test_adapters_are_not_converted(tmp_path, caplog):
    """They may belong to these weights, and not to rounded ones: nothing is dropped silently."""
    model = from_pretrained(MADE / "modelopt-qwen3_moe", dtype=torch.float32)
    add_lora_(model, 4)
    model.save_pretrained(tmp_path / "adapted")
    convert(tmp_path / "adapted", tmp_path / "dense", to="dense")
    assert "adapters: these adapters are not written; copy the folder" in caplog.text


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "ct-qwen3_moe-int4", "ct-gpt_oss"])
def test_the_state_dict_that_is_given_is_saved(name, adapted, tmp_path):
    """Such as averages, or what ranks gathered: transformers asks a quantizer for the model's."""
    model, other = (from_pretrained(MADE / name, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for key, t in other.state_dict().items():
            if key.endswith(("norm.weight", "block_scale", "decode_scale", "_proj_scale")):
                t.copy_(t.float() / 2)
    other.save_pretrained(tmp_path / "other")
    if adapted:
        add_lora_(model, 4)
    given = other.state_dict()
    model.save_pretrained(tmp_path / "given", state_dict=given)
    names = {file.name for file in (tmp_path / "other").iterdir()}
    for file in names:
        assert (tmp_path / "other" / file).read_bytes() == (tmp_path / "given" / file).read_bytes()
    assert given.keys() == other.state_dict().keys()
    part = {key: t for key, t in given.items() if key == "model.norm.weight"}
    model.save_pretrained(tmp_path / "part", state_dict=part)
    assert load_file(tmp_path / "part" / "model.safetensors").keys() == part.keys()


def test_names_of_parameters_are_refused(tmp_path):
    """Nothing would read them again."""
    model = from_pretrained(MADE / "modelopt-qwen3_moe", dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="save_original_format=False, of a model with enc"):
        model.save_pretrained(tmp_path / "saved", save_original_format=False)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("part", [True, False])
def test_part_of_what_was_quantized_is_refused(part, tmp_path):
    model = Qwen3MoeForCausalLM.from_pretrained(MADE / "bf16-qwen3_moe")
    whole, inner = model, model.model
    quantize_(whole if part else inner)
    with pytest.raises(UnsupportedError, match="expected the model that quantize_ or from_pretr"):
        (inner if part else whole).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    (whole if part else inner).save_pretrained(tmp_path / "saved")
    from_pretrained(tmp_path / "saved")
