"""The MXFP8 recipe on a GPU: parts of copies bit for bit those of the CPU, layers as near as kernels for bf16 are."""

import mxfp8
import pytest
import torch
from fusions import assert_same_bits

import fusion_moe
from fusion_moe.encodings import MXFP8, MXFP8_COLUMNS, quantize
from fusion_moe.ir.kinds.runs import dequantize_runs, quantize_runs
from fusion_moe.nn import GroupedLinear
from fusion_moe.recipe import MXFP8BlockScaling

pytestmark = pytest.mark.gpu
SIZES = (5, 0, 33, 64)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * 2.0 ** torch.randint(-140, 90, (*shape[:-1], 1), generator=g)).bfloat16()


def test_copies_are_those_of_the_cpu():
    x, ends = numbers(sum(SIZES) + 3, 64), torch.tensor(SIZES).cumsum(0).int()
    for encoding in (MXFP8, MXFP8_COLUMNS):
        assert_same_bits([t.cpu() for t in quantize(x[:96].cuda(), encoding=encoding)], list(quantize(x[:96], encoding=encoding)))
    there, here = quantize_runs(x.cuda(), ends.cuda(), MXFP8_COLUMNS), quantize_runs(x, ends, MXFP8_COLUMNS)
    assert_same_bits([t.cpu() for t in there], list(here))
    assert_same_bits([dequantize_runs(there, ends.cuda()).cpu()], [dequantize_runs(here, ends)])


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
