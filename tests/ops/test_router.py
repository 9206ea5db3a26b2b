"""`topk_router`: what kernels choose against the reference, gradients, and one program with the
experts that it chooses.
"""

from __future__ import annotations

import pytest
import torch

import fusion_moe
from fusion_moe import options
from fusion_moe.ops import fused_experts, topk_router

NAN, INF = float("nan"), float("inf")
WAYS = {
    "softmax": {},
    "renormalized": {"renormalize": True, "routed_scaling_factor": 2.5},
    "sigmoid": {"scoring": "sigmoid", "renormalize": True},
    "groups": {"n_group": 4, "topk_group": 2},
    "groups by two": {"scoring": "sigmoid", "n_group": 4, "topk_group": 3, "best_of_group": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [3, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_choose_as_the_reference(way, most, dtype):
    """Among few different numbers, both zeros, infinities, NaN: of equal ones the first."""
    values = torch.tensor([0.0, -0.0, 1.0, -INF, INF, NAN], dtype=dtype)
    logits = values[torch.randint(0, most, (40, 20), generator=torch.Generator().manual_seed(most))]
    logits[0], logits[1] = 0.0, -INF
    weights, ids = topk_router(logits, 6, **WAYS[way])
    with options.override(target="reference"):
        want_weights, want_ids = topk_router(logits, 6, **WAYS[way])
    assert ids.equal(want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=0, equal_nan=True)
    assert all(len(set(row)) == 6 for row in ids.tolist())


def plain(logits, k):
    weights, ids = logits.float().softmax(-1).topk(k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_layer(compiled):
    """Through the weights of experts to the router, as with torch's operations; ids and the bias
    have none.
    """
    g = torch.Generator().manual_seed(0)
    x, gate = (
        torch.randn(7, 32, generator=g),
        (torch.randn(8, 32, generator=g) / 4).requires_grad_(),
    )
    up, down = torch.randn(8, 32, 32, generator=g) / 4, torch.randn(8, 32, 16, generator=g) / 4

    def layer(router):
        weights, ids = router(x @ gate.T, 2)
        return fused_experts(x, ids, weights, [up], [down], weight_format="f32")

    def ours():
        return layer(lambda logits, k: topk_router(logits, k, renormalize=True))

    torch._dynamo.reset()
    found, want = (torch.compile(ours, backend="fusion_moe") if compiled else ours)(), layer(plain)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), gate)[0] for y in (found, want)),
        rtol=1e-3,
        atol=1e-4,
    )
    assert not topk_router(x @ gate.T, 2)[1].requires_grad


def test_weights_are_rounded_once():
    logits = torch.randn(5, 8).bfloat16()
    wide, narrow = (topk_router(logits, 2, out_dtype=dtype)[0] for dtype in (None, torch.bfloat16))
    assert wide.dtype == torch.float32
    assert narrow.equal(wide.bfloat16())


def test_a_choice_is_in_the_program_of_its_experts():
    g = torch.Generator().manual_seed(0)
    up, down = (
        torch.randn(8, 32, 32, generator=g).bfloat16(),
        torch.randn(8, 32, 16, generator=g).bfloat16(),
    )

    def layer(x, logits):
        weights, ids = topk_router(logits, 2, out_dtype=logits.dtype)
        return fused_experts(x, ids, weights, [up], [down], weight_format="bf16")

    with torch.no_grad():
        report = fusion_moe.explain(
            layer,
            torch.randn(5, 32, generator=g).bfloat16(),
            torch.randn(5, 8, generator=g).bfloat16(),
        )
    (fusion,) = report.fusions
    first, second = fusion.segments
    assert {"topk_ids", "topk_weights", "route", "grouped_mm"} <= set(first.ops)
    assert "combine" in second.ops


def test_a_bias_is_no_parameter_of_a_loss():
    bias = torch.zeros(8, requires_grad=True)
    weights, _ = topk_router(torch.randn(3, 8), 2, bias)
    with pytest.raises(fusion_moe.errors.UnsupportedError, match="bias has no derivative"):
        weights.sum().backward()
