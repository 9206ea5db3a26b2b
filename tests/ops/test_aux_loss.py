"""The router's losses against formulas in float64, and transformers' own; kernels, and the
reference on a grid.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from ways import compiled

from fusion_moe import options
from fusion_moe.ops import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    moe_z_loss,
    topk_router,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAN, INF = float("nan"), float("inf")
SIZES = [(0, 8, 2), (1, 1, 1), (5, 9, 9), (33, 64, 8), (300, 130, 4)]  # tokens, experts, topk
SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": lambda x: x.sigmoid() / (x.sigmoid().sum(-1, keepdim=True) + 1e-20),
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt() / (F.softplus(x).sqrt().sum(-1, True) + 1e-20),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(t: Tensor) -> Tensor:
    return t.detach().double().requires_grad_()


def near(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want.to(found.dtype))


def balance(probs, counts, tokens, experts, topk, coeff) -> Tensor:
    """In float64, as it is published."""
    return (probs.sum(0) * counts).sum() * experts * coeff / (topk * tokens**2)


def compare_scores(function: str, tokens: int, experts: int, topk: int, dtype: torch.dtype):
    logits = random(tokens, experts, dtype=dtype, seed=tokens).mul(3)
    logits[:1], logits[1:2] = 0, 2 * logits[1:2] + 20  # where functions are pieced together
    logits.requires_grad_()
    dy, other = random(tokens, experts, seed=1), wide(logits)
    chosen, found = fused_compute_score_for_moe_aux_loss(logits, topk, function)
    want = SCORES[function](other)
    found.backward(dy)
    want.backward(dy.double())
    ids = topk_router(logits.detach(), topk)[1]
    assert chosen.equal(torch.zeros(tokens, experts).scatter(1, ids, 1).bool())
    near(found, want)
    near(logits.grad, other.grad)


@pytest.mark.parametrize(
    ("function", "sizes", "dtype"), list(product(SCORES, SIZES, DTYPES)), ids=str
)
def test_scores_against_float64(function, sizes, dtype):
    with options.override(target="reference"):
        compare_scores(function, *sizes, dtype)


@pytest.mark.compiler
@pytest.mark.parametrize("function", SCORES)
def test_kernels_of_scores_against_float64(function):
    compare_scores(function, 33, 12, 3, torch.float32)


def compare_losses(tokens: int, experts: int, topk: int, dtype: torch.dtype, sequences: int = 1):
    logits = random(tokens, sequences * experts, dtype=dtype).mul(3).requires_grad_()
    probs = logits.detach().sigmoid().requires_grad_()
    counts = torch.arange(sequences * experts)
    for counts_dtype, n in product((torch.int64, torch.int32, torch.bfloat16), (None, 7)):
        probs.grad, other = None, wide(probs)
        total = n if n is None else torch.tensor(n)
        loss = fused_moe_aux_loss(probs, counts.to(counts_dtype), total, experts, topk, 0.01)
        want = balance(other, counts.to(counts_dtype), n or max(tokens, 1), experts, topk, 0.01)
        near(loss, want)
        loss.backward()
        want.backward()
        near(probs.grad, other.grad)
    other = wide(logits)
    loss, want = moe_z_loss(logits, 0.1), 0.1 * other.logsumexp(-1).square().sum() / max(tokens, 1)
    near(loss, want)
    loss.backward()
    want.backward()
    near(logits.grad, other.grad)


@pytest.mark.parametrize(("sizes", "dtype"), list(product(SIZES, DTYPES)), ids=str)
def test_losses_against_float64(sizes, dtype):
    """Of no tokens they are 0."""
    with options.override(target="reference"):
        compare_losses(*sizes, dtype)
        compare_losses(*sizes, dtype, sequences=2)


@pytest.mark.compiler
def test_kernels_of_losses_against_float64():
    for tokens in 33, 0, 1:
        compare_losses(tokens, 12, 3, torch.float32)


@pytest.mark.compiler
@pytest.mark.parametrize("function", SCORES)
def test_ties_and_numbers_that_are_none(function):
    """Of equal logits the first experts, NaN before all; NaN stays in its token, unless the loss is
    of all of them.
    """
    logits = torch.zeros(4, 12)
    logits[1, 5], logits[2, 3], logits[3, ::2] = NAN, -INF, 1.0
    chosen, scores = fused_compute_score_for_moe_aux_loss(logits, 3, function)
    assert [row.nonzero()[:, 0].tolist() for row in chosen] == [
        [0, 1, 2],
        [0, 1, 5],
        [0, 1, 2],
        [0, 2, 4],
    ]
    other = logits.double()
    want = SCORES[function](other)
    assert scores[1, 5].isnan()
    assert scores[2, 3] < 1e-9
    for row in 0, 2, 3:
        near(scores[row], want[row])
    assert moe_z_loss(logits, 1.0).isnan()
    assert fused_moe_aux_loss(scores, chosen.sum(0), None, 12, 3, 1.0).isnan()


def test_derivative_where_nothing_is_left_of_a_score():
    """Logits whose softplus is 0 in float32."""
    logits = torch.tensor([[-300.0, 0.0, 3.0]]).requires_grad_()
    with options.override(target="reference"):
        _, scores = fused_compute_score_for_moe_aux_loss(logits, 1, "sqrtsoftplus")
        scores[0, 0].backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("function", SCORES)
def test_gradcheck(function):
    def losses(logits: Tensor) -> Tensor:
        chosen, scores = fused_compute_score_for_moe_aux_loss(logits, 2, function)
        balanced = fused_moe_aux_loss(scores, chosen.sum(0), None, 7, 2, 0.5)
        return balanced + moe_z_loss(logits, 0.1)

    with options.override(target="reference"):
        assert torch.autograd.gradcheck(losses, random(6, 7).double().requires_grad_())


@pytest.mark.judges("transformers")
def test_as_transformers():
    """Its loss of all layers is that of their tokens one after another, with topk = 1."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = [random(11, 8, seed=s).requires_grad_() for s in range(3)]
    want = load_balancing_loss_func(tuple(layers), num_experts=8, top_k=2)
    wanted = torch.autograd.grad(want, layers)
    with options.override(target="reference"):
        chosen, scores = fused_compute_score_for_moe_aux_loss(torch.cat(layers), 2, "softmax")
        found = fused_moe_aux_loss(scores, chosen.sum(0), None, 8, 1, 1.0)
        got = torch.autograd.grad(found, layers)
    near(found, want)
    for a, b in zip(got, wanted, strict=True):
        near(a, b)


@pytest.mark.compiler
@pytest.mark.usefixtures("call_by_call")
def test_compiled():
    """One graph for any number of tokens, with a gradient."""

    def losses(logits: Tensor) -> Tensor:
        chosen, scores = fused_compute_score_for_moe_aux_loss(logits, 3, "softmax")
        return fused_moe_aux_loss(scores, chosen.sum(0), None, 12, 3, 0.5) + moe_z_loss(logits, 0.1)

    f = compiled(losses)
    for tokens in 4, 9, 30:
        logits = random(tokens, 12).requires_grad_()
        (found,) = torch.autograd.grad(f(logits), logits)
        (want,) = torch.autograd.grad(losses(logits), logits)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)
