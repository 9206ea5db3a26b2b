"""The operations on a CUDA device against the same on the CPU, in eager and under torch.compile."""

import pytest
import torch
from experts import experts

import fusion_moe
from fusion_moe.errors import GroupsError
from fusion_moe.frontends.inductor import backend

pytestmark = pytest.mark.gpu
ops = torch.ops.fusion_moe
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 8, 128, 64, 37, 2


@pytest.fixture(scope="module")
def layer():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K)
    return experts(EXPERTS, HIDDEN, INTERMEDIATE), x, ids, weights


def on_cuda(*tensors):
    return [t.cuda() for t in tensors]


def test_quantize_gives_the_same_bytes():
    x = torch.randn(3, 64, 128)
    for cpu, cuda in zip(ops.nvfp4_quantize(x), ops.nvfp4_quantize(x.cuda()), strict=True):
        assert torch.equal(cpu.view(torch.uint8), cuda.cpu().view(torch.uint8))


def test_route_and_swizzle_give_the_same_bits(layer):
    _, _, ids, _ = layer
    cpu, cuda = ops.route(ids, EXPERTS), ops.route(ids.cuda(), EXPERTS)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(cpu, cuda, strict=True))
    scales = torch.randint(1, 120, (len(cpu[1]), 12), dtype=torch.uint8).view(torch.float8_e4m3fn)
    a, b = ops.grouped_swizzle_block_scale(scales, cpu[0]), ops.grouped_swizzle_block_scale(scales.cuda(), cuda[0])
    assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


def test_experts_and_their_gradients(layer):
    experts, x, ids, weights = layer
    results = []
    for device in ("cpu", "cuda"):
        module, tokens, w = experts.to(device), x.to(device).requires_grad_(), weights.to(device).requires_grad_()
        y = module(tokens, ids.to(device), w)
        results.append([y.cpu(), *(g.cpu() for g in torch.autograd.grad(y.float().square().sum(), (tokens, w)))])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(layer, mode):
    experts, x, ids, weights = layer
    experts, x, ids, weights = experts.cuda(), *on_cuda(x, ids, weights)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: torch.nn.functional.gelu(experts(*a)), backend=backend, mode=mode, fullgraph=True)
    with torch.inference_mode():
        for _ in range(3):  # the third replays, where CUDA graphs are used
            torch.testing.assert_close(compiled(x, ids, weights), torch.nn.functional.gelu(experts(x, ids, weights)), rtol=2e-2, atol=2e-2)


def test_ends_past_the_rows_raise(layer):
    experts, x, _, _ = layer
    weight = (experts.down_proj.cuda(), experts.down_proj_scale.cuda(), experts.down_decode_scale.cuda())
    ends = torch.full((EXPERTS,), TOKENS + 1, dtype=torch.int32, device="cuda")
    ops.nvfp4_grouped_mm(x[:, :INTERMEDIATE].contiguous().cuda(), *weight, ends)
    with pytest.raises(GroupsError, match=rf"offs\[0\] = {TOKENS + 1}, in an earlier call"):
        fusion_moe.synchronize()
