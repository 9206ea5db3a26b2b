"""Gradients where the program writes into a tensor that the backward reads: those of the same
program without writes.
"""

from __future__ import annotations

import pytest
import torch
from moe_models import Experts, G, H, O, tokens

from fusion_moe.thunder import thunder_executors

pytestmark = pytest.mark.thunder


def jitted(f, **how):
    import thunder

    return thunder.jit(f, executors=thunder_executors(**how))


def kept(run) -> int:
    """How many writes of the last call waited for copies."""
    import thunder

    return [b.sym.name for b in thunder.last_traces(run)[-1].bound_symbols].count("fusion_moe_save")


def top(s):
    return s.softmax(-1).topk(2)[0]


def normalized_in_place(v):
    v /= v.sum(-1, keepdim=True)
    return v


def squared_before(v):
    square = (v * v).sum()
    v *= 2
    return square + v.sum()


ROUTERS = {  # what writes, what does not, how many of its writes are in the way
    "as Qwen3-MoE": (
        lambda s: normalized_in_place(top(s)),
        lambda s: top(s) / top(s).sum(-1, keepdim=True),
        1,
    ),
    "a result that its maker saved": (
        lambda s: s.softmax(-1).mul_(3),
        lambda s: s.softmax(-1) * 3,
        1,
    ),
    "a view of it": (
        lambda s: s.softmax(-1).view(-1).mul_(3),
        lambda s: s.softmax(-1).view(-1) * 3,
        1,
    ),
    "an operand of before": (squared_before, lambda s: (s * s).sum() + (s * 2).sum(), 1),
    "several times": (
        lambda s: s.exp().mul_(3).sigmoid().mul_(2).exp_(),
        lambda s: ((s.exp() * 3).sigmoid() * 2).exp(),
        2,
    ),
    "nothing that is read": (lambda s: (s + 1).mul_(3), lambda s: (s + 1) * 3, 0),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_what_the_backward_reads_is_what_was_there(name):
    writes, plain, copies = ROUTERS[name]
    x, weight = tokens(5), torch.randn(G, H, generator=torch.Generator().manual_seed(0))
    ours, theirs = (weight.clone().requires_grad_() for _ in range(2))
    run = jitted(lambda w: writes(x @ w.t()))
    got, want = run(ours), plain(x @ theirs.t())
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    got.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert kept(run) == copies


def test_an_input_that_is_written():
    def f(x, w):
        y = x @ w.t()
        x.mul_(2)
        return y

    x, weight = tokens(5), torch.ones(G, H, requires_grad=True)
    jitted(f)(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, tokens(5).sum(0).expand(G, H))
    assert x.equal(tokens(5) * 2)


class Normalized(Experts):
    """The router normalizes in place, as transformers' Qwen3-MoE does."""

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(2)
        w /= w.sum(-1, keepdim=True)
        return O.expert_mlp(x, ids, w, *self.parts("up"), *self.parts("down"))


def gradients(f, model):
    model.zero_grad()
    x = tokens(5).requires_grad_()
    f(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("how", ["jit", pytest.param("thunderfx", marks=pytest.mark.slow)])
def test_the_router_of_experts(how):
    import thunder
    from thunder.dynamo import thunderfx

    torch._dynamo.reset()
    model = Normalized()
    run = jitted(model) if how == "jit" else thunderfx(model, executors=thunder_executors())
    torch.testing.assert_close(gradients(run, model), gradients(model, model), rtol=1e-5, atol=1e-5)
    if how == "thunderfx":
        (graph,) = run._backend.subgraph_infos
        (run,) = graph.thunder_compiled_fns
    assert any(b.sym.name == "fusion_moe0" for b in thunder.last_traces(run)[-1].bound_symbols)


def test_without_a_backward_nothing_is_copied():
    run = jitted(Normalized())
    with torch.no_grad():
        run(tokens(5))
    assert kept(run) == 0
