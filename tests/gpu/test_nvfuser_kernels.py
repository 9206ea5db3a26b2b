"""Real nvFuser on a CUDA device: what its kernels compute, against the meaning of the same
segments. Capability 9.0 was run.
"""

from __future__ import annotations

from contextlib import contextmanager

import mxfp8
import pytest
import torch
from experts import float_weights
from fusions import fusion_of_call, inputs_of, programs
from hypothesis import HealthCheck, given, settings, strategies as st

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import NVFP4, Quantized, dequantize, quantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.layouts import SF128X4
from fusion_moe.layouts.groups import ends_from_sizes, padded_starts, starts
from fusion_moe.nn import GroupedLinear, swiglu
from fusion_moe.recipe import MXFP8BlockScaling

pytestmark = [pytest.mark.gpu, pytest.mark.nvfuser]
ops = torch.ops.fusion_moe
E, H, I, K = 4, 128, 64, 2  # experts, hidden, intermediate, slots


@contextmanager
def nvfuser():
    with options.override(target="sm_90"):
        yield


def generator():
    return torch.Generator().manual_seed(0)


def on_cuda(*tensors):
    return [t.cuda() for t in tensors]


def close(found, want, parts=64):
    """Within parts/64 roundings to bf16 of the largest element."""
    bound = 2.0**-8 * want.double().abs().max().item() * parts / 64 if want.numel() else 0
    assert found.dtype == want.dtype
    torch.testing.assert_close(found.double(), want.double(), rtol=2.0**-7, atol=bound + 1e-30)


# Bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [None, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_is_exact(dtype, runs):
    """One-hot rows pick the columns of the weight: the product is the decoded weight, rounded
    once.
    """
    g, n, k = 3, 64, 96
    codes = torch.randint(0, 256, (g, n, k // 2), dtype=torch.uint8, generator=generator())
    scale = torch.randint(0, 0x7F, (g, n, k // 16), dtype=torch.uint8, generator=generator()).view(
        torch.float8_e4m3fn
    )
    decode = torch.rand((g,) if runs is None else (g, runs), generator=generator()) / 64
    weight = on_cuda(codes, scale, decode)
    rows = torch.eye(k, dtype=dtype).repeat(g, 1).cuda()
    ends = torch.tensor([k, 2 * k, 3 * k], dtype=torch.int32).cuda()
    with nvfuser():
        found = ops.nvfp4_grouped_mm(rows, *weight, ends)
    want = (
        dequantize(Quantized(*weight, encoding=NVFP4)).to(dtype).transpose(1, 2).reshape(g * k, n)
    )
    assert torch.equal(found + 0.0, want + 0.0)  # a sum with zeros has no -0.0


@pytest.mark.parametrize("columns", [1, 3, 4, 6, 8, 16])
@pytest.mark.parametrize(
    "sizes", [[115, 144, 8, 757], [0, 5, 0, 0, 130], [300], [1, 1, 1, 1], [128, 128], [0, 0, 7]]
)
def test_the_swizzle_is_nvfusers(sizes, columns):
    """Our grouped layout and nvFuser's preprocess_grouped_matmul_input_sf put every element in the
    same place.
    """
    from nvfuser_direct import DataType, FusionDefinition as NvFusionDefinition

    rows = sum(sizes)
    ends = ends_from_sizes(torch.tensor(sizes)).cuda()
    x = (
        (torch.arange(rows * columns) % 126 + 1)
        .to(torch.uint8)
        .reshape(rows, columns)
        .view(torch.float8_e4m3fn)
        .cuda()
    )
    with NvFusionDefinition() as fd:
        scale = fd.define_tensor(shape=[-1, columns], contiguity=True, dtype=DataType.Float8_e4m3fn)
        begin, padded = (
            fd.define_tensor(shape=[len(sizes)], contiguity=True, dtype=DataType.Int32)
            for _ in range(2)
        )
        fd.add_output(fd.ops.preprocess_grouped_matmul_input_sf(fd.ops.set(scale), begin, padded))
    (out,) = fd.execute([x, starts(ends), padded_starts(ends, 128)])
    ours = SF128X4.forward(x, ends).view(torch.uint8).flatten()
    theirs = torch.empty(0, dtype=torch.uint8, device="cuda").set_(out.untyped_storage())[
        : ours.numel()
    ]
    # every element of x is a number: what is zero is padding, which nvFuser leaves unwritten
    written = ours != 0
    assert int(written.sum()) == rows * columns
    assert torch.equal(ours[written], theirs[written])


# Programs -----------------------------------------------------------------------------------------


def quantized(halves=True):
    gate_up, down = float_weights(E, H, I)
    scale = torch.tensor([[0.01, 0.02]]).expand(E, 2).contiguous() if halves else None
    return [*quantize(gate_up, NVFP4, scale), *quantize(down, NVFP4)]


def tokens(count, dtype=torch.bfloat16, experts_used=E):
    g = generator()
    x = torch.randn(count, H, generator=g).to(dtype)
    return [
        x,
        torch.randint(0, experts_used, (count, K), generator=g),
        torch.rand(count, K, generator=g),
    ]


VARIANTS = {
    "plain": {},
    "interleave": {"activation": swiglu(interleave=8)},
    "limit": {"activation": swiglu(limit=1.0, alpha=1.702, up_offset=1.0, interleave=1)},
    "bias": {"gate_up_bias": torch.randn(E, 2 * I), "down_bias": torch.randn(E, H)},
    "scale on the input": {"scale_on": "input"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_whole_layer(name):
    made = {
        k: v.bfloat16().cuda() if isinstance(v, torch.Tensor) else v
        for k, v in VARIANTS[name].items()
    }
    args = on_cuda(*tokens(37), *quantized())
    with nvfuser():
        found = ops.expert_mlp(*args, **made)
    with options.override(contract_rounding=False):
        close(found, ops.expert_mlp(*args, **made), 256)


def test_any_number_of_tokens_with_one_definition():
    """One token, none, many; all to one expert; empty experts."""
    weights = on_cuda(*quantized())
    for count, used in ((4, E), (1, E), (0, E), (7, 1), (513, 2)):
        args = [*on_cuda(*tokens(count, experts_used=used)), *weights]
        with nvfuser():
            found = ops.expert_mlp(*args)
        with options.override(contract_rounding=False):
            close(found, ops.expert_mlp(*args), 256)


def test_rows_past_the_last_end_are_zero():
    a, weight = tokens(20)[0].cuda(), on_cuda(*quantized()[:3])
    ends = torch.tensor([3, 3, 9, 12], dtype=torch.int32).cuda()
    a[12:] = float("nan")
    with nvfuser():
        found = ops.nvfp4_grouped_mm(a, *weight, ends)
    assert found[12:].eq(0).all()
    close(found, ops.nvfp4_grouped_mm(a, *weight, ends))


@pytest.mark.parametrize("ends", [[9, 3, 4, 40], [-5, 3, 3, 3], [2**31 - 1] * 4])
def test_bad_ends_touch_no_memory_of_others(ends):
    """They are made safe on the device, without waiting for it."""
    a, weight = tokens(20)[0].cuda(), on_cuda(*quantized()[:3])
    with nvfuser():
        found = ops.nvfp4_grouped_mm(a, *weight, torch.tensor(ends, dtype=torch.int32).cuda())
    torch.cuda.synchronize()
    assert found.isfinite().all()


def test_the_gradient_of_the_rows():
    a, weight = tokens(20)[0].cuda(), on_cuda(*quantized()[:3])
    ends = torch.tensor([3, 3, 9, 20], dtype=torch.int32).cuda()
    grads = []
    for target in ("sm_90", "cuda"):
        x = a.clone().requires_grad_()
        with options.override(target=target):
            ops.nvfp4_grouped_mm(x, *weight, ends).float().square().sum().backward()
        grads.append(x.grad)
    close(*grads, 128)


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_a_layer_in_mxfp8(wgrad):
    """Forward and gradients of rows are nvFuser's; copies along rows of groups, and products with
    them, the reference's.
    """
    sizes = (5, 0, 33, 64)
    x, dy = (torch.randn(sum(sizes), n, generator=generator()).bfloat16() for n in (64, 96))
    module = GroupedLinear(4, 64, 96, bias=False, device="cuda", dtype=torch.bfloat16)
    weights = torch.stack(list(module.parameters())).detach().cpu()
    rows = x.cuda().requires_grad_()
    with nvfuser(), fusion_moe.autocast(MXFP8BlockScaling(wgrad=wgrad)):
        y = module(rows, torch.tensor(sizes, device="cuda"))
        y.backward(dy.cuda())
    found = (y, rows.grad, torch.stack([p.grad for p in module.parameters()]))
    for a, want in zip(found, mxfp8.products(x, weights, dy, sizes, wgrad), strict=True):
        torch.testing.assert_close(a.double().cpu(), want, rtol=2**-7, atol=1e-3)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from([0, 5]))
def test_random_programs(fusion, count):
    inputs = on_cuda(*inputs_of(count))
    with nvfuser():
        found = fusion_moe.run(fusion, inputs)
    for a, b in zip(found, fusion.evaluate(*inputs), strict=True):
        close(a, b, 256)


# What is refused ----------------------------------------------------------------------------------


def test_four_bit_products_are_refused_before_launch():
    """Below capability 10.0 nvFuser would launch them, and end the CUDA context."""
    from fusion_moe.backends import TARGETS, emit
    from fusion_moe.compile import lower

    g = generator()
    args = on_cuda(
        torch.randn(20, H, generator=g).bfloat16(),
        *quantize(torch.randn(E, 128, H, generator=g), NVFP4),
        torch.tensor([3, 3, 9, 20], dtype=torch.int32),
    )
    lowered = lower(
        fusion_of_call("nvfp4_grouped_mm", *args, activation_format="nvfp4"),
        TARGETS["sm_100"],
        options.Options(),
    )
    (segment,) = lowered.segments
    kernel = emit(segment, TARGETS["sm_100"])
    assert "cutlass_nvfp4_grouped_mm" in kernel.source
    given = dict(zip(lowered.stages[-1][1].inputs, args, strict=True))
    with pytest.raises(
        UnsupportedError,
        match=r"sm_100 requires compute capability 10.0, "
        r"cuda:0 has 9.0",
    ):
        kernel([given[v] for v in segment.fusion.inputs], {})
    with pytest.raises(UnsupportedError, match="activation_format = 'nvfp4' on sm_90"), nvfuser():
        ops.nvfp4_grouped_mm(*args, activation_format="nvfp4")
    assert torch.zeros(1).cuda().item() == 0  # the context is alive
