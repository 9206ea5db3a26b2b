"""Modules whose weights are padded to whole tiles, on a GPU, beside the same ones in the linear
layout.
"""

from __future__ import annotations

import copy

import pytest
import torch
from experts import float_weights
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import ENCODINGS, NVFP4, Quantized, quantize
from fusion_moe.nn import (
    Experts,
    NVFP4Experts,
    NVFP4GroupedLinear,
    QuantizedLinear,
    add_lora_,
    swiglu,
)
from fusion_moe.nn.frozen.packed import PackedModule

pytestmark = pytest.mark.gpu

E, TOP_K = 16, 4
# hidden and intermediate features
SIZES = [(256, 96), (192, 720), (128, 1392), (128, 2064), (80, 48)]


@pytest.fixture(autouse=True)
def when_they_are_told():
    """Modules order their weights when tests say so."""
    with options.override(order_weights=False):
        yield


def close(found: Tensor, want: Tensor, most: float = 8e-3) -> None:
    assert found.shape == want.shape
    assert found.isfinite().all()
    assert (found.float() - want.float()).norm() <= most * want.float().norm()


def inputs(
    tokens: int, hidden: int, zipf: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    likely = (torch.arange(E) + 1.0) ** -1.2 if zipf else torch.ones(E)
    ids = torch.stack([torch.multinomial(likely, TOP_K, generator=g) for _ in range(tokens)])
    w = torch.rand(tokens, TOP_K, generator=g) + 0.1
    return tuple(
        t.cuda() for t in (torch.randn(tokens, hidden, generator=g).bfloat16(), ids, w.bfloat16())
    )  # type: ignore[return-value]


def padded(module: torch.nn.Module) -> torch.nn.Module:
    with torch.inference_mode(False):
        made = copy.deepcopy(module)
        fusion_moe.prepare_(made)
    assert all(
        any(form.padding for form in m.forms.values()) and m.weight_layout == "w16x64"
        for m in made.modules()
        if isinstance(m, PackedModule)
    )
    return made


def encoded(name: str, hidden: int, inner: int, **kwargs) -> Experts:
    parts = (quantize(t.cuda(), encoding=ENCODINGS[name]) for t in float_weights(E, hidden, inner))
    return Experts(*parts, **kwargs)


@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_experts(hidden, inner):
    module = NVFP4Experts.from_float(*float_weights(E, hidden, inner)).cuda()
    other = padded(module)
    with torch.inference_mode():
        for tokens, zipf in (
            (1, False),
            (5, False),
            (33, True),
            (300, True),
            (2000, False),
            (2000, True),
        ):
            args = inputs(tokens, hidden, zipf)
            torch.full((2**24,), torch.nan, device="cuda")  # in the memory that comes next
            close(other(*args), module(*args))


@pytest.mark.parametrize("encoding", ["mxfp4", "int4"])
def test_other_encodings_with_biases(encoding):
    bias = {"gate_up_bias": torch.randn(E, 192), "down_bias": torch.randn(E, 160)}
    module = encoded(
        encoding,
        160,
        96,
        activation=swiglu(interleave=1, limit=7.0, alpha=1.702, up_offset=1.0),
        **bias,
    ).cuda()
    other = padded(module)
    with torch.inference_mode():
        for tokens in (3, 600):
            args = inputs(tokens, 160)
            close(other(*args), module(*args))


def test_linear_layers():
    one = QuantizedLinear(
        Quantized(*(t[0] for t in quantize(torch.randn(1, 200, 80).cuda(), NVFP4)), encoding=NVFP4),
        torch.randn(200).cuda(),
    )
    grouped = NVFP4GroupedLinear.from_float(torch.randn(E, 200, 80).cuda())
    ends = (torch.arange(E, dtype=torch.int32) * 20 + 7).cuda()
    for rows in (3, 400):
        x = torch.randn(rows, 80).bfloat16().cuda()
        close(padded(one)(x), one(x))
        close(padded(grouped)(x, ends.clamp(max=rows)), grouped(x, ends.clamp(max=rows)))


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("tokens", [8, 1500])
@pytest.mark.parametrize("hidden", [256, 80])
def test_gradients(tokens, hidden, adapters):
    module = NVFP4Experts.from_float(*float_weights(E, hidden, 96)).cuda()
    if adapters:
        add_lora_(module, rank=8)
        for adapter in (module.gate_up_lora, module.down_lora):
            torch.nn.init.normal_(adapter.B, std=0.1)
    found = []
    for m in (module, padded(module)):
        x, ids, w = inputs(tokens, hidden)
        y = m(x.requires_grad_(), ids, w)
        y.float().square().mean().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in m.parameters() if p.requires_grad)])
    assert len(found[0]) == (6 if adapters else 2)
    for want, got in zip(*found, strict=True):
        close(got, want, 2e-2)


# Without prepare_ ---------------------------------------------------------------------------------


def layouts(module: torch.nn.Module) -> set[str]:
    return {m.weight_layout for m in module.modules() if isinstance(m, PackedModule)}


def test_what_moves_to_a_gpu_orders_its_weights():
    module, args = NVFP4Experts.from_float(*float_weights(E, 256, 96)), inputs(40, 256)
    want = copy.deepcopy(module).cuda()(*args)
    with options.override(order_weights=True):
        there = copy.deepcopy(module).cuda()
    assert layouts(there) == {"w16x64"}
    close(there(*args), want)
    compiled = torch.compile(there, backend="fusion_moe", fullgraph=True)
    with torch.inference_mode():
        close(compiled(*args), want)
    for name, t in module.state_dict().items():
        assert torch.equal(t.view(torch.uint8), there.state_dict()[name].cpu().view(torch.uint8))


@pytest.mark.parametrize("inner", [96, 128])
def test_a_first_call_on_a_gpu_orders_the_weights_once(inner):
    module, args = NVFP4Experts.from_float(*float_weights(E, 256, inner)).cuda(), inputs(40, 256)
    before, want = module.state_dict(), module(*args)
    copies = {name: t.clone() for name, t in before.items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    used = torch.cuda.memory_allocated()
    with options.override(order_weights=True), torch.inference_mode():
        close(module(*args), want)
        assert layouts(module) == {"w16x64"}
        place = module.gate_up_proj.data_ptr()
        close(module(*args), want)
    assert module.gate_up_proj.data_ptr() == place
    print(f"{torch.cuda.max_memory_allocated() - used} bytes more than {module.nbytes} of weights")
    assert all(
        torch.equal(t.view(torch.uint8), copies[name].view(torch.uint8))
        for name, t in before.items()
    )


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_a_compiled_linear_layer_before_a_residual(rows):
    module = QuantizedLinear(quantize(torch.randn(320, 256) / 16, NVFP4)).cuda()
    x, residual = (
        torch.randn(rows, 1, 256, device="cuda").bfloat16(),
        torch.randn(rows, 1, 320, device="cuda").bfloat16(),
    )

    def block(x: Tensor, residual: Tensor) -> Tensor:
        return residual + module(x)

    with torch.no_grad():
        want = block(x, residual)
        fusion_moe.prepare_(module)
        close(torch.compile(block, backend="fusion_moe")(x, residual), want)


def test_a_capture_keeps_what_it_reads():
    module, args = NVFP4Experts.from_float(*float_weights(E, 256, 128)).cuda(), inputs(8, 256)
    same = copy.deepcopy(module)
    same.decided()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with options.override(order_weights=True):
        want = same(*args)  # compiles
        with torch.cuda.graph(graph):
            found = module(*args)
        module(*args)
    assert layouts(module) == {"linear"}
    graph.replay()
    close(found, want)
