"""An operation of a user's between two products of a layer that trains: with a translator it is in
the epilogue of the first, its derivative and the sum for the scale in that of a backward's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusion_moe
from fusion_moe.nn import GroupedLinear
from fusion_moe.testing import check_translator


@torch.library.custom_op("tests::scaled_srelu", mutates_args=())
def scaled_srelu(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., H], scale [...] -> relu(x)^2 * scale [..., H]. In float32, rounded once."""
    return (x.float().relu().square() * scale.float().unsqueeze(-1)).to(x.dtype)


@scaled_srelu.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    torch._check(x.shape[:-1] == scale.shape)
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, dy):
    x, scale = ctx.saved_tensors
    dy, relu = dy.float(), x.float().relu()
    dx = 2 * dy * relu * scale.float().unsqueeze(-1)
    return dx.to(x.dtype), (dy * relu.square()).sum(-1).to(scale.dtype)


scaled_srelu.register_autograd(backward, setup_context=keep)


@fusion_moe.translator("tests::scaled_srelu", version="1")
def translate_scaled_srelu(fd, x, scale):
    relu = fd.ops.relu(fd.ops.cast(x, dtype="f32"))
    column = fd.ops.cast(fd.ops.reshape(scale, new_shape=(*x.type.shape[:-1], 1)), dtype="f32")
    return fd.ops.cast(relu * relu * column, dtype=x.type.dtype)


class MLP(nn.Module):
    """Squared-ReLU experts, whose rows are sorted by expert."""

    def __init__(self, experts=4, hidden=64, intermediate=96):
        super().__init__()
        how = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
        self.up = GroupedLinear(experts, hidden, intermediate, **how)
        self.down = GroupedLinear(experts, intermediate, hidden, **how)

    def forward(self, x, splits, scale):
        return self.down(scaled_srelu(self.up(x, splits), scale), splits)


def test_operation_and_translator():
    torch.library.opcheck(scaled_srelu, (torch.randn(6, 8), torch.rand(6)))
    check_translator(scaled_srelu, torch.randn(6, 8), torch.rand(6))


@pytest.mark.usefixtures("call_by_call")
def test_both_passes_are_fused():
    torch.manual_seed(0)
    mlp, rows = MLP(), torch.randn(12, 64).bfloat16()
    splits, scales = torch.tensor([3, 0, 5, 4]), torch.rand(12, requires_grad=True)

    def gradients(f):
        y = f(rows, splits, scales)
        return [y, *torch.autograd.grad(y.float().square().sum(), [scales, *mlp.parameters()])]

    compiled = torch.compile(mlp, backend="fusion_moe", fullgraph=True)
    for got, want in zip(gradients(compiled), gradients(mlp), strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()  # a fused kernel does not round between
    report = fusion_moe.explain(mlp, rows, splits, scales, backward=True)
    first, _, _, into_rows, _ = (s for fusion in report.fusions for s in fusion.segments)
    assert "relu" in first.ops
    assert {"grouped_mm_t", "sum"} <= set(into_rows.ops)
