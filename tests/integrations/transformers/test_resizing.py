"""`resize_token_embeddings` of models whose head is encoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_qwen3 import qwen3_moe

import fusion_moe
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.nn import QuantizedLinear
from fusion_moe.transformers import from_pretrained

pytestmark = pytest.mark.usefixtures("meaning")
TOKENS = torch.arange(9)[None]


def with_encoded_head(encoding: str) -> Any:
    model = qwen3_moe(vocab_size=128, hidden_size=128, moe_intermediate_size=32)
    fusion_moe.quantize_(model)
    weight = quantize(model.lm_head.weight.detach(), ENCODINGS[encoding])
    model.lm_head = QuantizedLinear(weight)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4", "fp8", "int4"])
@pytest.mark.parametrize("size", [136, 100])
def test_rows_that_stay_keep_their_numbers(encoding, size):
    model = with_encoded_head(encoding)
    before = logits(model)
    model.resize_token_embeddings(size)
    assert model.lm_head.encoding == ENCODINGS[encoding]
    after = logits(model)
    assert after.shape[-1] == size == model.lm_head.out_features
    n = min(size, before.shape[-1])
    assert torch.equal(after[..., :n], before[..., :n])
    assert after.isfinite().all()


def test_a_resized_model_is_saved_and_loaded(tmp_path):
    model = with_encoded_head("nvfp4")
    model.resize_token_embeddings(136)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.float32)
    assert isinstance(loaded.lm_head, QuantizedLinear)
    assert torch.equal(logits(loaded), logits(model))
