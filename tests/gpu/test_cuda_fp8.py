"""Rows in e4m3, and products of them with FP8 weights, against the reference on the same GPU."""

from __future__ import annotations

import pytest
import torch
from fusions import assert_same_bits

import fusion_moe
from fusion_moe import FusionDefinition, options
from fusion_moe.encodings import ENCODINGS, Quantized, quantize
from fusion_moe.errors import GroupsError
from fusion_moe.ir.types import dtype_name
from fusion_moe.nn import swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.needs("mma.e4m3")]
OPS = torch.ops.fusion_moe
HOW = {"activation_format": "fp8"}
# rows of each group, then of none; the last ones are too few for products of codes
MANY, FEW, FEWEST = (
    ((300, 0, 1, 160, 161, 64, 0), 5),
    ((3, 0, 1, 16, 0, 7, 0), 2),
    ((3, 0, 1, 0, 0, 0, 0), 2),
)


def integers(*shape: int, most: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g).cuda()


def exact_weight(groups: int, n: int, k: int, encoding: str) -> Quantized:
    """Small integers, times powers of two that differ between blocks, or runs of a matrix."""
    parts = [integers(groups, n, k, most=2).to(torch.float8_e4m3fn)]
    if encoding == "fp8_tensor":
        runs = integers(groups, 1 + (n % 64 == 0), most=2, seed=1).float().exp2()
        return Quantized(*parts, runs, encoding=ENCODINGS[encoding])
    blocks = integers(groups, -(-n // 32), -(-k // 128), most=2, seed=1).float().exp2()
    scale = blocks.repeat_interleave(32, 1)[:, :n].contiguous()
    of = ENCODINGS[encoding]
    return Quantized(*parts, scale.to(of.parts[1].dtype), encoding=of)


def ends_of(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0).int().cuda()


def both(run):
    """By our kernels, and by the reference."""
    with options.override(target="cuda"):
        found = run()
    with options.override(target="reference"):
        return found, run()


@pytest.mark.parametrize("columns", [128, 200, 2880])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_quantized_bit_for_bit(dtype, columns):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(333, columns, generator=g) * torch.randn(333, 1, generator=g).mul(6).exp2()
    x = x.to(dtype)
    x[0], x[1, 3], x[2, 7], x[3, -1] = 0, torch.nan, torch.inf, -torch.inf
    x[4], x[5, 0], x[6, 0], x[7, 0] = -0.0, 448, 449, 1e-38
    fd = FusionDefinition()
    of = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    rows = fd.define_tensor(shape=[333, columns], dtype=of)
    for part in fd.ops.unpack(fd.ops.quantize(rows, encoding="fp8_rows")):
        fd.add_output(part)
    found, wanted = both(lambda: fusion_moe.run(fd.fusion(), [x.cuda()]))
    assert_same_bits(found[1], wanted[1])
    good = wanted[1].isfinite().repeat_interleave(128, 1)[:, :columns]
    codes = [v[0].view(torch.uint8) for v in (found, wanted)]
    assert torch.equal(codes[0][good], codes[1][good])
    assert (codes[0][~good] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("encoding", ["fp8", "fp8_e8m0", "fp8_tensor"])
@pytest.mark.parametrize(("sizes", "rest"), [MANY, FEW, FEWEST])
@pytest.mark.parametrize(("k", "n"), [(128, 64), (400, 320), (2880, 544)])
def test_products_are_exact(k, n, sizes, rest, encoding):
    x = integers(sum(sizes) + rest, k, most=3).bfloat16()
    weight = exact_weight(len(sizes), n, k, encoding)
    how = {"weight_format": encoding, **HOW}
    found, wanted = both(lambda: OPS.grouped_mm(x, list(weight), ends_of(sizes), **how))
    assert torch.equal(found, wanted)


def test_rows_that_an_index_picks():
    """Those of a layer's tokens are sorted token by token; others row by row."""
    (sizes, rest), k = MANY, 400
    rows, weight = sum(sizes) + rest, exact_weight(len(sizes), 320, k, "fp8")
    fd = FusionDefinition()
    ends = fd.groups_of(fd.define_tensor(shape=(len(sizes),), dtype="i32"), rows)
    x = fd.define_tensor(shape=(rows, k), dtype="bf16")
    index = fd.ops.partition(fd.define_tensor(shape=(rows,), dtype="i32"), ends)
    x = fd.ops.quantize(fd.ops.index_select(x, index, dim=0), encoding="fp8_rows")
    parts = [fd.define_tensor(shape=tuple(p.shape), dtype=dtype_name(p.dtype)) for p in weight]
    product = fd.ops.grouped_mm(x, fd.ops.pack(*parts, encoding="fp8", layout="linear"), ends)
    fd.add_output(fd.ops.cast(product, dtype="bf16"))
    picked = torch.arange(rows, dtype=torch.int32, device="cuda") * 31 % rows
    given = [ends_of(sizes), integers(rows, k, most=3).bfloat16(), picked, *weight]
    (found,), (wanted,) = both(lambda: fusion_moe.run(fd.fusion(), given))
    assert torch.equal(found[: sum(sizes)], wanted[: sum(sizes)])


def layer(experts: int, hidden: int, inner: int) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    shapes = (2 * inner, hidden), (hidden, inner)
    made = (
        quantize(torch.randn(experts, *shape, generator=g) / 16, ENCODINGS["fp8"])
        for shape in shapes
    )
    return [[t.cuda() for t in weight] for weight in made]


@pytest.mark.parametrize(("tokens", "first"), [(3, None), (700, None), (700, 2)])
@pytest.mark.parametrize("activation", [None, swiglu(interleave=32)], ids=["halves", "blocks"])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (384, 192), (720, 384)])
def test_experts(hidden, inner, activation, tokens, first):
    """All of them, or those from `first` on with rows of others."""
    weights, g = layer(8, hidden, inner), torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=g).bfloat16().cuda()
    ids = torch.randint(0, 8 if first is None else 14, (tokens, 2), generator=g).cuda()
    w = torch.rand(tokens, 2, generator=g).cuda()
    how = {"weight_format": "fp8", "activation": activation, "first_expert": first, **HOW}
    with options.override(contract_rounding=False):
        found, wanted = both(lambda: OPS.fused_experts(x, ids, w, *weights, **how))
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < 0.03  # some numbers between the products are rounded to another code
    if tokens > 3:
        bad = x.clone()
        bad[1, 5], bad[2, 7] = torch.nan, torch.inf
        ids[1:3] = first or 0
        with options.override(target="cuda"):
            y = OPS.fused_experts(bad, ids, w, *weights, **how)
        assert y[1:3].isnan().all(1).all()
        assert torch.equal(y[3:], OPS.fused_experts(x, ids, w, *weights, **how)[3:])


def test_graphs_are_bit_equal():
    weights, g = layer(8, 256, 128), torch.Generator().manual_seed(1)
    x = torch.randn(700, 256, generator=g).bfloat16().cuda()
    ids, w = torch.randint(0, 8, (700, 2), generator=g).cuda(), torch.rand(700, 2).cuda()
    how = {"weight_format": "fp8", **HOW}
    wanted = OPS.fused_experts(x, ids, w, *weights, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = OPS.fused_experts(x, ids, w, *weights, **how)
    for _ in range(3):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("ends", [[100, 400], [300, 200], [-1, 300]])
def test_bad_ends_are_reported(ends):
    x, weight = integers(300, 128, most=3).bfloat16(), exact_weight(2, 64, 128, "fp8")
    bad = torch.tensor(ends, dtype=torch.int32).cuda()
    OPS.grouped_mm(x, list(weight), bad, weight_format="fp8", **HOW)
    with pytest.raises(GroupsError, match="offs"):
        fusion_moe.synchronize()


@pytest.mark.needs("wgmma")  # other products read a scale for each row
def test_rows_with_scales_of_their_own_are_reported():
    x, weight = integers(300, 128, most=3).bfloat16(), exact_weight(2, 64, 128, "fp8")
    weight.block_scale[1, 37] *= 2
    OPS.grouped_mm(x, list(weight), ends_of((100, 200)), weight_format="fp8", **HOW)
    with pytest.raises(GroupsError, match="row 37 of matrix 1"):
        fusion_moe.synchronize()
