"""The CUDA backend's kernels on a GPU: products with weights of every encoding, exactly; then
layers, bad input and CUDA graphs, against the reference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from experts import experts, float_weights
from fusions import fusion_of_call
from kernel_tables import EIGHT_BITS, MMA, PAIRS, TABLE, use, use_variant, variants_of
from own_encodings import registered
from routings import Partition
from test_cuda_readers import EXACT, positive_scales

import fusion_moe
from fusion_moe import FusionDefinition, layouts, options
from fusion_moe.arch import H200
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.grouped_mm import ByVariants
from fusion_moe.backends.cuda.table import ALWAYS, Regime
from fusion_moe.backends.cuda.variants import LargeM, SmallM, Variant
from fusion_moe.compile import compile_fusion
from fusion_moe.definitions.operations import (
    SPECS,
    bind,
)
from fusion_moe.encodings import ENCODINGS, NVFP4, Encoding, Quantized, dequantize, quantize
from fusion_moe.errors import FusionError, GroupsError
from fusion_moe.frontends.inductor import backend
from fusion_moe.layouts.groups import ceil_to
from fusion_moe.nn import swiglu
from fusion_moe.nn.frozen.experts import quantize_gate_up
from fusion_moe.options import Options
from fusion_moe.runtime.program import Program

pytestmark = pytest.mark.gpu
registered = pytest.fixture(scope="module", autouse=True)(registered)

ops = torch.ops.fusion_moe
LAYOUTS = ("linear", "sf128x4", "w16x64")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
DERIVED = [  # read by their descriptors: zero points, levels of scales, a table
    ("uint4_128", "bf16"),
    ("uint4_128_f16", "bf16"),
    ("uint4_128_f16", "f16"),
    ("uint4_channel", "bf16"),
    ("uint4_32_f16", "f16"),
    ("int4_64", "bf16"),
    ("int8_channel", "bf16"),
    ("int8_128_f16", "f16"),
    ("levels", "bf16"),
    *EIGHT_BITS,
]
# of a layer: those of its results, and of what is between its products
ROUNDINGS = {"bf16": 8e-3, "f16": 1.5e-3}
E, K, H, I = 8, 3, 256, 192  # experts, slots of a token, hidden and intermediate features


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_cuda(*tensors):
    return [t.cuda() for t in tensors]


def stored(weight: Quantized, layout: str) -> list[torch.Tensor]:
    """The parts on the GPU, in a layout."""
    return list(layouts.LAYOUTS[layout].pack(*on_cuda(*weight), encoding=weight.encoding))


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


def program(name: str, args: Any, kwargs: dict[str, Any]) -> Program:
    """The program of a call, all of it in kernels."""
    made = compile_fusion(fusion_of_call(name, *args, **kwargs), TARGETS["cuda"], Options())
    assert [k.why for k in made.kernels] == [""] * len(made.kernels)
    return made


def by_kernels(name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The first result of a call, by kernels alone."""
    made = program(name, args, kwargs)
    poison()
    return made(list(bind(SPECS[name], args, kwargs).tensors.values()))[0]


def product(a: torch.Tensor, weight: Quantized, ends: torch.Tensor, layout: str) -> torch.Tensor:
    """In float32."""
    kwargs = {
        "weight_format": weight.encoding.name,
        "weight_layout": layout,
        "out_dtype": torch.float32,
    }
    return by_kernels("grouped_mm", (a, stored(weight, layout), ends), kwargs)


def exact_weight(encoding: Encoding, *shape: int) -> Quantized:
    """Elements whose sums with small integers float32 holds exactly: all codes, or small integers;
    scales are powers of two.
    """
    *groups, n, k = shape
    g, parts = generator(), []
    for part in encoding.parts:
        size = encoding.part_shape(part, groups, n, k)
        if part.scale is None and (encoding.plain or encoding.element.dtype != torch.uint8):
            parts.append(torch.randint(-3, 4, size, generator=g).to(part.dtype))
        elif part.scale is None:
            parts.append(torch.randint(0, 256, size, generator=g, dtype=torch.uint8))
        else:
            parts.append((2.0 ** torch.randint(-1, 2, size, generator=g)).to(part.dtype))
    return Quantized(*parts, encoding=encoding)


def check_exactly(weight: Quantized, activations: str, layout: str, partition: Partition) -> None:
    """The product with small integers is exact, twice, and rows of no group are not read."""
    _, n, k = weight.shape
    x = torch.randint(-3, 4, (partition.rows, k), generator=generator()).to(DTYPES[activations])
    x[int(partition.ends[-1]) :] = torch.nan
    x, matrices = x.cuda(), dequantize(weight).cuda()
    want = torch.zeros(partition.rows, n, device="cuda")
    for group, rows in partition.runs:
        want[rows] = x[rows].float() @ matrices[group].T
    for _ in range(2):
        assert torch.equal(product(x, weight, partition.ends.cuda(), layout), want)


def quantized(layout: str, count: int = E, hidden: int = H, inner: int = I):
    """Weights of expert_mlp."""
    gate_up, down = (w * 0.4 for w in float_weights(count, hidden, inner))
    return [*stored(quantize_gate_up(gate_up), layout), *stored(quantize(down, NVFP4), layout)]


def tokens(ids: torch.Tensor, hidden: int = H):
    g = generator()
    return on_cuda(
        torch.randn(len(ids), hidden, generator=g).bfloat16(),
        ids,
        torch.rand(ids.shape, generator=g),
    )


def by_reference(operation: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with options.override(target="reference"):
        return operation(*args, **kwargs)


# One product --------------------------------------------------------------------------------------


def every_code(
    scales: torch.Tensor, encoding: Encoding, activations: str, layout: str, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, scales]: found and wanted. Row n of the matrix has scale n, block b of columns code b;
    a row of activations picks a code.
    """
    block, n = encoding.block, len(scales)
    code = torch.arange(16, dtype=torch.uint8)
    codes = (code | code << 4).repeat_interleave(block // 2).expand(1, n, 8 * block).contiguous()
    ones = [torch.ones(1)] * (len(encoding.scales) - 1)
    weight = Quantized(
        codes, scales[None, :, None].expand(1, n, 16).contiguous(), *ones, encoding=encoding
    )
    row = torch.arange(rows)
    x = torch.zeros(rows, 16 * block, dtype=DTYPES[activations])
    x[row, row % 16 * block + row % (block - 1)] = 1
    found = product(x.cuda(), weight, torch.tensor([rows], dtype=torch.int32).cuda(), layout)
    return found.cpu(), dequantize(weight)[0, :, ::block].T[row % 16]


@pytest.mark.parametrize("rows", [16, 400])  # small-M and large-M kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("fmt", "activations"), PAIRS[:6])
def test_every_code_under_every_scale(fmt, activations, layout, rows):
    """Those with which weights are exact, once they are rounded to the type of the activations."""
    scales, (first, last) = positive_scales(ENCODINGS[fmt]), EXACT[fmt][activations]
    size = scales.float().abs()
    scales = scales[(size >= first) & (size <= last) & (size > 0)]
    for some in scales[: len(scales) // 16 * 16].split(4096):
        found, want = every_code(some, ENCODINGS[fmt], activations, layout, rows)
        assert torch.equal(found, want.to(DTYPES[activations]).float())


@pytest.mark.parametrize("rows", [16, 400])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activations", DTYPES)
@pytest.mark.parametrize("fmt", ["fp8", "fp8_e8m0", "fp8_channel", "fp8_tensor"])
def test_every_code_of_fp8(fmt, activations, layout, rows):
    """Column k of every row has code k; a row of activations picks a column. NaN stays in its
    column of the result.
    """
    encoding, n, k = ENCODINGS[fmt], 64, 256
    parts = [torch.arange(k, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(1, n, k).clone()]
    for part in encoding.parts[1:]:
        scale = torch.rand(encoding.part_shape(part, (1,), n, k), generator=generator()) / 64 + 0.01
        parts.append(scale.to(part.dtype))
    weight = Quantized(*parts, encoding=encoding)
    bits = weight.codes.view(torch.uint8)
    bits[bits % 128 == 127] = 0
    x, row = torch.zeros(rows, k, dtype=DTYPES[activations]), torch.arange(rows)
    x[row, row * 37 % k] = 1
    ends = torch.tensor([rows], dtype=torch.int32).cuda()
    want = dequantize(
        weight.with_(**{p.name: torch.ones_like(t) for p, t in weight.named() if p.of_matrix})
    )
    want = want.to(DTYPES[activations]).float()
    if fmt == "fp8_tensor":
        want *= weight.decode_scale
    found = product(x.cuda(), weight, ends, layout).cpu()
    assert torch.equal(found, want[0][:, row * 37 % k].T)
    bits[0, 5, 100], bits[0, 9, 200] = 0x7F, 0xFF
    nan = product(x.cuda(), weight, ends, layout).cpu().isnan()
    assert nan[:, [5, 9]].all()
    assert nan.sum() == 2 * rows


@pytest.mark.parametrize("rows", [16, 400])
@pytest.mark.parametrize("activations", DTYPES)
def test_scales_of_mxfp4_that_are_out_of_range(activations, rows):
    """In tiles larger ones count as the last, smaller ones are as good as zero, and NaN is NaN."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found, want = every_code(scales, ENCODINGS["mxfp4"], activations, "w16x64", rows)
    first, last = (127 + int(math.log2(scale)) for scale in EXACT["mxfp4"][activations])
    assert torch.equal(found[:, last + 1 : 255], want[:, last : last + 1].expand(-1, 254 - last))
    assert (found[:, :first] - want[:, :first]).abs().max() <= 6 * 2.0 ** (first - 1 - 127)
    assert found[:, 255].isnan().all()


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
    without_wgmma = [v for v in MMA if not v.row_order] if table.endswith("tiled") else []
    return [
        (table, v, order)
        for v in (*variants_of(table), *without_wgmma)
        for order in (False, True)[: 1 + v.reads_fragment_order]
    ]


def ways() -> list[Any]:
    """Encoding, activations, table, kernel, and whether a kernel before it puts rows in order. f16
    differs from bf16 in instructions.
    """
    found = []
    for fmt, activations in [*PAIRS, *DERIVED]:
        wide = "wide_" if fmt in DTYPES or fmt.startswith("fp8") else ""
        for table in (f"{wide}linear", f"{wide}tiled"):
            of_table = ways_of(table)
            if fmt == "f16":
                large = [way for way in of_table if way[1].header == "large_m.cuh"]
                of_table = [of_table[0], *large[:2]]
            found += [(fmt, activations, *way) for way in of_table]
    return [pytest.param(*way, marks=pytest.mark.needs(*way[3].needs)) for way in found]


@pytest.mark.parametrize(
    ("fmt", "activations", "table", "variant", "in_fragment_order"), ways(), ids=str
)
def test_every_variant_exactly(fmt, activations, table, variant, in_fragment_order, monkeypatch):
    monkeypatch.setattr(
        ByVariants,
        "needs_reordering",
        lambda self, variant: in_fragment_order and variant.reads_fragment_order,
    )
    use_variant(monkeypatch, table, variant)
    layout = "w16x64" if table.endswith("tiled") else "linear"
    shapes, all_of_it = [(320, 144), (384, 1024)], (fmt, activations) == PAIRS[0]
    for k, n in [*shapes, *([(64, 16), (320, 2064), (1024, 2064)] if all_of_it else [])]:
        weight = exact_weight(ENCODINGS[fmt], 7, n, ceil_to(k, ENCODINGS[fmt].block))
        for partition in RAGGED if all_of_it else RAGGED[:6]:
            check_exactly(weight, activations, layout, partition)


@pytest.mark.parametrize(
    ("fmt", "activations"), [*PAIRS, *DERIVED, ("twos", "bf16"), ("two_bits", "f16")]
)
@pytest.mark.parametrize(("k", "n"), [(16, 8), (96, 33), (288, 70)])
def test_sizes_off_the_tile_run_in_the_linear_layout(fmt, activations, k, n):
    weight = exact_weight(ENCODINGS[fmt], 4, n, ceil_to(k, ENCODINGS[fmt].block))
    check_exactly(weight, activations, "linear", Partition((1, 0, 11, 7), 1))


@pytest.mark.parametrize("rows", [20, 400])
@pytest.mark.parametrize(("n", "runs"), [(96, 3), (144, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_scales_of_runs_of_rows(layout, n, runs, rows):
    """Runs of whole tiles, and others; by small-M and large-M kernels."""
    decode = 2.0 ** torch.randint(-1, 2, (2, runs), generator=generator())
    weight = exact_weight(NVFP4, 2, n, 128).with_(decode_scale=decode)
    check_exactly(weight, "bf16", layout, Partition((7, rows - 7), 0))


@pytest.mark.parametrize(("n", "k"), [(512, 2048), (2048, 4096), (1040, 1536)])
def test_one_group_exactly(n, k):
    """By the kernels that the model chooses: small M, clusters that share K, large M. In a graph,
    each call after the one before.
    """
    weight = exact_weight(NVFP4, 1, n, k)
    packed, matrix = stored(weight, "w16x64"), dequantize(weight)[0].cuda()
    for rows in (1, 9, 40, 100, 140, 300, 700):
        x = torch.randint(-3, 4, (rows, k), generator=generator()).bfloat16().cuda()
        ends = torch.tensor([rows], dtype=torch.int32).cuda()
        want = x.float() @ matrix.T
        assert torch.equal(product(x, weight, ends, "w16x64"), want)
        how = {"weight_layout": "w16x64", "out_dtype": torch.float32}
        ops.nvfp4_grouped_mm(x, *packed, ends, **how)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [ops.nvfp4_grouped_mm(x, *packed, ends, **how) for _ in range(10)]
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


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs("wgmma")) for name in UNEVEN])
def uneven(request, monkeypatch):
    """Products are made by several kernels."""
    several = Regime(ALWAYS, UNEVEN[request.param][0][1], UNEVEN[request.param])
    use(monkeypatch, tiled=(several, TABLE.tiled[-1]))
    return UNEVEN[request.param]


@pytest.mark.parametrize(("k", "n"), [(64, 16), (320, 144), (1024, 2064)])
def test_groups_of_uneven_sizes_exactly(uneven, k, n):
    weight = exact_weight(NVFP4, 7, n, k)
    args = (torch.zeros(8, k).bfloat16(), [*weight], torch.zeros(7, dtype=torch.int32))
    how = {"weight_format": "nvfp4", "weight_layout": "w16x64"}
    source = program("grouped_mm", args, how).kernels[0].launch.source
    sizes = dict.fromkeys(source.fusion.symbols, 10**4)
    assert len(source.choose(sizes, H200).size_classes) == len(uneven)
    one_group = (Partition((0,) * i + (900,) + (0,) * (6 - i), 70) for i in (0, 6))
    for partition in (*RAGGED, *one_group, Partition((32, 33, 80, 112, 113, 8, 9), 300)):
        check_exactly(weight, "bf16", "w16x64", partition)


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
        close(found[0], by_reference(ops.expert_mlp, *args, **kwargs), 8e-3)
        assert all(torch.equal(result, found[0]) for result in found)


# A whole layer ------------------------------------------------------------------------------------

LAYERS = {
    "plain": {},
    "interleaved by 1": {"activation": swiglu(interleave=1, limit=1.0, alpha=1.702, up_offset=1.0)},
    "bias": {
        "activation": swiglu(interleave=8),
        "gate_up_bias": torch.randn(E, 2 * I),
        "down_bias": torch.randn(E, H),
    },
    "interleaved by 32": {"activation": swiglu(interleave=32)},
    "scale on the input": {"scale_on": "input"},
    "local experts": {"first_expert": 2},
}
SOME_LAYERS = [
    *((*PAIRS[0], name) for name in LAYERS),
    *((*pair, name) for pair in PAIRS[1:] for name in ("interleaved by 1", "bias")),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_no_expert", [0, 0.3, 1])
@pytest.mark.parametrize(("fmt", "activations", "name"), SOME_LAYERS)
def test_a_whole_layer(fmt, activations, name, of_no_expert, layout):
    """With ids of -1 too, for single slots and for whole tokens, in calls of few rows, whose
    product finds its tiles in ids, and of more.
    """
    if layout == "sf128x4" and ENCODINGS[fmt].plain:
        pytest.skip("no block scales to swizzle")
    dtype, g = DTYPES[activations], generator()
    changes = {
        k: v.to(dtype).cuda() if isinstance(v, torch.Tensor) else v for k, v in LAYERS[name].items()
    }
    weights = [
        stored(
            quantize(torch.randn(E, *shape, generator=g) * 0.05, encoding=ENCODINGS[fmt]), layout
        )
        for shape in ((2 * I, H), (H, I))
    ]
    kwargs = {**changes, "weight_format": fmt, "weight_layout": layout}
    for count in (1, 4, 10, 21, 37, 500):
        ids = torch.randint(0, E, (count, K), generator=generator())
        ids[torch.rand(ids.shape, generator=generator(1)) < of_no_expert] = -1
        x, ids, w = tokens(ids)
        x[(ids == -1).all(1)] = math.nan  # padding
        args = (x.to(dtype), ids, w, *weights)
        found = by_kernels("fused_experts", args, kwargs)
        fusion_moe.synchronize()  # -1 is no fault
        close(found, by_reference(ops.fused_experts, *args, **kwargs), ROUNDINGS[activations])
        assert not found[(ids == -1).all(1)].any()


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
        found = by_kernels("expert_mlp", args, kwargs)
        close(found, by_reference(ops.expert_mlp, *args, **kwargs), 8e-3)


@pytest.mark.parametrize("groups", [1, 8, 37, 256, 300])
@pytest.mark.parametrize(
    ("count", "slots"),
    [(1, 2), (16, 2), (11, 3), (48, 1), (9, 7), (8, 8), (65, 1), (500, 2), (1500, 2), (1367, 3)],
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
        some.int(),
    ):
        poison()
        found = ops.route(these.cuda(), groups)
        want = by_reference(ops.route, these.cuda(), groups)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    ids[-1, 0] = groups
    ops.route(ids.cuda(), groups)
    with pytest.raises(GroupsError, match=rf"= {groups} is out of range"):
        fusion_moe.synchronize()


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
    for name, args in {"combine": (y, slot_of, w), "group_add": (y, bias, ends)}.items():
        found = by_kernels(name, args, {})
        assert torch.equal(found, by_reference(getattr(ops, name), *args))
    close(ops.scaled_swiglu(x, scale, 8), by_reference(ops.scaled_swiglu, x, scale, 8), 1e-3)


@pytest.mark.parametrize("rows", [5, 50, 700])
def test_scales_of_groups(rows):
    """In an epilogue; exact, since all are small integers. Rows of no group keep theirs."""
    g = generator()
    x = torch.randint(-3, 4, (rows, 64), generator=g).bfloat16()
    weight = torch.randint(-1, 2, (4, 128, 64), generator=g).bfloat16()
    scale = torch.randint(-2, 3, (4, 128), generator=g).float()
    fd = FusionDefinition()
    values = [fd.from_pytorch(t) for t in (x, weight, scale)]
    offs = fd.define_tensor(shape=[4], dtype="i32")
    ends = fd.groups_of(offs, rows)
    y = fd.ops.grouped_mm(fd.partition_by(values[0], ends), values[1], ends)
    fd.add_output(fd.ops.group_mul(y + 1.0, values[2], ends))
    fusion = fd.fusion()
    given = x, weight, scale, torch.tensor([2, 2, rows - 2, rows - 1], dtype=torch.int32)
    (want,) = fusion.evaluate(*given)
    made = compile_fusion(fusion, TARGETS["cuda"], Options())
    assert [kernel.why for kernel in made.kernels] == [""]
    (found,) = made(on_cuda(*given))
    assert torch.equal(found.cpu(), want)


# Bad input ----------------------------------------------------------------------------------------


def check_bad_ends(layout: str) -> None:
    """They are made safe, and reported once."""
    a = torch.randn(300, 128).bfloat16().cuda()
    weight = stored(exact_weight(NVFP4, 4, 32, 128), layout)
    for ends, bad in (
        ([90, 30, 40, 400], 1),
        ([-5, 30, 30, 30], 0),
        ([2**31 - 1] * 4, 0),
        ([3, 43, 83, 301], 3),
    ):
        args = (a, *weight, torch.tensor(ends, dtype=torch.int32).cuda())
        found = by_kernels("nvfp4_grouped_mm", args, {"weight_layout": layout})
        with pytest.raises(GroupsError, match=rf"offs\[{bad}\] = {ends[bad]}, in an earlier call"):
            fusion_moe.synchronize()
        assert found.isfinite().all()
        fusion_moe.synchronize()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_ends_are_made_safe_and_reported(layout):
    check_bad_ends(layout)


def test_bad_ends_of_uneven_groups(uneven):
    check_bad_ends("w16x64")


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 10])
@pytest.mark.parametrize("bias", [False, True])
def test_few_ids_are_routed_by_the_first_product(count, dtype, bias):
    """It writes the bits of segments that are launched one by one, which `route` sorts ids for;
    also when a graph is replayed with other ids.
    """
    x, ids, w = tokens(torch.randint(0, E, (count, K), generator=generator()))
    ids = ids.to(dtype)
    kwargs: dict[str, Any] = {"weight_layout": "w16x64"}
    if bias:
        kwargs["gate_up_bias"] = torch.randn(E, 2 * I, generator=generator()).bfloat16().cuda()
        kwargs["down_bias"] = torch.randn(E, H, generator=generator(1)).bfloat16().cuda()
    args = (x, ids, w, *quantized("w16x64"))
    given = list(bind(SPECS["expert_mlp"], args, kwargs).tensors.values())
    made = program("expert_mlp", args, kwargs)
    chosen = made.joined.choose(made.sizes(given, {}), H200)
    assert "route" not in [k.name for k in chosen.kernels]
    by_segments = replace(made, joined=None)
    made(given)
    by_segments(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made(given)[0]
    for seed in range(12):
        other = torch.randint(0, (1, 3, E)[seed % 3], ids.shape, generator=generator(seed))
        other[torch.rand(other.shape, generator=generator(seed)) < seed % 4 / 3] = -1
        ids.copy_(other)
        poison()
        found.fill_(math.nan)
        graph.replay()
        want = by_segments(given)[0]
        assert torch.equal(found, want)
        assert torch.equal(made(given)[0], want)
    fusion_moe.synchronize()


def test_the_option_check_sees_kernels_of_few_ids():
    """They are launched in one call alone: one by one, `route` sorts ids for each segment."""
    x, ids, w = tokens(torch.randint(1, E, (2, K), generator=generator()))
    args, kwargs = (x, ids, w, *quantized("w16x64")), {"weight_layout": "w16x64"}
    given = list(bind(SPECS["expert_mlp"], args, kwargs).tensors.values())
    right, wrong = (replace(program("expert_mlp", args, kwargs), checked=True) for _ in range(2))
    right(given)
    parts = wrong.joined.parts
    vars(parts)["routed"] = {i: (v, first + 1) for i, (v, first) in parts.routed.items()}
    with pytest.raises(FusionError, match="check: all kernels in one call: it gets"):
        wrong(given)


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
        want = by_reference(ops.expert_mlp, x, ids, w, *weights, weight_layout=layout)
        close(found, want, 8e-3)


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
            want = by_reference(ops.expert_mlp, *given, w, *weights, weight_layout="w16x64")
            close(result, want, 8e-3)


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
            close(compiled(x, ids, w).clone(), by_reference(layer, x, ids, w), 8e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0
