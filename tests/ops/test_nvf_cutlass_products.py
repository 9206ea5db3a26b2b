"""nvFuser's products of two quantized operands, by their names, against float64 on the same
numbers; as functions and compiled.
"""

from __future__ import annotations

from functools import partial

import loops
import pytest
import torch
from torch import Tensor

import fusion_moe
from fusion_moe import compat, options
from fusion_moe.encodings import MXFP8, NVFP4, Quantized, dequantize, find, quantize
from fusion_moe.errors import Error
from fusion_moe.layouts import SF128X4

M, N, K = 7, 96, 128
SIZES = (4, 0, 3)
CUT = torch.ops.nvf_cutlass


@pytest.fixture(autouse=True, scope="module")
def registered():
    compat.register_nvf_cutlass_products()


def drawn(*shape: int, seed: int = 0, of=NVFP4) -> tuple[Quantized, Tensor]:
    """A quantized matrix, and its numbers without a scale of the whole in float64."""
    x = quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), of)
    alone = [torch.ones(shape[:-2])] if of is NVFP4 else []
    return x, dequantize(Quantized(*x[:2], *alone, encoding=of)).double()


def fp4(x: Quantized) -> Tensor:
    return x[0].view(torch.float4_e2m1fn_x2)


def near(found: Tensor, want: Tensor) -> None:
    assert found.shape == want.shape
    assert (found.double() - want).norm() <= 2**-8 * want.norm()


def dense(of=NVFP4) -> tuple[list[Tensor], Tensor]:
    (a, x), (b, y) = drawn(M, K, of=of), drawn(N, K, seed=1, of=of)
    codes = map(fp4, (a, b)) if of is NVFP4 else (a[0], b[0])
    alpha = torch.tensor(0.37e-5)
    return [*codes, *(SF128X4.forward(t[1]) for t in (a, b)), alpha], 0.37e-5 * x @ y.T


def grouped() -> tuple[list[Tensor], Tensor]:
    (a, x), (b, w) = drawn(M, K), drawn(3, N, K, seed=1)
    sizes = torch.tensor(SIZES, dtype=torch.int32)
    ends, alphas = sizes.cumsum(0, dtype=torch.int32), torch.tensor([0.5, 2.0, 3.0]) * 1e-5
    padded = (sizes + 127) // 128 * 128
    of_problem = torch.stack([sizes, torch.full_like(sizes, N), torch.full_like(sizes, K)], 1)
    scales = SF128X4.forward(a[1], ends)[: int(padded.sum())]  # as many rows as there are
    starts = padded.cumsum(0, dtype=torch.int32) - padded
    strides = torch.full((3,), K)
    args = [fp4(a), fp4(b), scales, SF128X4.forward(b[1]), alphas, strides, strides]
    args += [of_problem, ends - sizes, starts]
    return args, loops.product(x, w * alphas.view(3, 1, 1), SIZES)


def blocks() -> tuple[list[Tensor], Tensor]:
    """b and its scales are transposed views."""
    rows = torch.randn(M, K).to(torch.float8_e4m3fn)
    w = quantize(torch.randn(3, 128, K), find("fp8"))
    scales, sizes = torch.rand(M, 1), torch.tensor(SIZES, dtype=torch.int32)
    strides = torch.full((3,), K)
    starts = sizes.cumsum(0, dtype=torch.int32) - sizes
    args = [rows, w[0].mT, scales, w[1].mT, *[strides] * 3, sizes.new_zeros(3, 3), starts]
    return args, loops.product(rows.double() * scales.double(), dequantize(w).double(), SIZES)


CALLS = {
    "nvfp4_scaled_mm": dense,
    "mxfp8_scaled_mm": lambda: dense(MXFP8),
    "nvfp4_scaled_grouped_mm": grouped,
    "mxfp8_scaled_grouped_mm": blocks,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(name, dtype):
    torch.manual_seed(0)
    args, want = CALLS[name]()
    found = getattr(CUT, name)(*args, dtype)
    assert found.dtype == dtype
    near(found, want)


def activated(name, *args: Tensor) -> Tensor:
    return torch.relu(getattr(CUT, name)(*args, torch.bfloat16)) * 2


@pytest.mark.parametrize("name", CALLS)
def test_what_comes_after_is_fused(name):
    args, want = CALLS[name]()
    with torch.no_grad(), options.override(contract_rounding=False):
        torch._dynamo.reset()
        compiled = torch.compile(partial(activated, name), backend="fusion_moe", fullgraph=True)
        assert compiled(*args).equal(activated(name, *args))
        (fusion,) = fusion_moe.explain(partial(activated, name), *args).fusions
    (segment,) = [s for s in fusion.segments if "fd.ops.grouped_mm" in s.ir]
    assert (segment.backend, "fd.ops.relu" in segment.ir) == ("cpu", True)
    there = getattr(CUT, name)(*(t.to("meta") for t in args), torch.bfloat16)
    assert (there.shape, there.dtype) == (want.shape, torch.bfloat16)


def test_any_number_of_rows():
    """Their scales lie in as many tiles as they need."""
    args, _ = dense()
    f = partial(activated, "nvfp4_scaled_mm")
    compiled = torch.compile(f, backend="fusion_moe", dynamic=True)
    with torch.no_grad():
        for rows in (M, 150, 300):
            a, _ = drawn(rows, K)
            some = [fp4(a), args[1], SF128X4.forward(a[1]), *args[3:]]
            assert compiled(*some).equal(f(*some))


@pytest.mark.thunder
@pytest.mark.parametrize("name", CALLS)
def test_what_comes_after_is_fused_by_thunder(name):
    import thunder

    from fusion_moe.thunder import thunder_executors

    args, _ = CALLS[name]()
    with torch.no_grad(), options.override(contract_rounding=False):
        jitted = thunder.jit(partial(activated, name), executors=thunder_executors())
        assert jitted(*args).equal(activated(name, *args))
    (fused,) = [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.is_fusion]
    assert {"fusion_moe_grouped_mm", "relu"} & {b.sym.name for b in fused.subsymbols}


def test_a_result_in_four_bits():
    args, want = dense()
    f = partial(CUT.nvfp4_scaled_mm_blockscale, *args, torch.tensor(2.0))
    codes, scales = f()
    parts = codes.view(torch.uint8), SF128X4.inverse(scales, (M, N // 16)), torch.tensor(0.5)
    assert codes.dtype == torch.float4_e2m1fn_x2
    found = dequantize(Quantized(*parts, encoding=NVFP4)).double()
    assert (found - want).norm() <= 0.12 * want.norm()  # rounded to four bits
    again = torch.compile(f, backend="fusion_moe", fullgraph=True)()
    assert again[0].view(torch.uint8).equal(parts[0])
    assert again[1].equal(scales)


def test_wrong_sizes_are_said_before_anything_is_read():
    args, _ = dense()
    with pytest.raises(Error, match=r"stored is \[7, 8\]; expected \[128, 8\]"):
        CUT.nvfp4_scaled_mm(args[0], args[1], args[2][:7], *args[3:], torch.bfloat16)
    with pytest.raises(Error, match=r"a \[7, 32\], b \[96, 64\]; expected rows as wide"):
        CUT.nvfp4_scaled_mm(args[0][:, :32], *args[1:], torch.bfloat16)
    args, _ = grouped()
    args[7][0, 0] = 5
    with pytest.raises(Error, match="problem_sizes"):
        CUT.nvfp4_scaled_grouped_mm(*args, torch.bfloat16)
