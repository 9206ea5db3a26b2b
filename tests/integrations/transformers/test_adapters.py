"""Adapters of a model that transformers loaded from encoded weights: transformers lets it train,
and saves them beside it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from files import MADE
from transformers.trainer_utils import validate_quantization_for_training

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
