"""Weights requantized to FP8 on a GPU: what lies where, and that kernels multiply what the
reference does.
"""

from __future__ import annotations

import pytest
import torch

from fusion_moe import options, prepare_
from fusion_moe.nn import NVFP4Experts

pytestmark = [pytest.mark.gpu, pytest.mark.needs("wgmma")]
E, H, I = 4, 256, 320


def experts() -> NVFP4Experts:
    g = torch.Generator().manual_seed(0)
    weights = (torch.randn(E, *s, generator=g) * 0.1 for s in ((2 * I, H), (H, I)))
    return NVFP4Experts.from_float(*weights, "fp8")


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(tokens, H, generator=g).bfloat16(), torch.rand(tokens, 2, generator=g)
    return x.cuda(), torch.randint(0, E, (tokens, 2), generator=g).cuda(), w.cuda()


@pytest.mark.parametrize("tokens", [1, 24, 700])
@pytest.mark.parametrize("weights", ["packed", "fp8", "both"])
def test_kernels_multiply_what_the_reference_does(weights, tokens):
    module = experts().cuda()
    prepare_(module, weights=weights)
    found = module(*inputs(tokens))
    with options.override(target="reference"):
        wanted = module(*inputs(tokens))
    error = (found - wanted).float().norm() / wanted.float().norm()
    assert error < 2e-2  # a sum in another order may round a row to the next e4m3


def test_what_lies_where():
    module = experts()
    prepare_(module, weights="fp8")  # before it moves
    module.cuda()
    assert module.down_proj.device.type == "cpu"
    assert module.down_requantized.is_cuda
    moved = module(*inputs(700))
    there = experts().cuda()
    prepare_(there, weights="fp8")
    assert torch.equal(there(*inputs(700)), moved)
    wanted = experts().state_dict()
    for name, t in there.state_dict().items():
        assert torch.equal(t.cpu().view(torch.uint8), wanted[name].view(torch.uint8))
    prepare_(there, weights="packed")
    assert there.down_proj.is_cuda
