"""Rules that choose the scales of blocks: the best of their candidates, counted in float64."""

from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest
import torch
from bad_calls import messages
from cover import examples
from fusions import ODD_SCALES, assert_same_bits, weights_to_round
from hypothesis import given, strategies as st

from fusion_moe import options
from fusion_moe.backends.cpu import blocks
from fusion_moe.backends.cpu.blocks import CPUBlockKernels
from fusion_moe.encodings import (
    FP8,
    INT4,
    MXFP4,
    NVFP4,
    dequantize,
    find,
    matrix_scale_of,
    quantize,
    search,
)
from fusion_moe.encodings.convert import quantize_weight
from fusion_moe.encodings.e2m1 import E2M1
from fusion_moe.errors import NonFiniteError
from fusion_moe.messages import warn
from fusion_moe.nn.frozen.base import _program
from fusion_moe.runtime import isa
from fusion_moe.runtime.build import LibrarySource

OFFSETS = {"mse": (0, *range(-5, 0), *range(1, 7))}
RULES = [(NVFP4, "four_over_six"), (NVFP4, "mse"), (MXFP4, "mse")]


def weight(rows=24, k=256, dtype=torch.bfloat16):
    """Heavy tails, blocks of zeros, one number in a block, blocks near the matrix's amax."""
    rand = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows, k, generator=rand) * torch.rand(2, rows, 1, generator=rand) ** 3
    x[0, 0], x[0, 1, 1:] = 0, 0
    x[:, 2] *= 4 / x[:, 2].abs().max()
    x[1, 3] *= 2**-20
    return x.to(dtype)


def same_bits(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def candidates(x, encoding, rule):
    """float64 [candidates, ..., blocks]: bytes of scales around those of "max", which go first."""
    made = quantize(x, encoding).block_scale
    if rule == "mse":
        offsets = OFFSETS[rule] if encoding == NVFP4 else (0, -1, 1)
        tried = torch.stack([made.view(torch.uint8).int() + d for d in offsets])
        tried = tried.clamp(*((1, 126) if encoding == NVFP4 else (0, 254)))
        return tried.to(torch.uint8).view(made.dtype).double()
    amax = x.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    four = amax / 4 / matrix_scale_of(x, NVFP4)[:, None, None]
    four = torch.where(amax == 0, 1.0, four).clamp(2**-9, 448).to(made.dtype)
    return torch.stack([made.double(), four.double()])


def errors(x, scales, matrix, block):
    """float64 [..., blocks] of squared errors, the codes rounded by ml_dtypes; and these codes."""
    x, step = x.float().unflatten(-1, (-1, block)), (scales.float() * matrix)[..., None]
    codes = (x / step).nan_to_num(0).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    numbers = torch.from_numpy(codes.astype(np.float64))
    return (numbers * step.double() - x).square().sum(-1), numbers


@pytest.mark.parametrize(("encoding", "rule"), RULES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernels", [True, False])
def test_the_best_of_the_candidates(encoding, rule, dtype, kernels, monkeypatch):
    if not kernels:
        monkeypatch.delitem(search.BLOCK_KERNELS, "cpu")
    monkeypatch.setattr(search, "_CPU_PANEL", 1000)  # several panels, the last one short
    x, nv = weight(dtype=dtype), encoding == NVFP4
    q, block = quantize(x, encoding, scales=rule), 16 if nv else 32
    matrix = q.decode_scale[:, None, None] if nv else 1.0
    if nv:
        assert torch.equal(q.decode_scale, matrix_scale_of(x, NVFP4))
    tried = candidates(x, encoding, rule)
    of_all = torch.stack([errors(x, t, matrix, block)[0] for t in tried])
    chosen = q.block_scale.double()
    assert (tried == chosen).any(0).all()
    got, codes = errors(x, chosen, matrix, block)
    assert (got <= of_all.amin(0) * (1 + 1e-5)).all()
    assert (got < of_all[0]).any(), "else this is no test of a search"
    # the first of equal ones
    clear = (of_all[1:] > of_all[0] * (1 - 1e-5)).all(0)
    assert torch.equal(chosen[clear], tried[0][clear])
    want = (codes * (chosen.float() * matrix)[..., None]).flatten(-2)
    torch.testing.assert_close(dequantize(q).double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", ["max", "four_over_six", "mse"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "int4_64", "int4_128_f16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_have_the_bits_of_plain_torch(name, rule, dtype, monkeypatch):
    """A last group of blocks that is short, ties, signed zeros, subnormals, numbers that saturate,
    and signs that are only marked.
    """
    encoding = find(name)
    if rule not in ("max", *encoding.scales[0].others):
        return
    x = torch.cat([weight(23, 384).flatten(0, 1), (weight(17, 384).flatten(0, 1) * 8).round() / 8])
    x[0], x[1], x[2, ::3] = -0.0, x[1] * 2.0**-14, -0.0
    x = torch._neg_view(x.to(dtype))
    scale = None if name != "nvfp4" else matrix_scale_of(x, encoding) / 4
    found = quantize(x, encoding, scale, rule)
    monkeypatch.setitem(search.BLOCK_KERNELS, "cpu", lambda x, element: None)
    want = quantize(x, encoding, scale, rule)
    assert all(map(same_bits, found, want))


def any_blocks(n: int, block: int, draw: torch.Generator) -> torch.Tensor:
    """f32 [n, block]: of all sizes, with zeros, subnormal, ties, one number, zeros, huge, usual."""
    x = torch.randn(8, n // 8, block, generator=draw)
    x[0] *= torch.randint(-149, 120, (n // 8, 1), generator=draw).float().exp2()
    x[1] *= torch.rand(n // 8, block, generator=draw) < 0.4
    x[2] *= 2.0**-140
    x[3] = (x[3] * 8).round() / 4
    x[4, :, 1:], x[5] = 0, 0
    x[6] *= 2.0**125
    return x.flatten(0, 1)


@examples(10)
@given(
    st.sampled_from(["nvfp4", "mxfp4", "int4"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**32),
)
@pytest.mark.compiler
def test_any_steps_have_one_winner(name, dtype, seed):
    """Steps that have nothing to do with a block, 0 and infinity among them: plain torch and the
    kernels of each ISA level take one of which float64 has no better one.
    """
    encoding, n, draw = find(name), 256, torch.Generator().manual_seed(seed)
    scale, element = encoding.scales[0], encoding.element
    x = any_blocks(n, scale.block, draw).to(dtype).nan_to_num()
    least, largest = search._limits(scale)
    kind = search._INTEGERS[scale.dtype.itemsize]
    scales = torch.randint(least, largest + 1, (12, n), generator=draw).to(kind)
    scales[torch.rand(12, n, generator=draw) < 0.1] = least
    scales, outers = scales.view(scale.dtype), torch.ones(n)
    if name != "int4":
        outers[::2] = torch.randint(-149, 121, (n // 2,), generator=draw).float().exp2()
        outers[::7] = 0
    which = search._least_errors(element, x, scales, outers)
    for level in isa.available():
        with options.override(cpu_isa=level):
            found = CPUBlockKernels.find(x, element).least_errors(x, scales, outers)
        assert torch.equal(found, which), level
    step = (scales.float() * outers)[..., None]
    codes = element.encode(x.float() / step.masked_fill(step == 0, 1.0))
    off = element.decode(codes.int()).double() * step.double() - x.double()
    error = off.square().sum(-1).nan_to_num(torch.inf).clamp(max=1e38)  # float32 has no larger ones
    rounding = (x.double().abs().amax(-1) * 2.0**-22).square() * scale.block + 2.0**-140
    assert (error.gather(0, which.long()[None]) <= error.amin(0) * (1 + 1e-5) + rounding).all()


@pytest.mark.parametrize(("encoding", "rule"), RULES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.compiler
def test_odd_numbers_and_scales_have_one_result(encoding, rule, monkeypatch):
    x, find = weights_to_round(len(ODD_SCALES), 16, 64), search.BLOCK_KERNELS["cpu"]
    x[-1, 5, 5] = torch.inf
    for given_scale in (ODD_SCALES, ODD_SCALES.flip(0)) if encoding == NVFP4 else (None,):
        monkeypatch.setitem(search.BLOCK_KERNELS, "cpu", lambda *_: None)
        want = quantize(x, encoding, given_scale, rule)
        monkeypatch.setitem(search.BLOCK_KERNELS, "cpu", find)
        for level in isa.available():
            with options.override(cpu_isa=level):
                each = [
                    quantize(m, encoding, None if given_scale is None else given_scale[i], rule)
                    for i, m in enumerate(x)
                ]
            assert_same_bits([torch.stack(parts) for parts in zip(*each, strict=True)], [*want])


@pytest.mark.compiler
def test_kernels_that_do_not_compile_are_said_once(monkeypatch, caplog):
    """With what the compiler says; plain torch then computes the same."""
    text = "int missing = nothing;"
    monkeypatch.setattr(blocks, "blocks_source", lambda level: LibrarySource(text, "blocks", level))
    monkeypatch.setattr(warn, "_said", set())
    monkeypatch.setattr(blocks, "_library", cache(blocks._library.__wrapped__))
    x = weight()
    found = [quantize(x, NVFP4, scales="mse") for _ in range(2)]
    (said,) = caplog.messages
    assert said.startswith("scales are searched by torch, ")
    assert "blocks does not compile" in said
    assert "error: " in said
    monkeypatch.setitem(search.BLOCK_KERNELS, "cpu", lambda *_: None)
    for made in found:
        assert_same_bits([*made], [*quantize(x, NVFP4, scales="mse")])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_without_codes_are_those_of_plain_torch(value, dtype, monkeypatch):
    x = weight(dtype=dtype)
    x[1, 2, 3] = value
    found = quantize(x, MXFP4, scales="mse")
    monkeypatch.setitem(search.BLOCK_KERNELS, "cpu", lambda x, element: None)
    assert all(map(same_bits, found, quantize(x, MXFP4, scales="mse")))


def test_limits_of_block_scales():
    """A block at 448, for which nothing is larger; blocks of zeros; a given scale of the matrix
    with which all blocks saturate.
    """
    x = weight()
    for rule in ("four_over_six", "mse"):
        q = quantize(x, NVFP4, scales=rule)
        assert float(q.block_scale.float().amax()) <= 448
        assert q.block_scale[0, 0].float().eq(1).all()
        assert not q.codes[0, 0].any()
        saturated = quantize(x, NVFP4, torch.tensor([1e-9, 1e-9]), rule)
        assert saturated.block_scale[0, 2].float().eq(448).all()
    zeros = quantize(torch.zeros(2, 16, 32), NVFP4, scales="mse")
    assert all(map(torch.equal, zeros, quantize(torch.zeros(2, 16, 32), NVFP4)))


@pytest.mark.parametrize(("encoding", "rule"), RULES, ids=lambda v: getattr(v, "name", v))
def test_programs_search_by_the_rule_that_they_name(encoding, rule):
    """On CPUs in plain torch: the kernel that rounds there knows "max" alone."""
    x = weight()
    program = _program(*x.shape[1:], x.dtype, encoding.name, "linear", False, rule)
    found, want = torch.ops.fusion_moe.run(program, [x], [2]), quantize(x, encoding, scales=rule)
    assert all(map(same_bits, found, want))
    assert not same_bits(found[1], quantize(x, encoding).block_scale)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bytes_on_any_number_of_threads(threads):
    before, x = torch.get_num_threads(), weight(128, 1024)
    want = quantize(x, NVFP4, scales="mse")
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, quantize(x, NVFP4, scales="mse"), want))
    finally:
        torch.set_num_threads(before)


def test_the_nearest_number_is_that_of_the_code():
    x = torch.cat([torch.arange(-800, 801) / 100, torch.tensor([0.25, 5.0, 1e-30, 3e38, -3e38])])
    assert torch.equal(E2M1.nearest(x), E2M1.decode(E2M1.encode(x)))


def test_max_is_what_it_was():
    x = weight()
    assert all(map(torch.equal, quantize_weight(x, NVFP4), torch.ops.fusion_moe.nvfp4_quantize(x)))
    assert all(map(torch.equal, quantize_weight(x, NVFP4), quantize(x, NVFP4, scales="max")))


@pytest.mark.parametrize("rule", search.RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(rule, bad):
    x = weight()
    x[1, 2, 3] = bad
    with pytest.raises(NonFiniteError, match=r"the first at \(1, 2, 3\)"):
        quantize_weight(x, NVFP4, scales=rule)


def test_rules(golden):
    assert [search.usual_rule(e) for e in (NVFP4, MXFP4, INT4, FP8)] == ["mse", "max", "mse", "max"]
    golden(
        messages(
            {
                f"{rule} of {encoding.name}": partial(quantize, weight(), encoding, scales=rule)
                for encoding, rule in ((NVFP4, "msee"), (MXFP4, "four_over_six"), (FP8, "mse"))
            }
        )
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_takes_the_best_of_some_sizes(dtype):
    """22/32 to 35/32 of the scale for amax, counted in float64; bf16(amax / 7.5) wins ties."""
    x = weight(dtype=dtype)
    blocks = x.float().unflatten(-1, (-1, 32))
    amax, factors = blocks.abs().amax(-1), [32, *range(22, 32), *range(33, 36)]
    tried = torch.stack([amax * (f / 32) / torch.tensor(7.5) for f in factors]).bfloat16().float()
    tried = torch.where(tried == 0, 2.0**-7, tried)
    codes = (blocks / tried[..., None]).round().clamp(-8, 7).double()
    errors = (codes * tried.double()[..., None] - blocks).square().sum(-1)
    q = quantize(x, INT4, scales="mse")
    off = (dequantize(q).double() - x).unflatten(-1, (-1, 32)).square().sum(-1)
    assert (off <= errors.amin(0) * (1 + 1e-5)).all()
    assert (off < errors[0]).any()
    clear = (errors[1:] > errors[0] * (1 - 1e-5)).all(0)
    assert torch.equal(q.block_scale[clear].float(), tried[0][clear])
