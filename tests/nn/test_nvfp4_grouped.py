"""NVFP4GroupedLinear and GroupedSwiGLU against loops in float64, and what they are made from."""

from __future__ import annotations

from typing import Any

import loops
import pytest
import torch
from bad_calls import messages
from hypothesis import given, strategies as st
from routings import Partition, partitions
from torch import Tensor, nn
from ways import HOW, every_way

import fusion_moe
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import ShapeError
from fusion_moe.nn import GroupedSwiGLU, NVFP4GroupedLinear, convert

EPS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}


SIZES = {
    "uneven": (3, 0, 6, 2),
    "none": (0, 0, 0, 0),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(groups: int, n: int = 48, k: int = 64, bias: bool = False) -> NVFP4GroupedLinear:
    return NVFP4GroupedLinear.from_float(
        random(groups, n, k) * 0.1, random(groups, n, seed=1) if bias else None
    )


def meant(of: NVFP4GroupedLinear) -> Tensor:
    """f64[G, N, K]: what the bytes of a module mean."""
    return loops.decoded(
        of.weight.detach(), of.weight_scale.detach(), of.weight_decode_scale.detach()
    )


def by_loop(of: NVFP4GroupedLinear, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    out = loops.product(x, meant(of), sizes)
    for group, rows in Partition(sizes, 0).runs if of.bias is not None else ():
        out[rows] += of.bias.detach().double()[group]
    return out


# What they compute --------------------------------------------------------------------------------


@given(partitions(), st.sampled_from(list(EPS)), st.booleans())
def test_linear_against_a_loop(partition: Partition, dtype, bias):
    module, x = (
        linear(len(partition.sizes), bias=bias),
        random(partition.rows, 64, dtype=dtype, seed=2),
    )
    module.to(dtype)
    found, want = module(x, partition.ends), by_loop(module, x.double(), partition.sizes)
    magnitude = loops.product(x.double().abs(), meant(module).abs(), partition.sizes) + 3
    assert found.dtype == dtype
    assert (
        (found.double() - want).abs() <= EPS[dtype] * (2 * want.abs() + 5) + 2.0**-20 * magnitude
    ).all()
    assert not found[sum(partition.sizes) :].any()


@every_way
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_swiglu_against_a_loop(how, sizes):
    gate, up, down = (
        random(len(sizes), 32, 64),
        random(len(sizes), 32, 64, seed=1) * 100,
        random(len(sizes), 64, 32, seed=2),
    )
    module, ends = GroupedSwiGLU.from_float(gate, up, down), Partition(sizes, 0).ends
    run = HOW[how](module)
    for lead in ((sum(sizes),), (1, sum(sizes))):  # rows in one dimension and in two
        x = random(*lead, 64, seed=3)
        wide = x.double().view(-1, 64)
        want = by_loop(
            module.down_proj, loops.swiglu(by_loop(module.gate_up_proj, wide, sizes)), sizes
        )
        with torch.no_grad():
            found = run(x, ends)
        assert found.shape == x.shape
        assert (found.double().view(-1, 64) - want).norm() <= 1e-5 * want.norm()


@every_way
def test_gradients_reach_activations_and_biases(how):
    module, sizes = linear(3, bias=True), (4, 0, 7)
    x, dy = random(11, 64, seed=2).requires_grad_(), random(11, 48, seed=3)
    HOW[how](module)(x, Partition(sizes, 0).ends).backward(dy)
    torch.testing.assert_close(
        x.grad.double(), loops.product(dy.double(), meant(module).mT, sizes), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        module.bias.grad,
        torch.stack([dy[:4].sum(0), torch.zeros(48), dy[4:].sum(0)]),
        rtol=1e-5,
        atol=1e-5,
    )
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["bias"]


# What they hold -----------------------------------------------------------------------------------


def test_gate_up_and_down_are_quantized_each_by_itself():
    gate, up, down = random(2, 32, 64), random(2, 32, 64) * 100, random(2, 64, 32)
    module = GroupedSwiGLU.from_float(gate, up, down)
    for part, weight in (("gate", gate), ("up", up), ("down", down)):
        q, of = quantize(weight, NVFP4), module.down_proj if part == "down" else module.gate_up_proj
        rows = {"gate": slice(0, 32), "up": slice(32, 64), "down": slice(0, 64)}[part]
        scale = (
            of.weight_decode_scale
            if part == "down"
            else of.weight_decode_scale[:, int(part == "up")]
        )
        assert of.weight[:, rows].equal(q.codes)
        assert of.weight_scale[:, rows].view(torch.uint8).equal(q.block_scale.view(torch.uint8))
        assert scale.equal(q.decode_scale)


@pytest.mark.parametrize(
    "change", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()]
)
def test_a_cast_changes_the_bias_and_no_byte(change):
    module, x, ends = linear(2, bias=True), random(5, 64), Partition((2, 3), 0).ends
    module(x, ends).sum().backward()  # gradients are cast too
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    change(module)
    for name, p in module.named_parameters():
        assert (p.dtype == before[name].dtype) is (name != "bias")
        assert name == "bias" or torch.equal(p.view(torch.uint8), before[name].view(torch.uint8))
    assert module.bias.grad.dtype == module.bias.dtype


def test_shown():
    module = linear(2, bias=True)
    sizes = "NVFP4GroupedLinear(groups=2, in_features=64, out_features=48, bias=True"
    assert repr(module).startswith(sizes)
    assert module.nbytes == 2 * 48 * 64 * 9 // 16 + 2 * 4 + 2 * 48 * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: NVFP4GroupedLinear(quantize(random(8, 32), NVFP4)),
        lambda: NVFP4GroupedLinear(quantize(random(2, 8, 32), NVFP4), random(2, 9)),
        lambda: GroupedSwiGLU(linear(2, 64, 64), linear(2, 64, 64)),
        lambda: GroupedSwiGLU(linear(2, 64, 64), linear(3, 64, 32)),
        lambda: NVFP4GroupedLinear.from_float(random(2, 8, 24)),
    ],
)
def test_sizes_that_do_not_fit(make):
    with pytest.raises(ShapeError):
        make()


# What they are made from --------------------------------------------------------------------------

THUNDER = "thunder.benchmarks.layers_for_inference_benchmark"


class Linears(nn.Module):
    """Stands in for thunder's GroupedLinear where thunder is not installed: its parameter, its
    name.
    """

    def __init__(
        self, groups: int, in_features: int, out_features: int, dtype: torch.dtype, device: str
    ):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(groups, out_features, in_features, dtype=dtype, device=device)
        )


class SwiGLUs(nn.Module):
    """Stands in for thunder's GroupedSwiGLU."""

    def __init__(
        self, groups: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: str
    ):
        super().__init__()
        self.gate_proj = Linears(groups, hidden_size, intermediate_size, dtype, device)
        self.up_proj = Linears(groups, hidden_size, intermediate_size, dtype, device)
        self.down_proj = Linears(groups, intermediate_size, hidden_size, dtype, device)


for _stand_in, _name in ((Linears, "GroupedLinear"), (SwiGLUs, "GroupedSwiGLU")):
    _stand_in.__module__, _stand_in.__qualname__, _stand_in.__name__ = THUNDER, _name, _name


def thunders(how: str) -> Any:
    """thunder's module of layers, or the classes that stand in for it."""
    if how == "stand-ins":
        return type("layers", (), {"GroupedLinear": Linears, "GroupedSwiGLU": SwiGLUs})
    pytest.importorskip("expecttest")  # it imports a part of torch.testing that needs it
    return pytest.importorskip(THUNDER)


BOTH = ["stand-ins", pytest.param("thunder", marks=pytest.mark.thunder)]


@pytest.mark.parametrize("source", BOTH)
def test_thunders_layers(source):
    layers = thunders(source)
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "one": layers.GroupedLinear(3, 64, 48, torch.bfloat16, "cpu"),
            "all": layers.GroupedSwiGLU(3, 64, 32, torch.bfloat16, "cpu"),
        }
    )
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    fusion_moe.quantize_(model.eval())
    assert (type(model["one"]), type(model["all"]), model["one"].training) == (
        NVFP4GroupedLinear,
        GroupedSwiGLU,
        False,
    )
    assert model["one"].weight.equal(quantize(weights["one.weight"], NVFP4, scales="mse").codes)
    x, ends, sizes = random(11, 64, dtype=torch.bfloat16), Partition((4, 0, 7), 0).ends, (4, 0, 7)
    gate, up, down = (
        weights[f"all.{name}_proj.weight"].double() for name in ("gate", "up", "down")
    )
    inner = loops.swiglu(torch.cat([loops.product(x.double(), w, sizes) for w in (gate, up)], -1))
    want = loops.product(inner, down, sizes)
    # quantized to four bits, not another function
    assert (model["all"](x, ends).double() - want).norm() < 0.3 * want.norm()
    before = model["all"]
    fusion_moe.quantize_(model)
    assert model["all"] is before


@pytest.mark.parametrize("source", BOTH)
def test_a_module_that_is_no_part_of_a_model(source, golden):
    module, bad = (
        thunders(source).GroupedLinear(3, 64, 48, torch.float32, "cpu") for _ in range(2)
    )
    assert isinstance(convert(module), NVFP4GroupedLinear)
    with torch.no_grad():
        bad.weight[2, 5, 7] = float("nan")
    golden(
        messages(
            {
                "a module": lambda: fusion_moe.quantize_(module),
                "another class": lambda: convert(nn.Bilinear(16, 16, 16)),
                "NaN": lambda: convert(bad),
            }
        )
    )
