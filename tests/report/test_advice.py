"""What a report says of a call before anything else: what it is of, and what to do next."""

from __future__ import annotations

import pages
import pytest
import torch

import fusion_moe
from fusion_moe.report.html import page


class Own(torch.nn.Module):
    """Experts that nothing here knows."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, x):
        return torch.einsum("mk,gnk->mn", x, self.weights)


class Broken(torch.nn.Module):
    """Two graphs."""

    def __init__(self):
        super().__init__()
        self.layer = pages.Layer()

    def forward(self, x):
        y = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(y)


X = torch.zeros(6, 64, dtype=torch.bfloat16)


def twice(x):
    return x + x


def test_what_it_is_of():
    report = pages.explained(target="cpu")
    assert report.of == "Layer(bf16[6, 64])"
    assert str(report).splitlines()[1] == "  Layer(bf16[6, 64])"
    assert fusion_moe.explain(torch.relu, X).of == "relu(bf16[6, 64])"
    assert fusion_moe.explain(twice, x=X).of == "twice(x=bf16[6, 64])"
    assert not report.advice
    shown = page(report)
    assert report.of in shown
    assert report.made in shown


def test_a_converter_to_write():
    report = fusion_moe.explain(torch.nn.Sequential(Own()), torch.zeros(3, 64))
    (step,) = report.advice
    assert step.startswith("write a converter of Own")
    assert "do next\n  write a converter of Own" in str(report)
    assert step in page(report)


def test_a_graph_break_to_mend():
    with torch.no_grad():
        report = fusion_moe.explain(Broken(), X)
    assert report.graphs == 2
    (step,) = report.advice
    assert step.startswith("mend the graph break at test_advice.py:")
    assert "in forward: torch._dynamo.graph_break()" in step


def test_routers_to_fuse():
    pytest.importorskip("transformers")
    from tiny_qwen3 import qwen3_moe

    from fusion_moe.transformers import fuse_routers_

    model = qwen3_moe(num_hidden_layers=2)
    fusion_moe.quantize_(model)
    ids = torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad():
        (step,) = fusion_moe.explain(model, ids, use_cache=False).advice
        assert "2 routers (model.layers.0.mlp.gate and 1 more)" in step
        fuse_routers_(model)
        assert not fusion_moe.explain(model, ids, use_cache=False).advice
