"""Routers of transformers' models by `topk_router`: what they return, their gradients, and one
program with their experts.
"""

from __future__ import annotations

import copy
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from tiny_qwen3 import qwen3_moe

import fusion_moe
from fusion_moe.transformers import fuse_routers_

pytestmark = pytest.mark.usefixtures("meaning_without_all")

CONFIG = SimpleNamespace(
    hidden_size=32,
    num_experts=16,
    num_local_experts=16,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    n_routed_experts=16,
)
ROUTERS = [
    ("qwen3_moe", "Qwen3MoeTopKRouter"),
    ("olmoe", "OlmoeTopKRouter"),
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter"),
    ("mixtral", "MixtralTopKRouter"),
    ("minimax", "MiniMaxTopKRouter"),
    ("gpt_oss", "GptOssTopKRouter"),
    ("granitemoe", "GraniteMoeTopKRouter"),
    ("deepseek_v3", "DeepseekV3TopkRouter"),
    ("glm4_moe", "Glm4MoeTopkRouter"),
]


def router(family: str, name: str, **changes) -> torch.nn.Module:
    """One with random parameters."""
    config = SimpleNamespace(**{**vars(CONFIG), **changes})
    made = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(config)
    g = torch.Generator().manual_seed(0)
    for t in (*made.parameters(), *made.buffers()):
        t.data = torch.randn(t.shape, generator=g) / 4
    return made


@pytest.mark.parametrize(("family", "name"), ROUTERS)
@pytest.mark.parametrize("normalized", [False, True])
def test_a_router_returns_what_it_did(family, name, normalized):
    plain = router(family, name, norm_topk_prob=normalized)
    ours = copy.deepcopy(plain)
    assert fuse_routers_(ours) == ("",)
    x, gradients = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)), []
    (logits, weights, ids), (want_logits, want_weights, want_ids) = ours(x), plain(x)
    order, want_order = ids.argsort(1), want_ids.argsort(1)  # DeepSeek-V3 leaves the order open
    assert logits.equal(want_logits)
    assert ids.gather(1, order).equal(want_ids.gather(1, want_order))
    assert (weights.dtype, ids.dtype) == (want_weights.dtype, want_ids.dtype)
    weights, want_weights = weights.gather(1, order), want_weights.gather(1, want_order)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=1e-7)
    for made, module in ((weights, ours), (want_weights, plain)):
        (made * torch.arange(4)).sum().backward()
        gradients.append(module.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    del ours.forward
    assert ours(x)[1].equal(plain(x)[1])


def test_no_other_family_is_imported(monkeypatch):
    made = router("mixtral", "MixtralTopKRouter")
    monkeypatch.setattr("fusion_moe.integrations.transformers.routers.import_module", None)
    assert fuse_routers_(torch.nn.Sequential(torch.nn.Linear(32, 32), made)) == ("1",)


def test_others_stay_as_they_are():
    class Router(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).topk(2)

    model = torch.nn.Sequential(Router(8, 4), torch.nn.Linear(8, 8), torch.nn.ReLU())
    assert fuse_routers_(model) == ()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.usefixtures("call_by_call")
def test_a_model_compiled():
    """The choice is in a program with the experts: no topk is left outside."""
    model = qwen3_moe(num_experts=8)
    fusion_moe.quantize_(model)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        want = model(ids).logits
        assert fuse_routers_(model) == ("model.layers.0.mlp.gate",)
        torch.testing.assert_close(
            torch.compile(model, backend="fusion_moe")(ids).logits, want, rtol=1e-3, atol=1e-3
        )
        report = fusion_moe.explain(model, ids)
    text = str(report)
    assert "topk_ids" in text
    assert "aten.topk" not in text
