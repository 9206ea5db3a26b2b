"""The CUDA backend's kernels against `evaluate`, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from experts import experts, float_weights
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_tables import TABLE, use, use_variant, variants_of
from routings import Partition, Routing, partitions, routings

import fusion_moe
from fusion_moe import options
from fusion_moe.arch import H200
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.grouped_mm import Product
from fusion_moe.backends.cuda.table import ALWAYS, Regime
from fusion_moe.backends.cuda.variants import LargeM, SmallM, Variant
from fusion_moe.compile import compile_fusion
from fusion_moe.definitions.operations import (
    SPECS,
    bind,
    eager_types,
    fusion_of,
)
from fusion_moe.encodings import NVFP4, Quantized, dequantize, quantize
from fusion_moe.errors import BuildError, GroupsError
from fusion_moe.frontends.inductor import backend
from fusion_moe.layouts import W16X64
from fusion_moe.nn import swiglu
from fusion_moe.nn.frozen.experts import quantize_gate_up
from fusion_moe.options import Options

pytestmark = pytest.mark.gpu

ops = torch.ops.fusion_moe
LAYOUTS = ("linear", "w16x64")
E, K, H, I = 8, 3, 256, 192  # experts, slots of a token, hidden and intermediate features
few = settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_cuda(*tensors):
    return [t.cuda() for t in tensors]


def stored(weight: Quantized, layout: str) -> list[torch.Tensor]:
    """codes, block scales and decode scales on the GPU, in a layout."""
    codes, scales, decode = on_cuda(*weight)
    return (
        [codes, scales, decode]
        if layout == "linear"
        else [*W16X64.pack(codes, scales, encoding=NVFP4), decode]
    )


def close(found: torch.Tensor, want: torch.Tensor, most: float) -> None:
    assert found.isfinite().all()
    size = want.float().norm()
    assert (found.float() - want.float()).norm() <= most * size if size else found.eq(0).all()


def poison() -> None:
    """Makes the memory that is allocated next hold NaN."""
    torch.cuda.synchronize()
    held = [
        torch.full((n,), math.nan, device="cuda")
        for n in (2**8, 2**14, 2**18, 2**22)
        for _ in range(8)
    ]
    del held


def product(a, weight, ends, layout, **kwargs):
    poison()
    return ops.nvfp4_grouped_mm(a, *weight, ends, weight_layout=layout, **kwargs)


def random_weight(groups: int, n: int, k: int, runs: int = 0, exact: bool = False) -> Quantized:
    """All codes, all sizes of block scales; or those whose sums with small integers float32 holds
    exactly.
    """
    g = generator()
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    if exact:
        scales = (2.0 ** torch.randint(-1, 2, (groups, n, k // 16), generator=g)).to(
            torch.float8_e4m3fn
        )
        return Quantized(codes, scales, torch.full((groups,), 0.25), encoding=NVFP4)
    scales = torch.randint(0x01, 0x7F, (groups, n, k // 16), generator=g, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    return Quantized(
        codes,
        scales,
        torch.rand((groups, runs) if runs else (groups,), generator=g) + 0.5,
        encoding=NVFP4,
    )


def quantized(layout: str, count: int = E, hidden: int = H, inner: int = I):
    gate_up, down = (w * 0.4 for w in float_weights(count, hidden, inner))
    return [*stored(quantize_gate_up(gate_up), layout), *stored(quantize(down, NVFP4), layout)]


def tokens(ids: torch.Tensor, hidden: int = H):
    g = generator()
    return on_cuda(
        torch.randn(len(ids), hidden, generator=g).bfloat16(),
        ids,
        torch.rand(ids.shape, generator=g),
    )


def mlp(args, **kwargs):
    """What the kernels make, and what the reference does."""
    poison()
    found = ops.expert_mlp(*args, **kwargs)
    with options.override(target="reference"):
        return found, ops.expert_mlp(*args, **kwargs)


def program(name: str, args, kwargs):
    """The program of a call, all of it in kernels."""
    call = bind(SPECS[name], args, kwargs)
    made = compile_fusion(
        fusion_of(name, eager_types(call), call.others), TARGETS["cuda"], Options()
    )
    assert [k.why for k in made.kernels] == [""] * len(made.kernels)
    return made


# One product --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_under_every_scale(layout):
    """Row n has block scale n, block b has code b; a row of activations picks one block."""
    byte, code = (
        torch.arange(256 if layout == "linear" else 127, dtype=torch.uint8),
        torch.arange(16, dtype=torch.uint8),
    )
    n = 256 if layout == "linear" else 112
    codes = (code | code << 4).repeat_interleave(8).expand(1, n, 128).contiguous()
    x = torch.zeros(16, 256, dtype=torch.bfloat16)
    x[torch.arange(16), torch.arange(0, 256, 16) + torch.arange(16)] = 1
    for first in {0, len(byte) - n}:
        scales = (
            byte[first : first + n, None].expand(n, 16).contiguous()[None].view(torch.float8_e4m3fn)
        )
        weight = Quantized(codes, scales, torch.ones(1), encoding=NVFP4)
        want = dequantize(weight)[0, :, ::16].T.cuda()  # [code, scale]
        found = product(
            x.cuda(),
            stored(weight, layout),
            torch.tensor([16], dtype=torch.int32).cuda(),
            layout,
            out_dtype=torch.float32,
        )
        nan = (scales[0, :, 0].float().isnan() | (scales.view(torch.uint8)[0, :, 0] == 0)).cuda()
        assert torch.equal(found[:, ~nan], want[:, ~nan])
        assert found[:, scales[0, :, 0].float().isnan().cuda()].isnan().all()
        assert found[:, scales.view(torch.uint8)[0, :, 0].cuda() == 0].abs().le(6 * 2.0**-23).all()


@pytest.mark.parametrize("k", [64, 192, 1024, 2880])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_position(layout, k):
    """One row of activations for each k: what comes out is the weight. In groups of one row, of a
    few, of many.
    """
    for size in (1, 5, 40, k):
        count = -(-k // size)
        one = random_weight(1, 80, k).with_(decode_scale=torch.ones(1))
        codes, scales = (t.view(torch.uint8).repeat(count, 1, 1) for t in one[:2])
        weight = Quantized(
            codes, scales.view(torch.float8_e4m3fn), torch.ones(count), encoding=NVFP4
        )
        ends = (torch.arange(1, count + 1) * size).clamp(max=k).int().cuda()
        found = product(
            torch.eye(k).bfloat16().cuda(),
            stored(weight, layout),
            ends,
            layout,
            out_dtype=torch.float32,
        )
        assert torch.equal(found, dequantize(one)[0].T.cuda())


@few
@given(partitions(), st.sampled_from(LAYOUTS), st.sampled_from(((64, 16), (128, 48), (320, 144))))
@example(Partition((300, 0, 1), 5), "w16x64", (320, 144))
@example(Partition((0, 0), 7), "w16x64", (64, 16))
def test_any_groups_exactly(partition: Partition, layout, sizes):
    k, n = sizes
    x = torch.randint(-3, 4, (partition.rows, k), generator=generator()).bfloat16()
    x[int(partition.ends[-1]) :] = torch.nan  # rows of no group are not read
    weight = random_weight(len(partition.sizes), n, k, exact=True)
    want = torch.zeros(partition.rows, n)
    for group, rows in partition.runs:
        want[rows] = x[rows].float() @ dequantize(weight)[group].T
    found = product(
        x.cuda(), stored(weight, layout), partition.ends.cuda(), layout, out_dtype=torch.float32
    )
    assert torch.equal(found.cpu(), want)


RAGGED = [
    Partition((300, 0, 1, 160, 161, 7, 0), 5),
    Partition((64, 65, 128, 16, 8, 9, 112), 1),
    Partition((0, 0, 0, 1100, 0, 0, 0), 0),
    Partition((1,) * 7, 0),
    Partition((0,) * 7, 33),
    *(
        Partition(tuple(torch.randint(0, 400, (7,), generator=generator(i)).tolist()), i)
        for i in range(6)
    ),
]


def ways_of(table: str) -> list[tuple[str, Variant, bool]]:
    """The kernels; where they can, with activations in fragment order too."""
    return [
        (table, v, order)
        for v in variants_of(table)
        for order in (False, True)[: 1 + v.reads_fragment_order]
    ]


@pytest.mark.parametrize(
    ("table", "variant", "in_fragment_order"), [*ways_of("linear"), *ways_of("tiled")], ids=str
)
@pytest.mark.parametrize(("k", "n"), [(64, 16), (320, 144), (320, 2064), (1024, 2064), (384, 1024)])
def test_every_variant_exactly(table, variant, in_fragment_order, k, n, monkeypatch):
    layout = {"linear": "linear", "tiled": "w16x64"}[table]
    monkeypatch.setattr(
        Product,
        "needs_reordering",
        lambda self, variant: in_fragment_order and variant.reads_fragment_order,
    )
    use_variant(monkeypatch, table, variant)
    weight = random_weight(7, n, k, exact=True)
    packed, matrices = stored(weight, layout), dequantize(weight).cuda()
    for partition in RAGGED:
        x = torch.randint(-3, 4, (partition.rows, k), generator=generator()).bfloat16().cuda()
        x[int(partition.ends[-1]) :] = torch.nan  # rows of no group are not read
        want = torch.zeros(partition.rows, n, device="cuda")
        for group, rows in partition.runs:
            want[rows] = x[rows].float() @ matrices[group].T
        args, kwargs = (
            (x, *packed, partition.ends.cuda()),
            {"weight_layout": layout, "out_dtype": torch.float32},
        )
        poison()
        found = program("nvfp4_grouped_mm", args, kwargs)(list(args))[0]
        assert torch.equal(found, want)
        poison()
        assert torch.equal(program("nvfp4_grouped_mm", args, kwargs)(list(args))[0], found)


@pytest.mark.parametrize(("n", "k"), [(512, 2048), (2048, 4096), (1040, 1536)])
def test_one_group_exactly(n, k):
    """By the kernels that the model chooses: small M, clusters that share K, large M. In a graph,
    each call after the one before.
    """
    weight = random_weight(1, n, k, exact=True)
    packed, matrix = stored(weight, "w16x64"), dequantize(weight)[0].cuda()
    for rows in (1, 9, 40, 100, 140, 300, 700):
        x = torch.randint(-3, 4, (rows, k), generator=generator()).bfloat16().cuda()
        ends = torch.tensor([rows], dtype=torch.int32).cuda()
        want = x.float() @ matrix.T
        assert torch.equal(product(x, packed, ends, "w16x64", out_dtype=torch.float32), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [
                ops.nvfp4_grouped_mm(
                    x, *packed, ends, weight_layout="w16x64", out_dtype=torch.float32
                )
                for _ in range(10)
            ]
        for result in found:
            result.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(result, want) for result in found)


# The kernels of groups by their sizes.
UNEVEN = {
    "two": ((32, (LargeM(32, 5),)), (None, (LargeM(80, 4),))),
    "three": ((32, (LargeM(32, 5),)), (112, (LargeM(80, 4),)), (None, (LargeM(160, 3),))),
    "few heavy ones": ((160, (LargeM(160, 3),)), (None, (LargeM(32, 5),))),
    "those of a decode": ((12, (SmallM(1, 1, 2, 1, 3, 8),)), (None, (LargeM(80, 4),))),
    "those of a decode by tall tiles": (
        (40, (SmallM(2, 2, 1, 2, 2, 4),)),
        (None, (LargeM(160, 3),)),
    ),
}


@pytest.fixture(params=UNEVEN)
def uneven(request, monkeypatch):
    """Products are made by several kernels."""
    several = Regime(ALWAYS, UNEVEN[request.param][0][1], UNEVEN[request.param])
    use(monkeypatch, tiled=(several, TABLE.tiled[-1]))
    return UNEVEN[request.param]


@pytest.mark.parametrize(("k", "n"), [(64, 16), (320, 144), (1024, 2064)])
def test_groups_of_uneven_sizes_exactly(uneven, k, n):
    weight = random_weight(7, n, k, exact=True)
    packed, matrices = stored(weight, "w16x64"), dequantize(weight).cuda()
    one_group = (Partition((0,) * i + (900,) + (0,) * (6 - i), 70) for i in (0, 6))
    for partition in (*RAGGED, *one_group, Partition((32, 33, 80, 112, 113, 8, 9), 300)):
        x = torch.randint(-3, 4, (partition.rows, k), generator=generator()).bfloat16().cuda()
        x[int(partition.ends[-1]) :] = torch.nan  # rows of no group are not read
        want = torch.zeros(partition.rows, n, device="cuda")
        for group, rows in partition.runs:
            want[rows] = x[rows].float() @ matrices[group].T
        args, kwargs = (
            (x, *packed, partition.ends.cuda()),
            {"weight_layout": "w16x64", "out_dtype": torch.float32},
        )
        made = program("nvfp4_grouped_mm", args, kwargs)
        source = made.kernels[0].launch.source
        assert len(
            source.choose(dict.fromkeys(source.fusion.symbols, 10**4), H200).size_classes
        ) == len(uneven)
        for _ in range(3):
            poison()
            assert torch.equal(made(list(args))[0], want)


def test_bad_ends_of_uneven_groups(uneven):
    a, weight = torch.randn(300, 128).bfloat16().cuda(), stored(random_weight(4, 32, 128), "w16x64")
    for ends, bad in (
        ([90, 30, 40, 400], 1),
        ([-5, 30, 30, 30], 0),
        ([2**31 - 1] * 4, 0),
        ([3, 43, 83, 301], 3),
    ):
        args, kwargs = (
            (a, *weight, torch.tensor(ends, dtype=torch.int32).cuda()),
            {"weight_layout": "w16x64"},
        )
        poison()
        found = program("nvfp4_grouped_mm", args, kwargs)(list(args))[0]
        with pytest.raises(GroupsError, match=rf"offs\[{bad}\] = {ends[bad]}, in an earlier call"):
            fusion_moe.synchronize()
        assert found.isfinite().all()


@pytest.mark.parametrize("scale_on", ["output", "input"])
def test_a_graph_of_a_layer_of_uneven_groups(uneven, scale_on):
    """It replays with any routing; equal calls give equal bits."""
    x, ids, w = tokens(torch.zeros(400, K, dtype=torch.long))
    args, kwargs = (
        [x, ids, w, *quantized("w16x64", E, H, 256)],
        {"weight_layout": "w16x64", "scale_on": scale_on},
    )
    made = program("expert_mlp", args, kwargs)
    given = list(bind(SPECS["expert_mlp"], args, kwargs).tensors.values())
    made(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [made(given)[0] for _ in range(10)]
    # of tokens that choose evenly, the others one group
    for seed, share in enumerate((1.0, 0.3, 0.1, 0.0)):
        ids.copy_(
            torch.randint(0, E, ids.shape, generator=generator(seed))
            * (torch.rand(ids.shape, generator=generator(seed)) < share)
        )
        for result in found:
            result.fill_(math.nan)
        graph.replay()
        with options.override(target="reference"):
            close(found[0], ops.expert_mlp(*args, **kwargs), 8e-3)
        assert all(torch.equal(result, found[0]) for result in found)


@pytest.mark.parametrize(("k", "n"), [(16, 8), (48, 33), (80, 40), (272, 70)])
def test_sizes_off_the_tile_run_in_the_linear_layout(k, n):
    ends = torch.tensor([1, 1, 12, 19], dtype=torch.int32)
    x, weight = torch.randn(20, k, generator=generator()).bfloat16(), random_weight(4, n, k)
    found = product(
        x.cuda(), stored(weight, "linear"), ends.cuda(), "linear", out_dtype=torch.float32
    )
    want = torch.cat(
        [
            x[a:b].float() @ dequantize(weight)[g].T
            for g, (a, b) in enumerate(((0, 1), (1, 1), (1, 12), (12, 19)))
        ]
    )
    close(found[:19], want.cuda(), 3e-3)
    assert found[19:].eq(0).all()


@pytest.mark.parametrize("rows", [20, 400])
@pytest.mark.parametrize(("n", "runs"), [(96, 3), (144, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_scales_of_runs_of_rows(layout, n, runs, rows):
    """Runs of whole tiles, and others; by small-M and large-M kernels."""
    x, weight = (
        torch.randn(rows, 128, generator=generator()).bfloat16(),
        random_weight(2, n, 128, runs=runs),
    )
    found = product(
        x.cuda(), stored(weight, layout), torch.tensor([7, rows], dtype=torch.int32).cuda(), layout
    )
    want = torch.cat(
        [x[:7].float() @ dequantize(weight)[0].T, x[7:].float() @ dequantize(weight)[1].T]
    )
    close(found, want.cuda(), 3e-3)


def test_the_layout_on_the_gpu_is_that_of_the_cpu():
    codes, scales, _ = random_weight(3, 48, 192)
    for a, b in zip(
        W16X64.pack(codes, scales, encoding=NVFP4),
        W16X64.pack(*on_cuda(codes, scales), encoding=NVFP4),
        strict=True,
    ):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


# A whole layer ------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "interleaved by 1": {"activation": swiglu(interleave=1, limit=1.0, alpha=1.702, up_offset=1.0)},
    "interleaved by 8": {"activation": swiglu(interleave=8)},
    "interleaved by 32": {"activation": swiglu(interleave=32)},
    "bias": {"gate_up_bias": torch.randn(E, 2 * I), "down_bias": torch.randn(E, H)},
    "scale on the input": {"scale_on": "input"},
    "local experts": {"first_expert": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_whole_layer(name, layout):
    kwargs = {
        k: v.bfloat16().cuda() if isinstance(v, torch.Tensor) else v
        for k, v in VARIANTS[name].items()
    } | {"weight_layout": layout}
    for count in (1, 10, 21, 37, 500):
        args = [*tokens(torch.randint(0, E, (count, K), generator=generator())), *quantized(layout)]
        program("expert_mlp", args, kwargs)
        close(*mlp(args, **kwargs), 8e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_ids_of_no_expert(name, layout, share):
    """-1 for single slots and for whole tokens, in calls of few rows, whose product finds its tiles
    in ids, and of more.
    """
    kwargs = {
        k: v.bfloat16().cuda() if isinstance(v, torch.Tensor) else v
        for k, v in VARIANTS[name].items()
    } | {"weight_layout": layout}
    for count in (1, 4, 10, 21, 37, 500):
        ids = torch.randint(0, E, (count, K), generator=generator())
        ids[torch.rand(ids.shape, generator=generator(1)) < share] = -1
        ids[-1] = -1
        x, ids, w = tokens(ids)
        x[-1] = math.nan  # padding
        found, want = mlp([x, ids, w, *quantized(layout)], **kwargs)
        fusion_moe.synchronize()  # -1 is no fault
        close(found, want, 8e-3)
        assert not found[(ids == -1).all(1)].any()
        if "first_expert" not in kwargs:
            assert torch.equal(
                found, ops.expert_mlp(x, ids, w, *quantized(layout), first_expert=0, **kwargs)
            )


@pytest.mark.parametrize("inner", [384, 512])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": swiglu(interleave=1, limit=1.0)},
        {"activation": swiglu(interleave=64)},
        {"bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "variant",
    [v for v in variants_of("tiled") if v.reads_fragment_order and v.repeats > 1],
    ids=str,
)
def test_a_layer_of_two_repeats(variant, changes, inner, monkeypatch):
    """Gate and up are in one repeat, or meet in a thread; N tiles are whole, or not."""
    hidden = 512
    bias = {
        "gate_up_bias": torch.randn(E, 2 * inner).bfloat16().cuda(),
        "down_bias": torch.randn(E, hidden).bfloat16().cuda(),
    }
    kwargs = {**(bias if changes == {"bias": True} else changes), "weight_layout": "w16x64"}
    use(monkeypatch, tiled=(Regime(ALWAYS, (variant,)), *TABLE.tiled))
    for count in (1, 37, 500):
        args = [
            *tokens(torch.randint(0, E, (count, K), generator=generator()), hidden),
            *quantized("w16x64", E, hidden, inner),
        ]
        given = list(bind(SPECS["expert_mlp"], args, kwargs).tensors.values())
        made = program("expert_mlp", args, kwargs)
        poison()
        found = made(given)[0]
        with options.override(target="reference"):
            close(found, ops.expert_mlp(*args, **kwargs), 8e-3)


@few
@given(routings(), st.sampled_from(LAYOUTS))
def test_any_routing(routing: Routing, layout):
    args = [*tokens(routing.ids), *quantized(layout, routing.groups)]
    close(*mlp(args, weight_layout=layout), 8e-3)


@pytest.mark.parametrize("groups", [1, 8, 37, 256, 300])
@pytest.mark.parametrize(
    ("count", "slots"),
    [(1, 2), (16, 2), (11, 3), (48, 1), (9, 7), (8, 8), (65, 1), (500, 2), (1500, 2), (3000, 2)],
)
def test_ids_are_routed_by_blocks_of_one_warp_and_of_several(count, slots, groups):
    ids = torch.randint(0, groups, (count, slots), generator=generator())
    some = torch.where(torch.rand(ids.shape, generator=generator()) < 0.3, -1, ids)
    for these in (
        ids,
        torch.full_like(ids, groups - 1),
        ids.clamp(groups // 3, groups // 2),
        some,
        torch.full_like(ids, -1),
    ):
        poison()
        found = ops.route(these.cuda(), groups)
        with options.override(target="reference"):
            want = ops.route(these.cuda(), groups)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_small_operations():
    """The same arithmetic as the reference, bit for bit."""
    g = generator()
    x, scale = on_cuda(torch.randn(50, 2 * I, generator=g).bfloat16(), torch.rand(50, generator=g))
    y, bias = on_cuda(
        torch.randn(50, H, generator=g).bfloat16(), torch.randn(E, H, generator=g).bfloat16()
    )
    slot_of, w = on_cuda(
        torch.randperm(50, generator=g).view(10, 5).int(), torch.rand(10, 5, generator=g)
    )
    ends = torch.tensor([3, 3, 9, 9, 20, 31, 31, 48], dtype=torch.int32).cuda()
    calls = {"combine": (y, slot_of, w), "group_add": (y, bias, ends)}
    for name, args in calls.items():
        program(name, args, {})
        poison()
        found = getattr(ops, name)(*args)
        with options.override(target="reference"):
            assert torch.equal(found, getattr(ops, name)(*args))
    found = ops.scaled_swiglu(x, scale, 8)
    with options.override(target="reference"):
        close(found, ops.scaled_swiglu(x, scale, 8), 1e-3)


def test_twenty_runs_are_equal():
    args = [*tokens(torch.randint(0, E, (300, K), generator=generator())), *quantized("w16x64")]
    first = ops.expert_mlp(*args, weight_layout="w16x64")
    for _ in range(20):
        poison()
        assert torch.equal(ops.expert_mlp(*args, weight_layout="w16x64"), first)


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "bad"),
    [([9, 3, 4, 40], 1), ([-5, 3, 3, 3], 0), ([2**31 - 1] * 4, 0), ([3, 3, 3, 21], 3)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_ends_are_made_safe_and_reported(ends, bad, layout):
    a, weight = torch.randn(20, 128).bfloat16().cuda(), stored(random_weight(4, 32, 128), layout)
    found = product(a, weight, torch.tensor(ends, dtype=torch.int32).cuda(), layout)
    with pytest.raises(GroupsError, match=rf"offs\[{bad}\] = {ends[bad]}, in an earlier call"):
        fusion_moe.synchronize()
    assert found.isfinite().all()
    fusion_moe.synchronize()  # said once


@pytest.mark.parametrize("count", [6, 10, 11, 21, 22])  # 18, 30, 33, 63, 66 ids
@pytest.mark.parametrize("bad", [E, -2])
def test_bad_ids_are_left_out_and_reported(count, bad):
    ids = torch.randint(0, E, (count, K), generator=generator())
    ids[-1, 1] = bad
    args = [*tokens(ids), *quantized("w16x64")]
    found = ops.expert_mlp(*args, weight_layout="w16x64")
    torch.cuda.synchronize()
    place = count * K - K + 1
    with pytest.raises(
        GroupsError,
        match=rf"ids.flatten\(\)\[{place}\] = {bad} is out of range, "
        r"in an earlier call",
    ):
        ops.expert_mlp(*args, weight_layout="w16x64")
    args[1][-1, 1] = -1
    assert torch.equal(ops.expert_mlp(*args, weight_layout="w16x64"), found)


# CUDA graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_replays_with_any_routing(layout):
    x, ids, w = tokens(torch.randint(0, E, (33, K), generator=generator()))
    weights = quantized(layout)
    ops.expert_mlp(x, ids, w, *weights, weight_layout=layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.expert_mlp(x, ids, w, *weights, weight_layout=layout)
    for seed, used in enumerate((E, 1, 2, E)):
        ids.copy_(torch.randint(0, used, ids.shape, generator=generator(seed)))
        ids[:seed] = -1
        found.fill_(math.nan)
        graph.replay()
        with options.override(target="reference"):
            close(found, ops.expert_mlp(x, ids, w, *weights, weight_layout=layout), 8e-3)


@pytest.mark.parametrize("before", ["kernel", "copy", "other stream"])
def test_a_call_waits_for_what_is_before_it(before):
    """Its first kernel is launched before that has ended."""
    x, ids, w = tokens(torch.randint(0, E, (21, K), generator=generator()))
    weights, given, other = quantized("w16x64"), (x.clone(), ids.clone()), torch.cuda.Stream()

    def made():
        current = torch.cuda.current_stream()
        stream = other if before == "other stream" else current
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**5)
            for array, value in zip((x, ids), given, strict=True):
                array.copy_(value) if before == "copy" else torch.add(value, 0, out=array)
        current.wait_stream(stream)
        return ops.expert_mlp(x, ids, w, *weights, weight_layout="w16x64")

    made()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made()
    for seed in range(3):
        given[0].neg_()
        given[1].copy_(torch.randint(0, E, ids.shape, generator=generator(seed)))
        for result in (graph.replay() or found, made()):
            with options.override(target="reference"):
                close(result, ops.expert_mlp(*given, w, *weights, weight_layout="w16x64"), 8e-3)


@pytest.mark.parametrize("count", [1, 33])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_with_cuda_graphs(mode, count):
    """No part of the graph is left out of CUDA graphs, and they replay with other routings."""
    from torch._dynamo.utils import counters

    layer = experts(E, H, I).cuda()
    fusion_moe.prepare_(layer)
    assert layer.weight_layout == "w16x64"
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, backend=backend, mode=mode, fullgraph=True)
    with torch.inference_mode():
        for seed, used in enumerate((E, E, E, 1, 2)):
            x, ids, w = tokens(torch.randint(0, used, (count, K), generator=generator(seed)))
            with options.override(target="reference"):
                want = layer(x, ids, w)
            close(compiled(x, ids, w).clone(), want, 8e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_nothing_is_compiled_during_a_capture():
    args = [*tokens(torch.zeros(7, 1, dtype=torch.long)), *quantized("w16x64", 3)]
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(BuildError, match="not compiled yet, and a CUDA graph is being captured"),
        torch.cuda.graph(graph),
    ):
        ops.expert_mlp(*args, weight_layout="w16x64")
    torch.cuda.synchronize()


def test_the_reference_is_said_to_be_used():
    args = [*tokens(torch.zeros(7, 1, dtype=torch.long)), *quantized("linear")]
    args[0] = args[0].float()
    made = bind(SPECS["expert_mlp"], args, {})
    program = compile_fusion(
        fusion_of("expert_mlp", eager_types(made), made.others), TARGETS["cuda"], Options()
    )
    products = [k for k in program.kernels if k.backend == "reference"]
    assert [k.segment.fusion.ops[-1].kind.name for k in products] == ["grouped_mm"] * 2
    assert all("activations in f32" in k.why for k in products)
