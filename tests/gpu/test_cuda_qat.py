"""qat_ on a GPU: the forward has the bits of the frozen experts' kernels, and everything has a
kernel.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

import fusion_moe
from fusion_moe.encodings import Quantized, dequantize
from fusion_moe.nn import qat_

pytestmark = pytest.mark.gpu

# experts, hidden and intermediate features: whole tiles, and not
SIZES = [(16, 256, 128), (8, 192, 736)]


@pytest.mark.parametrize(
    ("encoding", "scales"), [("nvfp4", "max"), ("mxfp4", "max"), ("nvfp4", "mse"), ("mxfp4", "mse")]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 700])
def test_bits_and_gradients(encoding, scales, size, dtype, tokens):
    count, hidden, inner = size
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": count}
    model = nn.Sequential(Qwen3MoeExperts(Qwen3MoeConfig(**sizes, num_experts_per_tok=2)))
    model = model.to("cuda", dtype)
    g = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1, generator=g)
    qat_(model, encoding, scales=scales)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, generator=g)
    ids = torch.randint(count, (tokens, 2), device="cuda", generator=g)
    w = torch.rand(tokens, 2, device="cuda", generator=g)
    for _ in range(2):  # and after a step
        y = model[0](x.requires_grad_(), ids, w.requires_grad_())
        seed = torch.randn(y.shape, device="cuda", generator=g).bfloat16()
        masters = [model[0].gate_up_proj, model[0].down_proj]
        found = torch.autograd.grad(y, [x, w, *masters], seed)
        quantized = copy.deepcopy(model)
        fusion_moe.quantize_(quantized)
        assert quantized[0].weight_layout == "w16x64"
        with torch.no_grad():
            assert torch.equal(quantized[0](x, ids, w), y)
            assert torch.equal(model[0](x, ids, w), y)
        up, down = (
            dequantize(weight).requires_grad_()
            for weight in (linear(quantized[0], name) for name in ("gate_up", "down"))
        )
        wide = [t.detach().float().requires_grad_() for t in (x, w)]
        want_y = torch.ops.fusion_moe.fused_experts(
            wide[0], ids, wide[1], [up], [down], weight_format="f32"
        )
        want = torch.autograd.grad(want_y, [*wide, up, down], seed.float())
        for a, b in zip(found, want, strict=True):
            assert (a.float() - b).norm() <= 2e-2 * b.norm()
        with torch.no_grad():
            for p, grad in zip(masters, found[2:], strict=True):
                p -= 0.05 * p.norm() / grad.norm() * grad


def linear(module: fusion_moe.nn.Experts, name: str) -> Quantized:
    """The weight of a projection, in linear order."""
    state = module.state_dict()
    return Quantized(*(state[key] for key in module.part_names[name]), encoding=module.encoding)
