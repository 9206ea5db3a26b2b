"""Functions at the edges of what fusions hold are compiled to what eager computes, or raises."""

from __future__ import annotations

import pytest
import torch
from edges import EDGES

import fusion_moe
from fusion_moe.errors import GroupsError
from fusion_moe.frontends.inductor import backend, compile_graph


@pytest.fixture(autouse=True)
def call_by_call(monkeypatch):
    """What is around the fusions: Inductor's code for it has no part in this."""
    monkeypatch.setattr(compile_graph, "has_compiler", lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", EDGES)
def test_compiled_as_eager(name, dynamic):
    edge = EDGES[name]
    inputs = edge.inputs()
    torch._dynamo.reset()
    run = torch.compile(edge.f, backend=backend, fullgraph=True, dynamic=dynamic)
    if edge.wrong:
        for f in edge.f, run:
            with pytest.raises(GroupsError, match=r"8 .*5 rows"):
                f(*inputs)
        return
    assert fusion_moe.explain(edge.f, *inputs).fusions
    torch.testing.assert_close(run(*inputs), edge.f(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["one row", "one row, expanded", "a bias by other ends", "a bias made on the way"]
)
def test_gradients(name):
    edge, grads = EDGES[name], []
    torch._dynamo.reset()
    for f in edge.f, torch.compile(edge.f, backend=backend, fullgraph=True):
        x, *rest = edge.inputs()
        grads += torch.autograd.grad(f(x.requires_grad_(), *rest).square().sum(), x)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
