"""Weights that torch.compile holds as constants (Inductor's freezing): they are stored once in the
layout that kernels read fastest.
"""

from __future__ import annotations

import pytest
import torch
from fusions import assert_same_bits, evaluate
from torch import Tensor, nn
from torch._inductor import config
from torch.fx import GraphModule, Node

import fusion_moe
from fusion_moe.frontends.constants import store_constants
from fusion_moe.frontends.inductor import fusion_pass
from fusion_moe.frontends.regions import Region
from fusion_moe.layouts import SF128X4
from fusion_moe.options import Options

SIZES, N, K = (3, 0, 6, 2), 48, 64
GROUPED_MM = torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm


class Layer(nn.Module):
    """A product as another library stores its weights."""

    def __init__(self, seed: int = 0, scale: float = 1.0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        codes, block_scale, decode = fusion_moe.ops.nvfp4_quantize(
            torch.randn(len(SIZES), N, K, generator=g) * scale
        )
        self.register_buffer("codes", codes.view(torch.float4_e2m1fn_x2))
        self.register_buffer("block_scale", SF128X4.forward(block_scale))
        self.register_buffer("decode", decode)

    def forward(self, x: Tensor, *problem: Tensor) -> Tensor:
        y = GROUPED_MM(x, self.codes.mT, self.block_scale, self.decode, *problem)
        return torch.relu(y)


def arguments() -> list[Tensor]:
    starts = [sum(SIZES[:g]) for g in range(len(SIZES))]
    padded = [sum(-(-m // 128) * 128 for m in SIZES[:g]) for g in range(len(SIZES))]
    of = starts, padded, [[m, N, K] for m in SIZES]
    x = torch.randn(sum(SIZES), K, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [x, *(torch.tensor(t, dtype=torch.int32) for t in of)]


@pytest.fixture
def seen(monkeypatch) -> list[tuple[Region, Region]]:
    """The regions before and after."""
    found = []

    def stored(graph, regions, options):
        after = store_constants(graph, regions, options)
        found.extend(zip(regions, after, strict=True))
        return after

    monkeypatch.setattr(fusion_pass, "store_constants", stored)
    torch._dynamo.reset()
    return found


def frozen(module: nn.Module):
    """Compiled so, and called once."""
    compiled = torch.compile(module, backend="fusion_moe", fullgraph=True)
    with config.patch(freezing=True), torch.no_grad():
        return compiled(*arguments())


def layouts(region: Region) -> list[str]:
    return [op.attrs["layout"] for op in region.fusion.ops if op.kind.name == "pack"]


def test_constants_are_stored_as_kernels_read_them(seen):
    module = Layer()
    with torch.no_grad():
        want = module(*arguments())
    assert frozen(module).equal(want)
    ((before, after),) = seen
    assert (layouts(before), layouts(after)) == (["sf128x4"], ["linear"])


@pytest.mark.parametrize(("target", "layout"), [("cuda", "w16x64"), ("cpu", "linear")])
def test_the_program_means_the_same(monkeypatch, target, layout):
    """As the reference computes it, in tiles too."""
    x, starts, padded, problem = arguments()
    results = []

    def evaluated(graph, regions, options):
        (before,) = regions
        (after,) = store_constants(graph, regions, Options(target=target))
        assert layouts(after) == [layout]
        for region in (before, after):
            rest = iter([x, starts, padded, problem])
            held = [
                tensor_of(graph.owning_module, node, region)
                if node.op == "get_attr"
                else next(rest)
                for node in region.inputs
            ]
            results.append(evaluate(region.fusion, *held))
        return regions

    monkeypatch.setattr(fusion_pass, "store_constants", evaluated)
    torch._dynamo.reset()
    frozen(Layer())
    before, after = results
    assert_same_bits(after, before)


def tensor_of(module: GraphModule, node: Node, region: Region) -> Tensor:
    """What the program of a region reads."""
    t = getattr(module, node.target)
    t = t.view(torch.uint8) if t.dtype == torch.float4_e2m1fn_x2 else t
    return t.mT if node in region.transposed else t


def test_other_weights_of_the_same_shapes_get_their_own(seen):
    """Inductor's caches know only the shapes of constants."""
    for seed in range(2):
        module = Layer(seed)
        torch._dynamo.reset()
        with torch.no_grad():
            assert frozen(module).equal(module(*arguments()))


def test_scales_that_no_quantizer_writes_stay_where_they_are(seen):
    module = Layer()
    module.block_scale.view(torch.uint8)[0, 0, 0] |= 0x80  # negative
    with torch.no_grad():
        assert frozen(module).equal(module(*arguments()))
    ((_, after),) = seen
    assert layouts(after) == ["sf128x4"]


def test_weights_that_are_no_constants_stay_where_they_are(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(fusion_pass, "store_constants", lambda *args: pytest.fail("called"))
    module = Layer()
    compiled = torch.compile(module, backend="fusion_moe", fullgraph=True)
    with torch.no_grad():
        before = compiled(*arguments())
        module.decode.mul_(2)
        assert compiled(*arguments()).equal(2 * before)
