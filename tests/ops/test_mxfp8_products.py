"""Operations with activation_format="mxfp8": both operands rounded, forward and backward."""

from __future__ import annotations

import mxfp8
import pytest
import torch
from torch import Tensor

ops = torch.ops.fusion_moe
G, K, N, T = 4, 64, 32, 20
SIZES = (7, 0, 9, 24)
WGRADS = {"mxfp8": "mxfp8", "mxfp8_wgrad_bf16": "bf16"}


def drawn(*shape: int, seed: int = 0, by: float = 1.0) -> Tensor:
    return (
        (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * by)
        .bfloat16()
        .requires_grad_()
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("how", WGRADS)
def test_grouped_mm(how, transposed):
    a, weight, dy = (
        drawn(sum(SIZES), K),
        drawn(G, N, K, seed=1, by=0.1),
        drawn(sum(SIZES), N, seed=2).detach(),
    )
    stored = weight.detach().mT.contiguous().requires_grad_() if transposed else weight
    offs = torch.tensor(SIZES).cumsum(0).int()
    y = ops.grouped_mm(
        a, [stored], offs, weight_format="bf16", activation_format=how, transposed=transposed
    )
    y.backward(dy)
    dw = stored.grad.mT if transposed else stored.grad
    for found, want in zip(
        (y, a.grad, dw),
        mxfp8.products(a.detach(), weight.detach(), dy, SIZES, WGRADS[how]),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts(transposed):
    """Near those of bf16, and the same for weights stored either way."""
    w, ids = torch.randn(T, G, generator=torch.Generator().manual_seed(3)).softmax(-1).topk(2)
    given = [
        drawn(T, K),
        w.detach().requires_grad_(),
        drawn(G, 2 * N, K, seed=4, by=0.1),
        drawn(G, K, N, seed=5, by=0.1),
    ]

    def step(how: str, transposed: bool) -> list[Tensor]:
        x, w, gate_up, down = (t.detach().clone().requires_grad_() for t in given)
        weights = [gate_up.mT], [down.mT]
        y = ops.fused_experts(
            x,
            ids,
            w,
            *(weights if transposed else ([gate_up], [down])),
            weight_format="bf16",
            activation_format=how,
            transposed=transposed,
        )
        y.float().square().sum().backward()
        return [y, *(t.grad for t in (x, w, gate_up, down))]

    rounded, exact = step("mxfp8", transposed), step("bf16", False)
    for a, b, same in zip(rounded, exact, step("mxfp8", False), strict=True):
        assert 0.01 < (a - b).norm() / b.norm() < 0.2
        assert (a - same).norm() <= 0.02 * same.norm()
