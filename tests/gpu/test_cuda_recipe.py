"""The MXFP8 recipe on a GPU: parts of copies bit for bit those of the CPU, layers as near as
kernels for bf16 are.
"""

import mxfp8
import pytest
import torch
from fusions import assert_same_bits, mxfp8_copies, numbers_of_all_sizes
from hopper import ON_HOPPER

import fusion_moe
from fusion_moe.compile import program_of
from fusion_moe.encodings import MXFP8, MXFP8_COLUMNS, quantize
from fusion_moe.errors import GroupsError
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.kinds.runs import dequantize_runs, quantize_runs
from fusion_moe.ir.text import text
from fusion_moe.nn import GroupedLinear
from fusion_moe.recipe import MXFP8BlockScaling

pytestmark = ON_HOPPER
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


def numbers_of_a_copy(codes: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor) -> Fusion:
    """In blocks along rows of groups."""
    fd = FusionDefinition()
    rows, parts = fd.from_pytorch(codes), fd.from_pytorch(scales)
    groups = fd.groups_of(fd.from_pytorch(ends), len(codes))
    packed = fd.ops.pack(
        fd.partition_by(rows, groups), parts, encoding=MXFP8_COLUMNS.name, layout="linear"
    )
    fd.add_output(fd.ops.dequantize(packed, groups, dtype="bf16"))
    return fd.fusion()


def test_wrong_ends_are_said():
    x, ends = numbers(40, 64).cuda(), torch.tensor([8, 50, -3, 40], dtype=torch.int32)
    fusion = mxfp8_copies(x.cpu(), [-1, -2], ends)
    fusion_moe.run(fusion, [x, ends.cuda()])
    with pytest.raises(GroupsError):
        fusion_moe.synchronize()


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_a_layer(wgrad):
    g = torch.Generator().manual_seed(0)
    x, dy = ((torch.randn(sum(SIZES) + 3, n, generator=g)).bfloat16() for n in (64, 96))
    module = GroupedLinear(4, 64, 96, bias=False, device="cuda", dtype=torch.bfloat16)
    weights = torch.stack(list(module.parameters())).detach().cpu()
    rows = x.cuda().requires_grad_()
    with fusion_moe.autocast(MXFP8BlockScaling(wgrad=wgrad)):
        y = module(rows, torch.tensor(SIZES, device="cuda"))
    y.backward(dy.cuda())
    found = (y, rows.grad, torch.stack([p.grad for p in module.parameters()]))
    for a, want in zip(found, mxfp8.products(x, weights, dy, SIZES, wgrad), strict=True):
        torch.testing.assert_close(a.double().cpu(), want, rtol=2**-8, atol=1e-3)
