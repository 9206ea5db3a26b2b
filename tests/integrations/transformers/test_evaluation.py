"""Perplexity, and the distance from another model, against sums that are written out here."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from tiny_qwen3 import qwen3_moe

import fusion_moe
from fusion_moe.errors import OptionError

evaluation = pytest.importorskip("fusion_moe.integrations.transformers.evaluation")
change, evaluate, windows_of = evaluation.change, evaluation.evaluate, evaluation.windows_of

TEXTS = ["The first text. " * 4, "Another one, with ümlauts."]


class Bytes:
    """A tokenizer of bytes; 0 begins a text."""

    bos_token_id, eos_token_id = None, 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[1 + b for b in text.encode()])


@pytest.fixture(scope="module")
def model():
    return qwen3_moe(vocab_size=257, num_hidden_layers=2, num_experts=8)


def logits_of(model, text):
    tokens = torch.tensor([0, *(1 + b for b in text.encode())])
    with torch.no_grad():
        return model(tokens[None, :-1]).logits[0], tokens[1:]


def test_perplexity_and_bits(model):
    both = [logits_of(model, text) for text in TEXTS]
    losses = [F.cross_entropy(*each, reduction="none").double() for each in both]
    found = evaluate(model, Bytes(), TEXTS)
    assert found.difference is None
    for got, want in zip(found.losses, losses, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    total, size = sum(float(each.sum()) for each in losses), sum(len(t.encode()) for t in TEXTS)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(total / size), rel=1e-4)


def test_windows_score_each_token_once_with_half_a_window_before_it():
    for context in (2, 10, 63, 64, 65):
        scored = []
        for tokens, count in windows_of(Bytes(), TEXTS[0], context):
            assert len(tokens) <= context + 1
            assert not scored or len(tokens) - 1 - count >= context // 2
            scored += tokens[-count:].tolist()
        assert scored == [1 + b for b in TEXTS[0].encode()]


def test_the_distance_from_another_model(model):
    other = copy.deepcopy(model)
    fusion_moe.quantize_(other)
    with fusion_moe.options.override(target="reference"):
        found = evaluate(other, Bytes(), TEXTS, model).difference
        pairs = [(logits_of(other, text)[0], logits_of(model, text)[0]) for text in TEXTS]
    ours, theirs = (torch.cat(rows).log_softmax(-1) for rows in zip(*pairs, strict=True))
    want = F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    assert found.kl == pytest.approx(float(want), rel=1e-3)
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    assert found.same_token == pytest.approx(float(same), abs=0.02)
    low, high = found.interval
    assert low < found.perplexity < high
    routers = found.routers
    assert [*routers] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert routers["model.layers.0.mlp.experts"] == 1  # nothing before it is quantized
    assert 0.5 < routers["model.layers.1.mlp.experts"] < 1


def test_a_model_is_at_no_distance_from_itself(model):
    found = evaluate(model, Bytes(), TEXTS, model).difference
    assert (found.perplexity, found.kl, found.same_token) == (0, 0, 1)
    assert set(found.routers.values()) == {1}
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_interval_is_that_of_the_mean_over_windows():
    torch.manual_seed(0)
    losses = [torch.randn(50).double() + 0.1 for _ in range(40)]
    low, middle, high = change(losses, [torch.zeros(50).double()] * 40)
    means = torch.stack([each.mean() for each in losses])
    error = float(means.std(correction=0)) / 40**0.5
    for got, z in ((low, -1.96), (middle, 0), (high, 1.96)):
        assert got == pytest.approx(math.expm1(float(means.mean()) + z * error), rel=1e-9)


def test_no_text(model):
    with pytest.raises(OptionError, match="no text; expected at least one token"):
        evaluate(model, Bytes(), ["", ""])
