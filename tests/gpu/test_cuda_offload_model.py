"""A model whose experts are offloaded from a GPU: as the model that is there whole, to rounding, in
eager steps and in replayed graphs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fusion_moe import NVFP4Config
from fusion_moe.integrations.transformers.decoding import Decoder
from fusion_moe.offload import OffloadedExperts, counters, explain, learn_, plan
from fusion_moe.transformers import from_pretrained

pytestmark = pytest.mark.gpu
SMALL = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"
IDS = torch.arange(3, 67)[None]


def loaded(**more):
    return from_pretrained(
        SMALL, dtype=torch.bfloat16, quantization_config=NVFP4Config(), **more
    ).eval()


@pytest.fixture(scope="module")
def whole():
    return loaded().to("cuda")


@pytest.mark.parametrize("megabytes", [4, 5])
@torch.no_grad()
def test_offloaded(whole, megabytes):
    memory = {0: plan.WORKSPACE + megabytes * 10**6, "cpu": "1GiB"}
    model = loaded(device_map="auto", max_memory=memory, kv_tokens=100)
    layers = [m for m in model.modules() if isinstance(m, OffloadedExperts)]
    assert len(layers) == 4
    assert {p.device.type for m in layers for p in m.parameters()} == {"cpu"}
    assert model.lm_head.weight.is_cuda
    ids = IDS.cuda()
    for tokens in (1, 5, 64):
        want, found = whole(ids[:, :tokens]).logits, model(ids[:, :tokens]).logits
        assert (found - want).norm() <= 0.02 * want.norm(), tokens
    said = counters(model).values()
    assert all(c.hits and c.misses and c.copied + c.computed for c in said)
    assert learn_(model) >= 0
    assert "slots' experts are there" in explain(model, ids[:, :1])


def test_experts_that_the_cpu_computes(whole):
    model = loaded(max_memory={0: plan.WORKSPACE + 3 * 10**6}, experts_device="cpu", kv_tokens=100)
    ids = IDS[:, :5].cuda()
    want, found = whole(ids).logits, model(ids).logits
    assert (found - want).norm() <= 0.02 * want.norm()
    assert all(c.computed and not c.hits + c.copied for c in counters(model).values())


@torch.no_grad()
def test_replayed_graphs(whole):
    """Steps of generating are replays, between which the cache changes."""
    memory = {0: plan.WORKSPACE + 4 * 10**6, "cpu": "1GiB"}
    model = loaded(device_map="auto", max_memory=memory, kv_tokens=100)
    decoders = [Decoder(m, 64, backend="eager") for m in (whole, model)]
    assert not any(d.why_plain for d in decoders)
    texts = []
    for decoder in decoders:
        ids = [int(decoder.prompt(IDS[:, :32].cuda()))]
        for _ in range(16):
            ids.append(int(decoder.step()))
            learn_(model)
        texts.append(ids)
    assert texts[0][:4] == texts[1][:4]  # from there on roundings may choose another text
    assert sum(c.steps for c in counters(model).values()) >= 4 * 17
