"""torch.nn.functional.grouped_mm: forward and backward in regions, weights read as they are
stored.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import fusion_moe
from fusion_moe.definitions.translate import find
from fusion_moe.errors import Untranslatable
from fusion_moe.frontends.inductor.compile_graph import compile_calls
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.frontends.regions import Found, find_regions
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe_translators.grouped import grouped_mm

M, G, N, K = 9, 4, 16, 32
OFFS = torch.tensor([2, 2, 8, 9], dtype=torch.int32)  # an empty group


def operands(stored: str, dtype=torch.bfloat16) -> tuple[Tensor, Tensor]:
    """a [M, K], and a weight [G, N, K], or [G, K, N] if it is stored so."""
    g = torch.Generator().manual_seed(0)
    a, w = torch.randn(M, K, generator=g).to(dtype), torch.randn(G, N, K, generator=g).to(dtype)
    return a.requires_grad_(), (w if stored == "gnk" else w.mT.contiguous()).requires_grad_()


def layer(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """As the experts of transformers: a weight [G, N, K] is passed as its transposed view."""
    return F.silu(F.grouped_mm(a, w if w.shape[1] == K else w.transpose(-2, -1), offs=offs))


def compiled(seen: list[Found]):
    """For the reference, which takes every product: what a target has no kernel for stays
    torch's.
    """
    torch._dynamo.reset()
    fusion_pass = FusionPass(fusion_moe.options.current().replace(target="reference"), seen.append)
    return torch.compile(
        layer, backend=lambda model, inputs: compile_calls(fusion_pass, model, inputs)
    )


@pytest.mark.parametrize("stored", ["gnk", "gkn"])
def test_forward_and_backward(stored):
    dy = torch.randn(M, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    seen: list[Found] = []
    for function in (layer, compiled(seen)):
        a, w = operands(stored)
        y = function(a, w, OFFS)
        y.backward(dy)
        results.append((y.detach(), a.grad, w.grad))
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
    regions = [region for graph in seen for region in graph.regions]
    kinds = [
        op.kind.name for region in regions for op in region.fusion.ops if op.kind.role == "grouped"
    ]
    first, second = (
        ("grouped_mm", "grouped_mm_t") if stored == "gnk" else ("grouped_mm_t", "grouped_mm")
    )
    assert sorted(kinds) == sorted([first, second, "grouped_outer"])


@pytest.mark.parametrize("stored", ["gnk", "gkn"])
def test_no_weight_is_copied(stored):
    """Each program takes the weight in the order in which it lies in memory, whatever view of it
    the graph has.
    """
    seen: list[Found] = []
    a, w = operands(stored)
    compiled(seen)(a, w, OFFS).sum().backward()
    for region in (region for graph in seen for region in graph.regions):
        (product,) = (
            op for op in region.fusion.ops if op.kind.name in ("grouped_mm", "grouped_mm_t")
        )
        assert product.values[1] in region.fusion.inputs
        assert product.values[1].type.shape == tuple(w.shape)
        assert region.fusion.role(product.values[1]) == "weight"


def test_rows_of_no_group_are_zero():
    """torch leaves them unwritten."""
    a, w = operands("gnk")
    with torch.no_grad():
        y = compiled([])(a, w, OFFS - 1)
        want = layer(a, w, OFFS - 1)
    torch.testing.assert_close(y[:-1], want[:-1], rtol=2e-2, atol=2e-2)
    assert not y[-1:].any()


def test_a_product_without_a_kernel_stays_torchs():
    """Of float64, for which no target but the reference has one."""
    graph, fake = Graph(), FakeTensorMode()
    with fake:
        vals = [
            torch.empty(M, K).double(),
            torch.empty(G, K, N).double(),
            torch.empty(G, dtype=torch.int32),
            torch.empty(M, N).double(),
        ]
    nodes = [graph.placeholder(name) for name in ("a", "w", "offs")]
    nodes.append(graph.call_function(torch.ops.aten._grouped_mm.default, tuple(nodes)))
    for node, val in zip(nodes, vals, strict=True):
        node.meta["val"] = val
    graph.output(nodes[-1])
    options = fusion_moe.options.current()
    (refused,) = find_regions(graph, options.replace(target="cpu")).not_fused
    assert refused.op == "aten._grouped_mm.default"
    assert "expected a product that the target has a kernel for: torch has its own" in refused.why
    assert len(find_regions(graph, options.replace(target="reference")).regions) == 1


def test_sizes_that_the_graph_does_not_relate_are_a_plain_refusal():
    graph, env = Graph(), ShapeEnv()
    k, other = (
        env.create_symintnode(
            env.create_symbol(K, ConstantSource(name), DimDynamic.DYNAMIC), hint=K
        )
        for name in ("k", "other")
    )
    with FakeTensorMode(shape_env=env):
        vals = [torch.empty(s).bfloat16() for s in ((M, k), (G, other, N), (M, N))]
        vals.insert(2, torch.empty(G, dtype=torch.int32))
    nodes = [graph.placeholder(name) for name in ("a", "w", "offs")]
    nodes.append(graph.call_function(torch.ops.aten._grouped_mm.default, tuple(nodes)))
    for node, val in zip(nodes, vals, strict=True):
        node.meta["val"] = val
    graph.output(nodes[-1])
    (refused,) = find_regions(graph, fusion_moe.options.current()).not_fused
    assert refused.why == (
        f"refused: sizes {k} and {other} of aten::_grouped_mm are not known to be equal; expected "
        "dimensions that the trace relates; "
        "relate them before the call: torch._check(a.shape[i] == b.shape[j])"
    )
    assert not refused.broken


def test_out_dtype():
    fd = FusionDefinition()
    a, w, offs = (
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (((M, K), "bf16"), ((G, K, N), "bf16"), ((G,), "i32"))
    )
    assert str(grouped_mm(fd, a, w, offs).type).startswith("bf16[9/")
    assert str(grouped_mm(fd, a, w, offs, out_dtype="f32").type).startswith("f32[9/")
    assert str(grouped_mm(fd, fd.ops.permute(a, dims=(1, 0)), a, offs).type) == "bf16[4, 32, 32]"


def test_refusals():
    fd = FusionDefinition()
    a, w, offs = (
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (((M, K), "bf16"), ((G, K, N), "bf16"), ((G,), "i32"))
    )
    for args in ((a, w), (w, w, offs), (w, a, offs), (a, w, offs, a)):
        with pytest.raises(
            Untranslatable,
            match=r"expected \[M, K\] and \[G, K, N\], or \[N, M\] "
            r"and \[M, K\], with offs and no bias",
        ):
            grouped_mm(fd, *args)
    assert find("aten::_grouped_mm").as_stored
