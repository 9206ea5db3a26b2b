"""Routing under captured CUDA graphs: recorded in the graph's own tensors, replayed from tensors
that keep their addresses, forward and backward; what it costs.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from tiny_qwen3 import qwen3_moe

from fusion_moe.routing import Routing, record_routing, replay_routing
from fusion_moe.transformers import experts_forward

pytestmark = pytest.mark.gpu


def model_on_gpu():
    model = qwen3_moe(num_experts=8, num_hidden_layers=2, hidden_size=64, moe_intermediate_size=32)
    assert experts_forward  # the import registers it
    model.set_experts_implementation("fusion_moe")
    return model.to("cuda", torch.bfloat16)


def captured(run):
    """A graph of `run`, after two calls that warm up, and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@torch.no_grad()
def test_recorded_in_a_graph():
    model, x = model_on_gpu(), torch.randint(30, (2, 6), device="cuda")

    def run():
        return model(input_ids=x, use_cache=False).logits

    captured(run)
    graph = torch.cuda.CUDAGraph()
    with record_routing(model) as routing, torch.cuda.graph(graph):
        logits = run()
    for seed in range(3):
        x.copy_(torch.randint(30, x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        kept = routing[:].to("cpu", torch.int8)
        with record_routing(model) as want:
            torch.testing.assert_close(run(), logits)
        for name in want.called:
            assert torch.equal(kept.rows(name)[0], want.rows(name)[0].cpu().to(torch.int8))


@pytest.mark.parametrize("weights", ["own", "recorded"])
@pytest.mark.parametrize("partial", [False, True])
def test_replayed_in_a_graph(weights, partial):
    """Other rows in the graph of a forward and its backward."""
    model, x = model_on_gpu(), torch.randint(30, (2, 6), device="cuda")
    with record_routing(model) as routing:
        model(input_ids=x)

    def other(by):
        calls = {}
        for name, [(ids, w)] in routing.calls.items():
            moved = (ids + by) % 8
            if partial:
                moved[by] = -1
            calls[name] = [(moved, w)]
        return Routing(routing.experts, calls, partial).to("cpu")

    def run():
        loss = model(input_ids=x, use_cache=False).logits.float().square().mean()
        return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])

    for p in model.model.embed_tokens.parameters():
        p.requires_grad_(False)
    if weights == "recorded":
        for layer in model.model.layers:
            layer.mlp.gate.requires_grad_(False)
    with replay_routing(model, other(1), weights) as replay:
        graph, gradients = captured(run)
    for by in 1, 2, 3:
        replay.copy_(other(by))
        graph.replay()
        with replay_routing(model, other(by), weights):
            want = run()
        for got, expected in zip(gradients, want, strict=True):
            torch.testing.assert_close(got, expected)
