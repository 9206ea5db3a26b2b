"""Experts that nobody quantized: torch.compile warns of them once, explain says it first."""

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_qwen3 import qwen3_moe

import fusion_moe
from fusion_moe.frontends.inductor import compile_graph
from fusion_moe.messages import warn


def in_floats(layers: int) -> Any:
    model = qwen3_moe(num_hidden_layers=layers).bfloat16()
    model.set_experts_implementation("batched_mm")
    return model


@pytest.fixture
def warned(caplog, monkeypatch):
    """What was logged of expert weights, in a process that has not said it yet."""
    monkeypatch.setattr(warn, "_said", set())
    torch._dynamo.reset()
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.WARNING and "expert weights" in r.getMessage()
    ]


TOKENS = torch.arange(5)[None]
FIRST = "model.layers.0.mlp.experts.gate_up_proj"


def test_a_model_that_is_not_quantized_is_warned_of_once(warned, monkeypatch):
    # Inductor's kernels have no part in it, and take long
    monkeypatch.setattr(compile_graph, "has_compiler", lambda: False)
    compiled = torch.compile(in_floats(1), backend="fusion_moe", dynamic=False)
    with torch.no_grad():
        compiled(TOKENS, use_cache=False)
        compiled(TOKENS[:, :3], use_cache=False)
    assert len(warned()) == 1
    assert warned()[0].startswith(
        f"expert weights in floating point: {FIRST}, model.layers.0.mlp.experts.down_proj; "
        "fusion_moe.quantize_(model) packs them in NVFP4"
    )


def test_explain_says_it_first():
    with torch.no_grad():
        report = fusion_moe.explain(in_floats(3), TOKENS, use_cache=False)
    assert report.float_experts[0] == FIRST
    assert len(report.float_experts) == 6
    title, said, *_ = report.details().split("\n\n")
    assert title.startswith("fusion_moe.explain: ")
    assert said.startswith("expert weights in floating point: ")
    assert " and 2 more; fusion_moe.quantize_(model) packs them in NVFP4" in " ".join(said.split())


class Loop(torch.nn.Module):
    """Experts that are asked one by one how many tokens they have."""

    def __init__(self):
        super().__init__()
        self.up, self.router = torch.nn.Parameter(torch.randn(4, 64, 64)), torch.nn.Linear(64, 4)

    def forward(self, x):
        ids, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for e in range(4):
            tokens = (ids == e).nonzero()[:, 0]
            if tokens.numel():
                out[tokens] = x[tokens] @ self.up[e]
        return out


def test_explain_says_why_experts_in_a_loop_are_in_no_graph():
    with torch.no_grad():
        report = fusion_moe.explain(Loop(), torch.randn(5, 64))
    (left,) = report.not_fused
    assert report.graphs == 0
    assert report.float_experts == ("up",)
    assert left.op == "graph break"
    assert "data-dependent" in left.why
    assert "in a loop, fusion_moe.quantize_" in left.why
    assert left.source.endswith("in forward: if tokens.numel():")


def test_the_line_of_a_graph_break_that_has_no_experts():
    def function(x):
        torch._dynamo.graph_break()
        return 3

    (left,) = fusion_moe.explain(function, torch.ones(2)).not_fused
    assert left.source.endswith("in function: torch._dynamo.graph_break()")
    assert "loop" not in left.why


def test_nothing_is_said_of_what_an_optimizer_steps(warned, monkeypatch):
    monkeypatch.setattr(compile_graph, "has_compiler", lambda: False)
    weight = torch.nn.Parameter(torch.randn(4, 32, 32))
    weight.grad = torch.randn_like(weight)
    for foreach in (False, True):
        torch._dynamo.reset()
        torch.compile(torch.optim.AdamW([weight], foreach=foreach).step, backend="fusion_moe")()
    assert warned() == []


def test_nothing_is_said_of_packed_experts():
    model = in_floats(1)
    fusion_moe.quantize_(model)
    with torch.no_grad():
        assert fusion_moe.explain(model, TOKENS, use_cache=False).float_experts == ()


@pytest.mark.parametrize("ours", [True, False])
def test_nothing_is_said_of_weights_that_our_operations_take(ours):
    """They are in floating point because somebody trains them."""
    weight, ends = (
        torch.nn.Parameter(torch.randn(4, 64, 32)),
        torch.tensor([1, 2, 2, 5], dtype=torch.int32),
    )

    def step(x):
        return (
            torch.ops.fusion_moe.grouped_mm(x, [weight], ends, weight_format="f32")
            if ours
            else x @ weight.mT
        )

    assert bool(fusion_moe.explain(step, torch.randn(5, 32)).float_experts) != ours


def test_weights_of_convolutions_are_no_experts():
    report = fusion_moe.explain(torch.nn.Conv1d(32, 64, 4), torch.randn(1, 32, 20))
    assert report.float_experts == ()
