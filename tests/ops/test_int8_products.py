"""Operations with activation_format="int8": both operands of a product rounded to integers in
blocks of 256 columns.
"""

from __future__ import annotations

import pytest
import torch
from cover import examples
from fusions import fusion_of_call
from hypothesis import given, strategies as st

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import MXFP4, NVFP4, Encoding, Quantized, dequantize, quantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.ir.kinds import int8

OPS = torch.ops.fusion_moe
ENCODINGS = (NVFP4, MXFP4)


def product(
    x: torch.Tensor, w: Quantized, ends: list[int], how: str = "int8", target: str = "reference"
) -> torch.Tensor:
    """f32"""
    with options.override(target=target):
        offs = torch.tensor(ends, dtype=torch.int32)
        return OPS.grouped_mm(
            x,
            list(w),
            offs,
            weight_format=w.encoding.name,
            activation_format=how,
            out_dtype=torch.float32,
        )


def random(
    encoding: Encoding, n: int = 24, k: int = 544, groups: int = 2, rows: int = 9, seed: int = 0
) -> tuple[torch.Tensor, Quantized]:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(groups, n, k, generator=g) * torch.rand(
        groups, n, k // 32, generator=g
    ).repeat_interleave(32, -1)
    return torch.randn(rows, k, generator=g), quantize(w, encoding=encoding)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
def test_what_needs_no_rounding_is_exact(encoding):
    """Integers up to 127, which occurs in each block, by codes of one scale each block of 256
    columns.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-126, 127, (5, 768), generator=g).float()
    x[:, ::256] = 127
    codes = torch.randint(0, 256, (1, 16, 384), generator=g, dtype=torch.uint8)
    scales = (2.0 ** torch.randint(-2, 3, (1, 16, 3), generator=g)).repeat_interleave(
        256 // encoding.block_scales[0].block, -1
    )
    w = Quantized(
        codes,
        scales.to(encoding.block_scales[0].dtype),
        *([torch.ones(1)] * (encoding is NVFP4)),
        encoding=encoding,
    )
    assert torch.equal(product(x, w, [5]), x @ dequantize(w)[0].T)


def test_powers_of_two_are_exact_down_to_an_eighth():
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (1, 16, 128), generator=g, dtype=torch.uint8)
    scales = torch.randint(120, 124, (1, 16, 8), generator=g)
    scales[..., 0] = 123
    w = Quantized(codes, scales.to(torch.uint8).view(torch.float8_e8m0fnu), encoding=MXFP4)
    made, steps, _ = int8.matrices(w)
    assert torch.equal((made * steps[..., None]).flatten(-2), dequantize(w))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
@examples(1)
@given(
    seed=st.integers(0, 2**16),
    k=st.sampled_from([32, 96, 256, 544, 768]),
    scale=st.sampled_from([1e-20, 1.0, 3e4]),
)
def test_bound(encoding, seed, k, scale):
    """Each activation is off by at most half a 127th of the largest of its block, each number of
    the weight by half of a 16th, and 2^-12 of 6, of the largest scale.
    """
    x, w = random(encoding, k=k, seed=seed)
    x = x * scale
    exact = product(x.double().float(), w, [4, 9], "bf16").double()
    pad = (0, -k % 256)
    blocks = torch.nn.functional.pad(x.double(), pad).unflatten(-1, (-1, 256)).abs()
    each = w[1].double().repeat_interleave(encoding.block_scales[0].block, -1) * (
        w[2].double()[:, None, None] if len(w) > 2 else 1
    )
    numbers, scales = (
        torch.nn.functional.pad(t, pad).unflatten(-1, (-1, 256)).abs()
        for t in (dequantize(w).double(), each)
    )
    off_x = (blocks.amax(-1) / 254)[..., None].expand_as(blocks)
    off_w = (scales.amax(-1) * (1 / 32 + 6 / 4096))[..., None].expand_as(numbers)
    group = torch.tensor([0] * 4 + [1] * 5)
    a, da = blocks.flatten(-2)[:, None], off_x.flatten(-2)[:, None]
    b, db = numbers.flatten(-2)[group], off_w.flatten(-2)[group]
    bound = (da * b + a * db + da * db).sum(-1)
    size = (a * b).sum(-1)
    assert ((product(x, w, [4, 9]).double() - exact).abs() <= bound + 1e-5 * size).all()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
def test_a_row_depends_on_no_other(encoding):
    x, w = random(encoding)
    whole = product(x, w, [4, 9])
    assert torch.equal(product(x[2:7], w, [2, 5]), whole[2:7])
    more = torch.cat([x, x.new_full((2, x.shape[1]), torch.nan)])
    assert torch.equal(product(more, w, [4, 9]), torch.cat([whole, whole.new_zeros(2, 24)]))


@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
@pytest.mark.compiler
def test_zeros_tiny_numbers_infinity_and_nan(encoding, target):
    x, w = random(encoding)
    want = product(x, w, [4, 9])
    x[0] = 0
    x[1] *= 2.0**-110
    x[2, 300], x[3, 5] = torch.inf, torch.nan
    found = product(x, w, [4, 9], target=target)
    assert (found[:2] == 0).all()
    assert found[2:4].isnan().all()
    assert torch.equal(found[4:], want[4:])
    w[1].view(torch.uint8)[1, 3, 2] = 0x7F if encoding is NVFP4 else 0xFF
    found = product(x, w, [4, 9], target=target)
    others = [n for n in range(24) if n != 3]
    assert found[4:, 3].isnan().all()
    assert torch.equal(found[4:, others], want[4:, others])


def test_derivative_is_that_of_the_product_without_rounding():
    x, w = random(NVFP4)
    grads = []
    for how in ("bf16", "int8"):
        leaf = x.clone().requires_grad_()
        OPS.grouped_mm(
            leaf,
            list(w),
            torch.tensor([4, 9], dtype=torch.int32),
            activation_format=how,
            weight_format="nvfp4",
        ).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_only_cpus_have_such_products():
    x, w = random(NVFP4)
    offs = torch.tensor([4, 9], dtype=torch.int32)
    how = {"weight_format": "nvfp4", "activation_format": "int8"}
    made = fusion_of_call("grouped_mm", x.bfloat16(), list(w), offs, **how)
    assert "operands='int8'" in str(made)
    for target in ("cuda", "sm_90", "sm_100"):
        expected = (
            rf"activation_format = 'int8' on {target}; expected one of bf16.*int8 "
            r"activations require a CPU"
        )
        with pytest.raises(UnsupportedError, match=expected):
            fusion_moe.compile.check(made, fusion_moe.backends.TARGETS[target], options.current())
