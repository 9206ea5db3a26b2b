"""Recipes on a GPU: parts of copies bit for bit those of the CPU, layers as near as kernels for
bf16 are.
"""

import fp8_block
import mxfp8
import pytest
import torch
from fusions import assert_same_bits, copies, mxfp8_copies, numbers_of_all_sizes

import fusion_moe
from fusion_moe.compile import program_of
from fusion_moe.encodings import (
    FP8_BLOCKS_F32,
    FP8_COLUMNS,
    FP8_COLUMNS_F32,
    FP8_E8M0,
    FP8_ROWS,
    FP8_ROWS_F32,
    MXFP8,
    MXFP8_COLUMNS,
    quantize,
)
from fusion_moe.errors import GroupsError
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.kinds.runs import dequantize_runs, quantize_runs, untranspose_row_blocks
from fusion_moe.ir.text import text
from fusion_moe.nn import GroupedLinear, swiglu
from fusion_moe.recipe import Float8BlockScaling, MXFP8BlockScaling

pytestmark = pytest.mark.gpu
SIZES = (5, 0, 33, 64)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*shape, generator=g)
        * 2.0 ** torch.randint(-140, 90, (*shape[:-1], 1), generator=g)
    ).bfloat16()


def test_copies_are_those_of_the_cpu():
    x, ends = numbers(sum(SIZES) + 3, 64), torch.tensor(SIZES).cumsum(0).int()
    for encoding in (MXFP8, MXFP8_COLUMNS):
        assert_same_bits(
            [t.cpu() for t in quantize(x[:96].cuda(), encoding=encoding)],
            list(quantize(x[:96], encoding=encoding)),
        )
    there, here = (
        quantize_runs(x.cuda(), ends.cuda(), MXFP8_COLUMNS),
        quantize_runs(x, ends, MXFP8_COLUMNS),
    )
    assert_same_bits([t.cpu() for t in there], list(here))
    assert_same_bits([dequantize_runs(there, ends.cuda()).cpu()], [dequantize_runs(here, ends)])


def assert_bits_of_the_reference(fusion: Fusion, *inputs: torch.Tensor) -> None:
    """By our kernels alone."""
    program = program_of(text(fusion), torch.device("cuda"))
    assert [k.why for k in program.kernels if k.why] == []
    assert_same_bits(
        [t.cpu() for t in program([t.cuda() for t in inputs])], list(fusion.evaluate(*inputs))
    )


@pytest.mark.parametrize("axes", [[-1], [-2], [-1, -2]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_of_copies(axes, dtype):
    x = numbers_of_all_sizes(192, 160).to(dtype).view(2, 96, 160)
    assert_bits_of_the_reference(mxfp8_copies(x, axes), x)
    x[1, 40, 50] = torch.nan
    assert_bits_of_the_reference(mxfp8_copies(x, axes), x)


IN_GROUPS = [
    (5, 0, 33, 64, 1),
    (0, 0),
    (128,),
    (384, 7),
    (0, 130, 0),
    tuple(5 * g % 37 for g in range(70)),
]


@pytest.mark.parametrize("of", [[FP8_ROWS], [FP8_COLUMNS], [FP8_ROWS, FP8_COLUMNS], [FP8_E8M0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [384, 264])
def test_kernels_of_fp8_copies(of, dtype, columns):
    """264 columns: a last block that is short."""
    x = numbers_of_all_sizes(512, columns).to(dtype).view(2, 256, columns)
    x = torch.where(x.isinf(), 1.0, x.float()).to(dtype)
    assert_bits_of_the_reference(copies(x, of), x)


@pytest.mark.parametrize("of", [FP8_ROWS_F32, FP8_COLUMNS_F32, FP8_BLOCKS_F32])
def test_kernels_of_fp8_copies_with_scales_in_float32(of):
    x = numbers_of_all_sizes(256, 384).bfloat16()
    x = torch.where(x.isinf(), 1, x)
    fd = FusionDefinition()
    for part in fd.ops.unpack(fd.ops.quantize(fd.from_pytorch(x), encoding=of.name)):
        fd.add_output(part)
    assert_bits_of_the_reference(fd.fusion(), x)


@pytest.mark.parametrize("rows", [1, 127, 200])
def test_matrices_whose_last_block_has_few_rows(rows):
    x = numbers_of_all_sizes(3 * rows, 136).bfloat16().view(3, rows, 136)
    x = torch.where(x.isinf(), 1, x)
    assert_bits_of_the_reference(copies(x, [FP8_E8M0]), x)


@pytest.mark.parametrize("of", [[FP8_COLUMNS], [FP8_ROWS, FP8_COLUMNS]])
@pytest.mark.parametrize("sizes", IN_GROUPS, ids=str)
def test_kernels_of_fp8_copies_along_rows_of_groups(of, sizes):
    ends = torch.tensor(sizes).cumsum(0).int()
    x = numbers_of_all_sizes(sum(sizes) + 4, 288).bfloat16()
    x = torch.where(x.isinf(), 1, x)
    if FP8_ROWS not in of:
        x[sum(sizes) :] = torch.nan
    assert_bits_of_the_reference(copies(x, of, ends), x, ends)


@pytest.mark.parametrize("sizes", IN_GROUPS, ids=str)
@pytest.mark.parametrize("made_here", [True, False])
@pytest.mark.parametrize("columns", [256, 352])
def test_codes_by_columns(sizes, made_here, columns):
    """Made from numbers, or from codes in memory; blocks without rows keep what memory had."""
    ends = torch.tensor(sizes).cumsum(0).int()
    x = numbers_of_all_sizes(sum(sizes) + 4, columns).bfloat16()
    x = torch.where(x.isinf(), 1, x)
    codes, scales = quantize_runs(x, ends, FP8_COLUMNS)
    fd = FusionDefinition()
    rows, offs = fd.from_pytorch(x if made_here else codes), fd.from_pytorch(ends)
    groups = fd.groups_of(offs, len(x))
    rows = fd.partition_by(rows, groups)
    if made_here:
        rows, of = fd.ops.unpack(fd.ops.quantize(rows, groups, encoding=FP8_COLUMNS.name))
        fd.add_output(of)
    fd.add_output(fd.ops.transpose_row_blocks(rows, groups))
    program = program_of(text(fd.fusion()), torch.device("cuda"))
    assert [k.why for k in program.kernels if k.why] == []
    *of_blocks, turned = program([(x if made_here else codes).cuda(), ends.cuda()])
    back = untranspose_row_blocks(turned, ends.cuda(), len(x), FP8_COLUMNS)[: sum(sizes)]
    assert_same_bits(
        [back.cpu(), *(t.cpu() for t in of_blocks)], [codes[: sum(sizes)], scales][: 1 + made_here]
    )
    first = 0
    for g, end in enumerate(ends.tolist()):
        last = turned[first // 128 + g : first // 128 + g + -(-(end - first) // 128)]
        assert not last.view(torch.uint8).mT.flatten(0, 1)[end - first :].any()
        first = end


MATRICES = [(256, 384), (160, 352), (288, 32)]  # whole blocks, and short last ones


@pytest.mark.parametrize("of", [FP8_E8M0, FP8_BLOCKS_F32])
@pytest.mark.parametrize(("n", "k"), MATRICES)
def test_blocks_both_ways(of, n, k):
    x = torch.where((x := numbers_of_all_sizes(3 * n, k)).isinf(), 1, x).bfloat16().view(3, n, k)
    fd = FusionDefinition()
    parts = fd.ops.unpack(fd.ops.quantize(fd.from_pytorch(x), encoding=of.name))
    for part in (*parts, *fd.ops.transpose_blocks(*parts)):
        fd.add_output(part)
    assert_bits_of_the_reference(fd.fusion(), x)


@pytest.mark.parametrize("of", [FP8_E8M0, FP8_BLOCKS_F32])
@pytest.mark.parametrize(("n", "k"), MATRICES)
def test_turned_blocks(of, n, k):
    codes, scales = quantize(numbers_of_all_sizes(3 * n, k).clamp(-9, 9).view(3, n, k), of)
    fd = FusionDefinition()
    for part in fd.ops.transpose_blocks(fd.from_pytorch(codes), fd.from_pytorch(scales)):
        fd.add_output(part)
    assert_bits_of_the_reference(fd.fusion(), codes, scales)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("of", [FP8_ROWS, FP8_COLUMNS, FP8_ROWS_F32, FP8_COLUMNS_F32])
def test_fp8_blocks_that_are_not_finite(of, bad):
    """NaN as a whole; no other block is."""
    x = numbers_of_all_sizes(256, 384).clamp(-1e30, 1e30).bfloat16()
    x[200, 130] = bad
    fusion = copies(x, [of])
    found = fusion_moe.run(fusion, [x.cuda()])[-1].isnan().cpu()
    assert torch.equal(found, fusion.evaluate(x)[-1].isnan())
    assert found.sum() == 128


@pytest.mark.parametrize("sizes", [(5, 0, 33, 64, 1), (0, 0), (384, 7)], ids=str)
def test_the_numbers_of_an_fp8_copy_that_was_saved(sizes):
    ends = torch.tensor(sizes).cumsum(0).int()
    x = numbers_of_all_sizes(sum(sizes) + 4, 264).clamp(-1e30, 1e30).bfloat16()
    codes, scales = quantize_runs(x, ends, FP8_COLUMNS)
    fusion = numbers_of_a_copy(codes, scales, ends, FP8_COLUMNS.name)
    assert_bits_of_the_reference(fusion, codes, scales, ends)


def test_every_amax():
    x = mxfp8.every_amax()
    assert_bits_of_the_reference(mxfp8_copies(x, [-1]), x)
    turned = x.T.contiguous()
    assert_bits_of_the_reference(mxfp8_copies(turned, [-2]), turned)


@pytest.mark.parametrize("rows", [0, 1, 33, 95])
def test_rows_that_are_no_whole_tile(rows):
    x = numbers_of_all_sizes(rows + 1, 96).bfloat16()[1:]
    assert_bits_of_the_reference(mxfp8_copies(x, [-1]), x)


@pytest.mark.parametrize("axes", [[-2], [-1, -2]])
@pytest.mark.parametrize(
    "sizes",
    [(5, 0, 33, 64, 1), (0, 0), (32,), (96, 7), (0, 64, 0), tuple(5 * g % 37 for g in range(70))],
    ids=str,
)
def test_kernels_of_copies_along_rows_of_groups(axes, sizes):
    x, ends = (
        numbers_of_all_sizes(sum(sizes) + 4, 288).bfloat16(),
        torch.tensor(sizes).cumsum(0).int(),
    )
    x[sum(sizes) :] = torch.nan
    assert_bits_of_the_reference(mxfp8_copies(x, axes, ends), x, ends)


@pytest.mark.parametrize("sizes", [(5, 0, 33, 64, 1), (0, 0), (96, 7)], ids=str)
def test_the_numbers_of_a_copy_that_was_saved(sizes):
    x, ends = (
        numbers_of_all_sizes(sum(sizes) + 4, 288).bfloat16(),
        torch.tensor(sizes).cumsum(0).int(),
    )
    x[1] = torch.nan
    codes, scales = quantize_runs(x, ends, MXFP8_COLUMNS)
    fusion = numbers_of_a_copy(codes, scales, ends)
    assert_bits_of_the_reference(fusion, codes, scales, ends)


def numbers_of_a_copy(
    codes: torch.Tensor,
    scales: torch.Tensor,
    ends: torch.Tensor,
    encoding: str = MXFP8_COLUMNS.name,
) -> Fusion:
    """In blocks along rows of groups."""
    fd = FusionDefinition()
    rows, parts = fd.from_pytorch(codes), fd.from_pytorch(scales)
    groups = fd.groups_of(fd.from_pytorch(ends), len(codes))
    packed = fd.ops.pack(fd.partition_by(rows, groups), parts, encoding=encoding, layout="linear")
    fd.add_output(fd.ops.dequantize(packed, groups, dtype="bf16"))
    return fd.fusion()


def test_wrong_ends_are_said():
    x, ends = numbers(40, 64).cuda(), torch.tensor([8, 50, -3, 40], dtype=torch.int32)
    fusion = mxfp8_copies(x.cpu(), [-1, -2], ends)
    fusion_moe.run(fusion, [x, ends.cuda()])
    with pytest.raises(GroupsError):
        fusion_moe.synchronize()


@pytest.mark.parametrize(
    ("recipe", "k", "n"),
    [
        (MXFP8BlockScaling(), 64, 96),
        (MXFP8BlockScaling(wgrad="bf16"), 64, 96),
        (Float8BlockScaling(), 256, 128),
        (Float8BlockScaling(), 264, 136),
        (Float8BlockScaling(), 384, 256),
        (Float8BlockScaling(), 320, 192),  # last blocks that are short, of products of codes
        (Float8BlockScaling(), 64, 448),
        (Float8BlockScaling(), 448, 64),
        (Float8BlockScaling(wgrad="bf16"), 256, 128),
        (Float8BlockScaling(power_2_scale=False), 256, 128),
    ],
    ids=str,
)
def test_a_layer(recipe, k, n):
    """Half of a tile and less, of blocks of many rows and of few."""
    g, sizes = torch.Generator().manual_seed(0), (300, 0, 129, 5) if k >= 320 else SIZES
    x, dy = ((torch.randn(sum(sizes) + 3, m, generator=g)).bfloat16() for m in (k, n))
    module = GroupedLinear(4, k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    weights = torch.stack(list(module.parameters())).detach().cpu()
    rows = x.cuda().requires_grad_()
    with fusion_moe.autocast(recipe):
        y = module(rows, torch.tensor(sizes, device="cuda"))
    y.backward(dy.cuda())
    found = (y, rows.grad, torch.stack([p.grad for p in module.parameters()]))
    operands = x, weights, dy, sizes, recipe.wgrad
    products = (
        fp8_block.products(*operands, recipe.power_2_scale)
        if isinstance(recipe, Float8BlockScaling)
        else mxfp8.products(*operands)
    )
    # tensor cores add up products of codes in 14 bits, of the largest in a sum
    bits = 2**-10 if isinstance(recipe, Float8BlockScaling) else 0
    for a, want in zip(found, products, strict=True):
        atol = 1e-3 + bits * want.abs().max().item()
        torch.testing.assert_close(a.double().cpu(), want, rtol=2**-8, atol=atol)


@pytest.mark.parametrize(
    ("transposed", "activation"), [(False, None), (True, swiglu(interleave=1))], ids=["", "gpt-oss"]
)
def test_experts_whose_last_blocks_are_short(transposed, activation):
    """Without gradients, where SwiGLU of halves joins the product, and with them."""
    g = torch.Generator().manual_seed(0)
    x, gate_up, down, dy = (
        torch.randn(*shape, generator=g).mul(scale).bfloat16()
        for shape, scale in (
            ((300, 320), 1),
            ((4, 384, 320), 1 / 16),
            ((4, 320, 192), 1 / 16),
            ((300, 320), 1),
        )
    )
    w, ids = torch.randn(300, 4, generator=g).softmax(-1).topk(2)
    weights = [t.mT.contiguous() if transposed else t for t in (gate_up, down)]

    def step(device: str) -> list[torch.Tensor]:
        leaves = [t.to(device).requires_grad_() for t in (x, *weights)]

        def layer() -> torch.Tensor:
            return torch.ops.fusion_moe.fused_experts(
                leaves[0],
                ids.to(device),
                w.to(device),
                *([t] for t in leaves[1:]),
                weight_format="bf16",
                activation_format="fp8_block",
                transposed=transposed,
                activation=activation,
            )

        with torch.no_grad():
            y = layer()
        return [t.cpu().double() for t in (y, *torch.autograd.grad(layer(), leaves, dy.to(device)))]

    with fusion_moe.options.override(target="reference"):
        want = step("cpu")
    for a, b in zip(step("cuda"), want, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize(("k", "n"), [(256, 128), (320, 192)])
def test_a_graph_of_microbatches(k, n):
    """One graph quantizes the weights, the other reads them; replayed with other weights and group
    sizes they give the bits of eager calls.
    """
    g = torch.Generator().manual_seed(0)
    module = GroupedLinear(4, k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(128, m, generator=g).bfloat16().cuda() for m in (k, n))
    x.requires_grad_()
    splits = torch.tensor([32, 32, 32, 32], device="cuda")

    def step(first: bool) -> list[torch.Tensor]:
        with fusion_moe.autocast(Float8BlockScaling()):
            y = module(x, splits, is_first_microbatch=first)
        return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for first in (True, False, False):
            step(first)
    torch.cuda.current_stream().wait_stream(stream)
    graphs, results = [], []
    for first in (True, False):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append(step(first))
    for sizes in ((32, 32, 32, 32), (0, 128, 0, 0), (5, 60, 0, 63), (0, 0, 0, 0)):
        splits.copy_(torch.tensor(sizes))
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.25)
        for graph in graphs:
            graph.replay()
        found = [[t.clone() for t in made] for made in results]
        for first, made in zip((True, False), found, strict=True):
            assert_same_bits(made, step(first))
