"""Modules that hold NVFP4 weights as f16a_nvfp4weight_scaled_grouped_mm takes them: thunder's own,
and classes of a user. What they hold becomes ours bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import loops
import pytest
import torch
from torch import Tensor, nn

import fusion_moe
from fusion_moe.encodings import NVFP4, Quantized, dequantize, quantize
from fusion_moe.encodings.encoded import plain
from fusion_moe.errors import NonFiniteError, ShapeError, UnsupportedError
from fusion_moe.layouts import SF128X4
from fusion_moe.nn import (
    GroupedSwiGLU,
    Llama4MoE,
    NVFP4GroupedLinear,
    QuantizedLinear,
    convert,
)

THUNDER = "thunder.benchmarks.layers_for_inference_benchmark"
G, N, K = 3, 128, 64
SIZES = (4, 0, 3)


class Held(nn.Module):
    """A user's class with these buffers."""

    def __init__(self, codes: Tensor, scales: Tensor, encode: Tensor, strides: bool = False):
        super().__init__()
        self.register_buffer("fp4_weight", codes)
        self.register_buffer("weight_scaling_factor", scales)
        self.register_buffer("weight_global_scale", encode)
        for name in ("ab_strides", "c_strides") if strides else ():
            self.register_buffer(name, torch.zeros(G, dtype=torch.int32))


class AnySwiGLU(nn.Module):
    """A user's class of three."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down


def packed(n: int = N, k: int = K, strides: bool = False, seed: int = 0, lead: Any = (G,)):
    """The module, and the numbers that it holds."""
    torch.manual_seed(seed)
    weight = quantize(torch.randn(*lead, n, k), NVFP4)
    codes, scales, decode = weight
    fp4 = codes.view(torch.float4_e2m1fn_x2)
    fp4 = fp4 if strides or not lead else fp4.transpose(1, 2)
    module = Held(fp4, SF128X4.forward(scales), 1 / decode, strides)
    return module, weight


def ends(sizes: Any = SIZES) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("strides", [False, True])
def test_parts_stay_bit_for_bit(strides):
    module, (codes, scales, decode) = packed(strides=strides)
    model = nn.ModuleDict({"one": module})
    fusion_moe.quantize_(model)
    ours = model["one"]
    assert type(ours) is NVFP4GroupedLinear
    assert ours.weight.equal(codes)
    assert ours.weight_scale.view(torch.uint8).equal(scales.view(torch.uint8))
    torch.testing.assert_close(plain(ours.weight_decode_scale), decode, rtol=2**-22, atol=0)


def test_offsets_mean_what_they_meant():
    """Ends beside strides; without them starts, with the total or without."""
    x, to = torch.randn(sum(SIZES), K).bfloat16(), ends()
    starts = to - torch.tensor(SIZES, dtype=torch.int32)
    with_strides, _ = packed(strides=True)
    without, weight = packed()
    want = loops.product(x.double(), dequantize(weight).double(), SIZES)
    ours, others = convert(with_strides), convert(without)
    for module, offs in ((ours, to), (others, starts), (others, torch.cat([starts, to[-1:]]))):
        assert (module(x, offs).double() - want).norm() <= 0.01 * want.norm()
    fewer = torch.cat([starts, to[-1:] - 1])  # the last row is no group's
    assert not others(x, fewer)[-1].any()


def test_three_of_them_are_one_layer():
    (gate, a), (up, b), (down, c) = (packed(N, 128, seed=i) for i in range(3))
    ours = convert(AnySwiGLU(gate, up, down))
    assert type(ours) is GroupedSwiGLU
    x, to = torch.randn(sum(SIZES), 128).bfloat16(), ends()
    a, b, c = (dequantize(w).double() for w in (a, b, c))
    inner = loops.swiglu(torch.cat([loops.product(x.double(), w, SIZES) for w in (a, b)], -1))
    want = loops.product(inner, c, SIZES)
    starts = to - torch.tensor(SIZES, dtype=torch.int32)
    assert (ours(x, starts).double() - want).norm() <= 0.02 * want.norm()


def test_a_dense_one():
    module, weight = packed(lead=())
    assert convert(module).bias is None
    module.register_buffer("bias", torch.randn(N).bfloat16())
    ours, x = convert(module), torch.randn(5, K).bfloat16()
    assert type(ours) is QuantizedLinear
    want = x.double() @ dequantize(weight).double().T + module.bias.double()
    assert (ours(x).double() - want).norm() <= 0.01 * want.norm()


def test_refusals():
    module, _ = packed()
    with pytest.raises(UnsupportedError, match="becomes nvfp4; expected int4"):
        convert(module, fusion_moe.INT4Config())
    cut = Held(module.fp4_weight, module.weight_scaling_factor[:, :100], module.weight_global_scale)
    with pytest.raises(ShapeError, match=r"weight_scaling_factor \[3, 100, 4\].*expected \[3, 128"):
        convert(cut)
    module.weight_global_scale[1] = 0
    with pytest.raises(NonFiniteError, match="weight_global_scale"):
        convert(module)


# thunder's own ------------------------------------------------------------------------------------


@pytest.fixture
def layers():
    pytest.importorskip("expecttest")  # it imports a part of torch.testing that needs it
    return pytest.importorskip(THUNDER)


def theirs(layers: Any, module: Any) -> Tensor:
    """[G, N, K] by thunder's own function, a matrix at a time."""
    rows = module.fp4_weight if hasattr(module, "ab_strides") else module.fp4_weight.mT
    of = zip(rows, module.weight_scaling_factor, module.weight_global_scale, strict=True)
    return torch.stack(
        [layers.dequantize_to_dtype(w.contiguous(), s, g, torch.float32, "cpu") for w, s, g in of]
    )


def grouped(layers: Any, n: int, k: int, seed: int) -> Any:
    """Its module, of weights so large that its rule leaves codes that are not zero."""
    torch.manual_seed(seed)
    linear = layers.GroupedLinear(G, k, n, torch.bfloat16, "cpu")
    linear.weight.data.normal_(std=8.0)
    return layers.NVFP4InferenceGroupedLinear.from_grouped_linear(linear)


@pytest.mark.thunder
def test_thunders_numbers(layers):
    module = grouped(layers, N, K, 0)
    want = theirs(layers, module)
    assert want.count_nonzero() > want.numel() / 2
    ours = convert(module)
    parts = (ours.weight, ours.weight_scale, ours.weight_decode_scale)
    found = dequantize(Quantized(*parts, encoding=NVFP4))
    torch.testing.assert_close(found, want, rtol=2**-21, atol=0)
    back = layers.swizzled_to_linear_128_4(module.weight_scaling_factor[1], N, K // 16)
    assert ours.weight_scale[1].view(torch.uint8).equal(back.view(torch.uint8))


@pytest.mark.thunder
def test_thunders_layer_with_experts_that_it_quantized(layers):
    """Its class of three where there is one, before 0.2.7 its SwiGLU with quantized layers."""
    config = SimpleNamespace(
        hidden_size=128,
        intermediate_size=128,
        num_routed_experts=G,
        num_shared_experts=1,
        dtype=torch.bfloat16,
        device="cpu",
    )
    torch.manual_seed(0)
    moe = layers.Llama4MoE(config)
    names = "gate_proj", "up_proj", "down_proj"
    three = {name: grouped(layers, 128, 128, i) for i, name in enumerate(names)}
    gate, up, down = (theirs(layers, m).double() for m in three.values())
    whole = getattr(layers, "NVFP4InferenceGroupedSwiGLU", None)
    if whole:
        moe.routed_experts = whole(*three.values())
    else:
        for name, module in three.items():
            setattr(moe.routed_experts, name, module)
    assert type(convert(moe.routed_experts)) is GroupedSwiGLU
    model = nn.ModuleDict({"moe": moe})
    shared, router = moe.shared_experts, moe.gate
    fusion_moe.quantize_(model)
    assert type(model["moe"]) is Llama4MoE
    x = torch.randn(1, 5, 128).bfloat16() / 64
    with torch.no_grad():
        found, _ = model["moe"](x)
        want = shared(x).double()[0]
        scores, chosen = router(x[0]).max(-1)
    for i, (score, e) in enumerate(zip(scores, chosen, strict=True)):
        scaled = x[0, i].double() * score.sigmoid().double()
        inner = torch.cat([gate[e] @ scaled, up[e] @ scaled])
        want[i] += down[e] @ loops.swiglu(inner)
    assert (found[0].double() - want).norm() <= 0.02 * want.norm()
