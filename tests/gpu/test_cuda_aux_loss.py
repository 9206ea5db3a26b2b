"""The router's losses on a GPU against float64: sizes that Transformer Engine tests, one CUDA graph
of forward and backward, and no wait for the device.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusion_moe.ops import fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, moe_z_loss

pytestmark = pytest.mark.gpu
CASES = [
    ("softmax", 128, 8, torch.float32),
    ("softmax", 1024, 4, torch.float32),
    ("softmax", 256, 32, torch.bfloat16),
    ("sigmoid", 256, 8, torch.float32),
    ("sigmoid", 33, 4, torch.float16),
    ("sqrtsoftplus", 32, 4, torch.float32),
]
TOKENS = (0, 1, 2048, 7168, 14234)


def scores_of(x: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return x.softmax(-1)
    s = x.sigmoid() if function == "sigmoid" else F.softplus(x).sqrt()
    return s / (s.sum(-1, keepdim=True) + 1e-20)


def losses(logits: Tensor, topk: int, function: str, total: Tensor | None) -> Tensor:
    experts = logits.shape[1]
    chosen, scores = fused_compute_score_for_moe_aux_loss(logits, topk, function)
    balanced = fused_moe_aux_loss(scores, chosen.sum(0), total, experts, topk, 0.01)
    return balanced.float() + moe_z_loss(logits, 0.001)


def wanted(x: Tensor, topk: int, function: str, total: int) -> Tensor:
    scores, experts = scores_of(x, function), x.shape[1]
    chosen = torch.zeros_like(x).scatter(1, x.topk(topk).indices, 1)
    balanced = (scores.sum(0) * chosen.sum(0)).sum() * experts * 0.01 / (topk * total**2)
    return balanced + 0.001 * x.logsumexp(-1).square().sum() / max(len(x), 1)


@pytest.mark.parametrize(("function", "experts", "topk", "dtype"), CASES)
def test_losses_against_float64(function, experts, topk, dtype):
    for tokens in TOKENS:
        g = torch.Generator("cuda").manual_seed(tokens)
        order = torch.rand(tokens, experts, device="cuda", generator=g).argsort(1)
        logits = (order / experts * 6 - 3).to(dtype).requires_grad_()  # few are equal
        other, total = logits.detach().double().requires_grad_(), tokens + 5
        loss = losses(logits, topk, function, torch.full((), total, device="cuda"))
        want = wanted(other, topk, function, total)
        tied = dtype != torch.float32 and len(logits.detach().unique()) < experts
        torch.testing.assert_close(
            loss.double(), want, rtol=2e-3 if tied else 5e-6, atol=1e-9, check_dtype=False
        )
        if not tied and tokens:
            for made in loss, want:  # times a number, lest gradients be too small for float16
                (made * tokens * 1000).backward()
            near, most = 1e-5 if dtype == torch.float32 else 2.0**-8, other.grad.abs().max()
            torch.testing.assert_close(
                logits.grad.double(), other.grad, rtol=near, atol=float(near * most)
            )


def test_a_graph_and_no_wait():
    """Captured once, replayed with other logits and another number of tokens."""
    logits = torch.randn(512, 64, device="cuda", requires_grad=True)
    total = torch.full((), 512, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        loss = losses(logits, 6, "softmax", total)
        return loss, torch.autograd.grad(loss, logits)[0]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for n in 512, 700:
        with torch.no_grad():
            logits.copy_(torch.randn_like(logits))
            total.fill_(n)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert a.equal(b)
