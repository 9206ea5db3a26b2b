"""The operations on a CUDA device against the same on the CPU, in eager."""

import pytest
import torch
from experts import experts

import fusion_moe
from fusion_moe.encodings import find, quantize
from fusion_moe.errors import UnsupportedError

pytestmark = pytest.mark.gpu
ops = torch.ops.fusion_moe
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 8, 128, 64, 37, 2


@pytest.fixture(scope="module")
def layer():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K)
    return experts(EXPERTS, HIDDEN, INTERMEDIATE), x, ids, weights


def test_quantize_gives_the_same_bytes():
    x = torch.randn(3, 64, 128)
    for cpu, cuda in zip(ops.nvfp4_quantize(x), ops.nvfp4_quantize(x.cuda()), strict=True):
        assert torch.equal(cpu.view(torch.uint8), cuda.cpu().view(torch.uint8))


def test_route_and_swizzle_give_the_same_bits(layer):
    _, _, ids, _ = layer
    cpu, cuda = ops.route(ids, EXPERTS), ops.route(ids.cuda(), EXPERTS)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(cpu, cuda, strict=True))
    scales = torch.randint(1, 120, (len(cpu[1]), 12), dtype=torch.uint8).view(torch.float8_e4m3fn)
    a, b = (
        ops.grouped_swizzle_block_scale(scales, cpu[0]),
        ops.grouped_swizzle_block_scale(scales.cuda(), cuda[0]),
    )
    assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


def test_experts_and_their_gradients(layer):
    experts, x, ids, weights = layer
    results = []
    for device in ("cpu", "cuda"):
        module, tokens, w = (
            experts.to(device),
            x.to(device).requires_grad_(),
            weights.to(device).requires_grad_(),
        )
        y = module(tokens, ids.to(device), w)
        results.append(
            [
                y.cpu(),
                *(g.cpu() for g in torch.autograd.grad(y.float().square().sum(), (tokens, w))),
            ]
        )
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4", "int4", "bf16"])
def test_kernels_are_what_the_option_check_expects(encoding):
    """No false alarm, by small-M and large-M kernels, one by one and chained; in a graph it is
    refused.
    """
    g = torch.Generator().manual_seed(0)
    gate_up, down = (
        torch.randn(EXPERTS, *shape, generator=g).bfloat16() / 16
        for shape in ((2 * 512, 1024), (1024, 512))
    )
    parts = [
        [w.cuda()]
        if encoding == "bf16"
        else [t.cuda() for t in quantize(w, encoding=find(encoding))]
        for w in (gate_up, down)
    ]
    for tokens in (1, 9, 40, 1500):
        x = torch.randn(tokens, 1024, generator=g).bfloat16().cuda()
        w, ids = torch.rand(tokens, EXPERTS, generator=g).cuda().topk(TOP_K)
        want = ops.fused_experts(x, ids, w, *parts, weight_format=encoding)
        with fusion_moe.options.override(check=True):
            torch.testing.assert_close(
                ops.fused_experts(x, ids, w, *parts, weight_format=encoding),
                want,
                rtol=2**-6,
                atol=1e-2,
            )
    with fusion_moe.options.override(check=True), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        with pytest.raises(
            UnsupportedError, match="the option check while a CUDA graph is captured"
        ):
            ops.fused_experts(x, ids, w, *parts, weight_format=encoding)
