"""Which calls of a graph become one Fusion, which stay out and why; with the fusions in place the
graph computes the same.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
from moe_models import (
    Experts,
    G,
    H,
    I,
    K,
    O,
    calls,
    check,
    found,
    left,
    passed,
    routing,
    runs,
    small_ops,
    tokens,
    traced,
    weight,
)
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fusion_moe import Untranslatable, options, translator
from fusion_moe.backends import TARGETS
from fusion_moe.compile import lower
from fusion_moe.definitions import translate
from fusion_moe.frontends import regions
from fusion_moe.frontends.inductor.compile_graph import compile_calls
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.frontends.regions import Found
from fusion_moe.ir.types import Rows

UP, DOWN = weight(2 * I, H), weight(H, I, 1)
SQUARE = weight(H, H, 2)
IDS, W = routing(5)


def mlp(x: Tensor, ids: Tensor = IDS, w: Tensor = W) -> Tensor:
    return O.expert_mlp(x, ids, w, *UP, *DOWN)


def product(x: Tensor, offs: Tensor) -> Tensor:
    return O.nvfp4_grouped_mm(x, *SQUARE, offs)


OFFS = torch.tensor([1, 3, 3, 5], dtype=torch.int32)


@pytest.fixture
def lib():
    """A library for operations of a test, whose translators go with it."""
    before = {t.op for t in translate.registered()}
    with torch.library._scoped_library("fx_regions", "FRAGMENT") as lib:
        yield lib
    for t in translate.registered():
        if t.op not in before:
            translate.unregister(t.op)


def define(
    lib: torch.library.Library,
    name: str,
    schema: str = "(Tensor x) -> Tensor",
    body=lambda x: x + 1,
):
    lib.define(name + schema)
    lib.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fx_regions::{name}", body, lib=lib)
    return getattr(torch.ops.fx_regions, name)


# ----------------------------------------------------------------------------------- what is inside


@pytest.mark.parametrize("dynamic", [False, True])
def test_small_operations_and_the_one_operation_are_the_same_region(dynamic):
    def one(x):
        return x + mlp(x)

    def small(x):
        return x + small_ops(x, IDS, W, UP, DOWN)

    for f in (one, small):
        result = check(f, tokens(5), dynamic=dynamic)
        (region,) = result.regions
        assert [op.kind.name for op in region.fusion.ops if op.kind.role == "grouped"] == [
            "grouped_mm",
            "grouped_mm",
        ]
        assert calls(region.nodes)[-1] == "aten.add.Tensor"


def test_a_graph_without_grouped_products_is_left_alone():
    graph = traced(lambda x: torch.relu(x) + 1, tokens(5))
    before = str(graph)
    assert passed(graph).regions == []
    assert str(graph) == before


def test_pointwise_work_that_fuses_with_no_product_stays_outside():
    result = check(lambda x: mlp(torch.lgamma(torch.relu(x) * 2 + 1)).sum(0).relu() * 3, tokens(5))
    (region,) = result.regions
    assert "aten.relu.default" not in calls(region.nodes)
    assert "no grouped product to fuse with" in left(result, "aten.relu.default")


def test_an_operation_that_the_graphs_compiler_can_only_call_stays_inside():
    """so that it runs under the options of the fusion, and its value need not leave it"""
    result = check(
        lambda x: product(O.scaled_swiglu(torch.cat([x, x], -1)).cumsum(0), OFFS), tokens(5)
    )
    assert calls(result.regions[0].nodes) == ["fusion_moe.nvfp4_grouped_mm.default"]
    result = check(lambda x: O.scaled_swiglu(product(x, OFFS).sum(0, keepdim=True)), tokens(5))
    assert calls(result.regions[0].nodes)[-1] == "fusion_moe.scaled_swiglu.default"


def test_work_between_two_products_stays_inside():
    """a sum over rows is no epilogue, but the graph's compiler could only take it with a store and
    a load around it
    """

    def f(x):
        y = product(x, OFFS)
        return product(y + y.sum(0, keepdim=True), OFFS)

    (region,) = check(f, tokens(5)).regions
    assert calls(region.nodes).count("fusion_moe.nvfp4_grouped_mm.default") == 2
    assert "aten.sum.dim_IntList" in calls(region.nodes)


def test_two_layers_are_two_fusions_and_the_second_reads_the_first():
    first, second = Experts(seed=0), Experts(small=True, seed=1)

    def f(x):
        y = x + first(x)
        return y + second(y)

    assert len(check(f, tokens(5)).regions) == 2
    graph = traced(f, tokens(5))
    passed(graph)
    first_run, second_run = runs(graph)
    assert any(n.args[0] is first_run for n in second_run.args[1] if n.op == "call_function")


def test_two_layers_without_anything_between_them_are_one_fusion():
    (region,) = check(lambda x: mlp(mlp(x)), tokens(5)).regions
    assert sum(op.kind.role == "grouped" for op in region.fusion.ops) == 4


# --------------------------------------------------------------------------------- edges of regions


def test_what_is_read_outside_and_what_the_graph_returns_are_outputs():
    def f(x):
        y = product(x, OFFS)
        z = product(y, OFFS)
        return x, z, product(z, OFFS), y.cumsum(0)

    (region,) = check(f, tokens(5)).regions
    assert len(region.outputs) == 3


def test_results_of_an_operation_with_several_are_read_in_any_way():
    """one inside, one outside, one by nobody"""

    def f(x):
        ends, row_of, slot_of = O.route(IDS, G)
        return product(x[row_of], ends), slot_of.cumsum(0)

    result = check(f, tokens(5))
    (region,) = result.regions
    assert "fusion_moe.route.default" in calls(region.nodes)


def test_dead_results_make_no_fusion():
    graph = traced(lambda x: product(x, OFFS), tokens(5))
    (call,) = [n for n in graph.nodes if n.target is O.nvfp4_grouped_mm.default]
    call.replace_all_uses_with(call.args[0])
    assert found(graph).regions == []
    assert found(traced(lambda x: product(x, OFFS), tokens(5))).regions != []


def test_values_that_the_graph_does_not_tell_are_refused():
    graph = traced(lambda x: product(x, OFFS), tokens(5))
    (call,) = [n for n in graph.nodes if n.target is O.nvfp4_grouped_mm.default]
    del call.args[4].meta["val"]
    result = found(graph)
    assert result.regions == []
    assert "of unknown type" in left(result, "fusion_moe.nvfp4_grouped_mm.default")


def test_a_view_at_the_boundary_stays_with_the_graphs_compiler():
    def f(x):
        return mlp(x.reshape(5, H)).reshape(1, 5, H).transpose(0, 1)

    result = check(f, tokens(1, 5))
    (region,) = result.regions
    assert calls(region.nodes) == ["fusion_moe.expert_mlp.default"]


def test_a_view_between_two_members_goes_with_them():
    result = check(lambda x: x + mlp(x.reshape(5, H)).reshape(1, 5, H), tokens(1, 5))
    (region,) = result.regions
    assert calls(region.nodes)[-2:] == ["aten.view.default", "aten.add.Tensor"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("read", ["view", "as_strided"])
def test_outputs_lie_in_memory_as_those_of_the_calls_did(read, dynamic):
    """what reads them was traced for these strides, and is called as it was traced where Inductor
    writes no code
    """

    def f(x):
        y = product(x, OFFS).t() * 2
        after = y.t().view(-1) if read == "view" else y.as_strided((H, 5), (5, 1))
        return product(y.t(), OFFS), after.cumsum(0)

    (region,) = check(f, tokens(5), dynamic=dynamic).regions
    assert calls(region.nodes).count("aten.mul.Tensor") == 1


def test_operations_on_other_devices_stay_outside():
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, offs = torch.empty(5, H, device="cuda"), torch.empty(G, dtype=torch.int32, device="cuda")
        w = [torch.empty_like(t, device="cuda") for t in SQUARE]
        scalar = torch.empty((), device="cpu")
    graph = Graph()
    nodes = [
        graph.placeholder(name) for name in ("x", "codes", "scale", "decode", "offs", "scalar")
    ]
    for n, val in zip(nodes, (x, *w, offs, scalar), strict=True):
        n.meta["val"] = val
    y = graph.call_function(O.nvfp4_grouped_mm.default, tuple(nodes[:5]))
    z = graph.call_function(torch.ops.aten.mul.Tensor, (y, nodes[5]))
    graph.output(z)
    y.meta["val"] = z.meta["val"] = x
    assert mode is not None
    result = found(graph)
    assert calls(result.regions[0].nodes) == ["fusion_moe.nvfp4_grouped_mm.default"]
    assert "is on cpu; expected cuda:0" in left(result, "aten.mul.Tensor")


# -------------------------------------------------------------------------------------------- paths


def test_a_node_outside_between_two_members_keeps_one_of_them_out():
    """cumsum has no translator: y -> cumsum -> add, and y -> add"""

    def f(x):
        y = product(x, OFFS).relu()
        return y + y.cumsum(0)

    result = check(f, tokens(5))
    (region,) = result.regions
    assert "aten.relu.default" in calls(region.nodes)
    assert "aten.add.Tensor" not in calls(region.nodes)
    assert left(result, "aten.add.Tensor") == "fusing it would create a cycle"
    assert left(result, "aten.cumsum.default") == "it has no translator"


def test_two_fusions_never_wait_for_each_other():
    """a1 -> b1 and b2 -> a2, with {a1, a2} and {b1, b2} each without a hole: together they would be
    a circle
    """

    def f(x, u):
        a1, b2 = product(x, OFFS), product(u, OFFS)
        # cumsum has no translator
        a2, b1 = product(b2.cumsum(0), OFFS), product(a1.cumsum(0), OFFS)
        return a1 + a2, b1 + b2

    result = check(f, tokens(5), tokens(5, seed=3))
    products = [calls(r.nodes).count("fusion_moe.nvfp4_grouped_mm.default") for r in result.regions]
    assert sorted(products) == [1, 1, 2]


def test_what_would_only_write_more_is_left_outside():
    """The sum is read outside as it is; its square, and a wider copy of it, would be written beside
    it.
    """

    def f(x):
        y = product(x, OFFS) + x[:, :1]
        return y.cumsum(0), (y * y).cumsum(0), y.double().cumsum(0)

    result = check(f, tokens(5))
    (region,) = result.regions
    assert len(region.outputs) == 1
    assert "aten.add.Tensor" in calls(region.nodes)
    assert left(result, "aten.mul.Tensor") == (
        "left to the graph's compiler: fusing it would write more memory"
    )


# ----------------------------------------------------------------------------------------- refusals


def test_a_refused_neighbour_stays_and_says_why(lib):
    op = define(lib, "plus_one")

    @translator("fx_regions::plus_one")
    def plus_one(fd, x):
        raise Untranslatable(f"{x.type} is not what I take", expected="int32")

    result = check(lambda x: op(mlp(x)), tokens(5))
    (region,) = result.regions
    assert calls(region.nodes) == ["fusion_moe.expert_mlp.default"]
    (entry,) = [x for x in result.not_fused if x.op == "fx_regions.plus_one.default"]
    assert entry.why == "refused: f32[5, 32] is not what I take; expected int32"
    assert entry.source.startswith("test_fx_regions.py:")
    assert not entry.broken


def test_a_refused_product_is_told_though_no_region_is_near(lib):
    op = define(lib, "plus_one")
    translator("fx_regions::plus_one")(refuse)
    result = check(lambda x: op(x.cumsum(0)).cumsum(0), tokens(5))
    assert result.regions == []
    assert left(result, "fx_regions.plus_one.default") == "refused: never"


def refuse(fd, x):
    raise Untranslatable("never")


# -------------------------------------------------------------------------------------------- sizes


def test_a_size_that_nothing_shows_is_a_refusal():
    env = ShapeEnv()
    s, t = (
        env.create_symintnode(
            env.create_symbol(n, ConstantSource(f"n{n}"), DimDynamic.DYNAMIC), hint=n
        )
        for n in (5, 7)
    )
    with torch._subclasses.FakeTensorMode(shape_env=env):
        x, offs = torch.empty(s * t, H), torch.empty(G, dtype=torch.int32)
    graph = Graph()
    nodes = [graph.placeholder(name) for name in ("x", "codes", "scale", "decode", "offs")]
    for n, val in zip(nodes, (x, *SQUARE, offs), strict=True):
        n.meta["val"] = val
    y = graph.call_function(O.nvfp4_grouped_mm.default, tuple(nodes))
    y.meta["val"] = x
    graph.output(y)
    result = found(graph)
    assert result.regions == []
    assert "cannot be read from any value outside the fusion" in left(
        result, "fusion_moe.nvfp4_grouped_mm.default"
    )


def test_three_dimensional_tokens_of_symbolic_sizes():
    ids, w = routing(15)

    def f(x, ids, w):
        return x + O.expert_mlp(x, ids, w, *UP, *DOWN)

    result = check(f, tokens(5, 3), ids.reshape(5, 3, K), w.reshape(5, 3, K), dynamic=True)
    (region,) = result.regions
    assert any(
        isinstance(d, Rows) and "*" in str(d.total)
        for op in region.fusion.ops
        for v in op.outputs
        for d in v.type.shape
    )
    assert len(region.sizes) == 2


def _of_several_calls(f, *calls: tuple[Tensor, ...]) -> list[Found]:
    """What is found in the graphs of a function that is called with several sizes, which become
    symbols of their own for each input.
    """
    torch._dynamo.reset()
    results: list[Found] = []
    fusion_pass = FusionPass(options.current(), found=results.append)
    run = torch.compile(f, backend=lambda gm, fakes: compile_calls(fusion_pass, gm, fakes))
    for inputs in calls:
        gradients = []
        for g in (run, f):
            y = g(*inputs)
            wanted = [t for t in inputs if t.requires_grad]
            gradients.append(
                (y, *(torch.autograd.grad(y.square().sum(), wanted) if wanted else ()))
            )
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    return results


def _tokens_and_routing(
    lead: tuple[int, ...], slots: tuple[int, ...] = (), train: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x [*lead, H], ids and w [*slots, K]; slots: as lead, unless given"""
    ids, w = (t.reshape(*(slots or lead), K) for t in routing(math.prod(lead)))
    return tokens(*lead).requires_grad_(train), ids, w.requires_grad_(train)


SEQUENCES = ((2, 3), (4, 5))
OF_SEQUENCES = {
    "one shape": lambda x, ids, w: mlp(x, ids, w) + x,
    "flat tokens": lambda x, ids, w: mlp(x.flatten(0, 1), ids, w) + 1.0,
    "flat slots": lambda x, ids, w: mlp(x, ids.flatten(0, 1), w) + x,
    "parts of sequences": lambda x, ids, w: mlp(x[:, 1:], ids[:, 1:], w[:, :-1]) + 1.0,
}


@pytest.mark.parametrize("f", OF_SEQUENCES.values(), ids=OF_SEQUENCES)
def test_tokens_and_slots_whose_sizes_become_dynamic_separately(f):
    found = _of_several_calls(f, *map(_tokens_and_routing, SEQUENCES))
    assert [[calls(region.nodes)[-1] for region in graph.regions] for graph in found] == [
        ["aten.add.Tensor"]
    ] * 2


def test_router_scores_whose_sizes_become_dynamic_separately():
    def f(x, scores):
        w, ids = O.topk_router(scores.flatten(0, 1), K)
        return mlp(x, ids, w) + x

    found = _of_several_calls(f, *((tokens(*lead), torch.randn(*lead, G)) for lead in SEQUENCES))
    assert [len(region.nodes) for graph in found for region in graph.regions] == [5, 5]


def test_gradients_of_sizes_that_become_dynamic_separately():
    found = _of_several_calls(
        OF_SEQUENCES["one shape"], *(_tokens_and_routing(lead, train=True) for lead in SEQUENCES)
    )
    assert [len(graph.regions) for graph in found] == [1] * 4


@pytest.mark.parametrize("train", [False, True])
def test_sizes_whose_products_alone_are_equal_are_a_plain_refusal(train):
    shapes = (((2, 6), (3, 4)), ((4, 15), (5, 12)))
    f, calls_of = (
        OF_SEQUENCES["flat tokens"],
        (_tokens_and_routing(*both, train=train) for both in shapes),
    )
    first, *others = _of_several_calls(f, *calls_of)
    assert len(first.regions) == 1
    refused = [x for graph in others for x in graph.not_fused if x.op.startswith("fusion_moe")]
    assert refused
    for x in refused:
        assert x.why.startswith("refused: sizes s")
        assert "are not known to be equal; expected dimensions that the trace relates" in x.why
        assert not x.broken


def test_no_rows_have_kernels():
    """Compiled as a constant, no row is divided by no row."""

    def f(x):
        ends, row_of, slot_of = O.route(IDS[:0], G)
        y = product(x[row_of], ends).relu()
        return y, O.combine(y, slot_of, W[:0]), y.sum(1), y.unflatten(1, (2, -1)) * 2

    (region,) = check(f, tokens(0)).regions
    for segment in lower(region.fusion, TARGETS["cpu"], options.Options()).segments:
        assert segment.plan.backend == "cpu", segment.plan.why


def test_a_part_of_each_sequence_has_kernels():
    """The number of its rows, s0*s1 - s0, is no product."""
    (region,) = check(
        OF_SEQUENCES["parts of sequences"], *_tokens_and_routing((4, 5)), dynamic=True
    ).regions
    for segment in lower(region.fusion, TARGETS["cpu"], options.Options()).segments:
        assert segment.plan.backend == "cpu", segment.plan.why


# ---------------------------------------------------------------------------------- scatter, source


def test_sums_of_rows_in_any_order_are_left_outside():
    """index_add is index_put here; atomics would make it a kernel of its own, which Inductor has"""

    def f(x):
        ends, row_of, _ = O.route(IDS, G)
        y = product(x[row_of], ends)
        out = torch.zeros_like(x)
        out.index_add_(0, row_of, y)
        return out

    result = check(f, tokens(5))
    assert calls(result.regions[0].nodes)[-1] == "fusion_moe.nvfp4_grouped_mm.default"
    assert "index_put_accumulate reads more of the product's result than one tile" in left(
        result, "aten.index_put.default"
    )


# ------------------------------------------------------------------------------------------- effort


def test_three_thousand_nodes_with_48_layers_take_seconds():
    graph = Graph()
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(5, H)
        vals = [x, *(torch.empty(t.shape, dtype=t.dtype) for t in (IDS, W, *UP, *DOWN))]
    at, *others = [graph.placeholder(f"x{i}") for i in range(len(vals))]
    for n, val in zip((at, *others), vals, strict=True):
        n.meta["val"] = val

    def call(op, *args):
        n = graph.call_function(op, args)
        n.meta["val"] = x
        return n

    for _ in range(48):
        for _ in range(18):
            at = call(torch.ops.aten.add.Tensor, call(torch.ops.aten.relu.default, at), at)
        between = call(torch.ops.aten.cumsum.default, at, 0)  # what attention is here
        for _ in range(8):
            between = call(torch.ops.aten.mul.Tensor, between, between)
        at = call(torch.ops.aten.add.Tensor, at, call(O.expert_mlp.default, between, *others))
    graph.output(at)
    assert len(graph.nodes) > 2000
    start = time.process_time()
    result = found(graph)
    assert len(result.regions) == 48
    assert time.process_time() - start < 10


def test_what_is_stored_in_a_layout_is_read_by_torch_as_it_is_stored():
    """Its type says what it stands for; a view of the bytes is none of that, and no translator's
    fault.
    """

    def f(x, offs):
        scales = product(x, offs).to(torch.float8_e4m3fn)
        return O.grouped_swizzle_block_scale(scales, offs).view(-1)

    result = found(traced(f, tokens(5), OFFS))
    assert result.regions
    assert not [x for x in result.not_fused if x.broken]
    assert "expected the linear layout" in left(result, "aten.view.default")


# ------------------------------------------------------------------------------- bisect_limit


def test_the_bisect_limit_counts_regions_of_all_graphs(monkeypatch, caplog):
    monkeypatch.setattr(regions, "_counted", 0)
    with options.override(bisect_limit=2):
        found = [passed(traced(mlp, tokens(5))) for _ in range(3)]
        assert FusionPass(options.current()).uuid() is None
    assert [len(f.regions) for f in found] == [1, 1, 0]
    assert "the option bisect_limit leaves it" in {x.why for x in found[2].not_fused}
    (said,) = [r.getMessage() for r in caplog.records if "bisect_limit" in r.getMessage()]
    assert "bisect_limit = 2: the last region that is fused is\n" in said
    assert FusionPass(options.current()).uuid() is not None
