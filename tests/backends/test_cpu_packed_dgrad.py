"""dgrad of weights in 4 bits on the CPU, each tier of this machine, against float64: scales that
kernels for pairs take, and others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from cpu_tiers import (
    DTYPES,
    TIERS,
    check_segments,
    emulated_amx,
    program,
    same,
    same_on_any_threads,
    small_integers,
    together,
)
from test_cpu_encodings import IN_RANGE, NAN, random_weights
from test_cpu_training import Rest, expected, gated

from fusion_moe import FusionDefinition
from fusion_moe.encodings import NVFP4, Quantized, dequantize, quantize
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.types import dtype_name
from fusion_moe.layouts.groups import ends_from_sizes
from fusion_moe.runtime.program import Program

pytestmark = [pytest.mark.compiler, pytest.mark.once]
SIZES = (1, 0, 6, 7, 70, 0, 300)
ENCODED = ("nvfp4", "mxfp4", "int4")


@pytest.fixture(autouse=True, scope="module")
def amx() -> Iterator[None]:
    with emulated_amx():
        yield


@cache
def product(
    encoding: str,
    parts: tuple[tuple[str, tuple[int, ...]], ...],
    dtype: torch.dtype,
    rest: Rest | None = None,
) -> Fusion:
    """dy [M, N] of a dtype, ends, the parts of a weight [G, N, K] -> f32 [M/g, K]. rest: what is
    fused after it.
    """
    fd = FusionDefinition()
    rows, (groups, n, _) = fd.define_size("m"), parts[0][1]
    dy = fd.define_tensor(shape=[rows, n], dtype=dtype_name(dtype))
    ends = fd.groups_of(fd.define_tensor(shape=[groups], dtype="i32"), rows)
    w = fd.ops.pack(
        *(fd.define_tensor(shape=list(shape), dtype=name) for name, shape in parts),
        encoding=encoding,
        layout="linear",
    )
    made = fd.ops.grouped_mm_t(fd.ops.partition(dy, ends), w, ends)
    fd.add_output(rest(fd, made, ends) if rest else made)
    return fd.fusion()


def fusion_of(weight: Quantized, dtype: torch.dtype, rest: Rest | None = None) -> Fusion:
    return product(
        weight.encoding.name,
        tuple((dtype_name(t.dtype), tuple(t.shape)) for t in weight),
        dtype,
        rest,
    )


def weight_of(
    encoding: str, groups: int, n: int, k: int, scales: Sequence[float] = ()
) -> Quantized:
    """Random numbers. scales: of runs of rows of NVFP4, other ones in every second group."""
    if encoding != "nvfp4":
        return random_weights(encoding, groups, n, k)
    weight = quantize(
        torch.randn(groups, n, k, generator=torch.Generator().manual_seed(0)), encoding=NVFP4
    )
    return (
        weight.with_(
            decode_scale=torch.tensor([scales if g % 2 else scales[::-1] for g in range(groups)])
        )
        if scales
        else weight
    )


def check(tier: str, weight: Quantized, dtype: torch.dtype, sizes: Sequence[int] = SIZES) -> None:
    check_all(tier, [(weight, dtype)], sizes)


def check_all(
    tier: str, cases: Sequence[tuple[Quantized, torch.dtype]], sizes: Sequence[int] = SIZES
) -> None:
    programs = together({i: fusion_of(*case) for i, case in enumerate(cases)}, tier)
    for i, case in enumerate(cases):
        assert_near(programs[i], *case, sizes)


def assert_near(
    compiled: Program, weight: Quantized, dtype: torch.dtype, sizes: Sequence[int]
) -> None:
    """N products, each rounded once, N sums of them, and the one factor of a sum."""
    n = weight.shape[1]
    dy = torch.randn(sum(sizes) + 3, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    dy[sum(sizes) :] = torch.nan  # rows of no group
    found = compiled([dy, ends_from_sizes(torch.tensor(sizes)), *weight])[0]
    dy, w = dy.nan_to_num(), dequantize(weight).double()
    want, sizes_of = (
        expected("grouped_mm_t", dy, w, sizes),
        expected("grouped_mm_t", dy.abs(), w.abs(), sizes),
    )
    same(found.isnan(), want.isnan())
    near = (found.double() - want).abs() <= (n + 4) * 2.0**-24 * sizes_of + 2.0**-140
    assert (near | want.isnan()).all()


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("tier", TIERS)
def test_every_dtype_and_odd_sizes(tier, encoding):
    shapes = ((45, 160), (96, 32), (1, 64))
    check_all(
        tier,
        [(weight_of(encoding, len(SIZES), n, k), dtype) for dtype in DTYPES for n, k in shapes],
    )


@pytest.mark.parametrize("n", [96, 90], ids=["even", "odd"])
@pytest.mark.parametrize(
    "scales", [(0.5, 2.0), (1.0, 0.0), (-3.0, 1e-3), (1e-35, 1.0), (1e30, 1e-30)], ids=str
)
@pytest.mark.parametrize("tier", TIERS)
def test_runs_with_a_scale_each(tier, scales, n):
    """Of an even or an odd number of rows, and scales that keep products among the normal numbers
    or do not.
    """
    check(tier, weight_of("nvfp4", len(SIZES), n, 80, scales), torch.bfloat16)


@pytest.mark.parametrize(
    "scales", [IN_RANGE, (IN_RANGE[0] - 2, IN_RANGE[1] + 2), (0, 60), (200, NAN - 30)], ids=str
)
@pytest.mark.parametrize("tier", TIERS)
def test_every_scale_of_mxfp4(tier, scales):
    check(tier, random_weights("mxfp4", len(SIZES), 64, 96, scales), torch.bfloat16)


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_scale_that_is_no_number(tier, encoding):
    """Spoils the columns of its block in its group, and nothing else."""
    weight = weight_of(encoding, len(SIZES), 64, 96)
    weight[1].view(torch.uint8)[4, 17, 1] = NAN if encoding == "mxfp4" else 0x7F
    check(tier, weight, torch.bfloat16)


INTERLEAVED = (0, 1, 8)


def apart(encoding: str, interleave: int) -> Fusion:
    return fusion_of(weight_of(encoding, 3, 40, 96), torch.bfloat16, gated(interleave, 48))


@cache
def all_apart(tier: str) -> dict[tuple[str, int], Program]:
    return together(
        {(encoding, i): apart(encoding, i) for encoding in ENCODED for i in INTERLEAVED}, tier
    )


@pytest.mark.parametrize("interleave", INTERLEAVED)
@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("tier", TIERS)
def test_columns_that_lie_apart(tier, encoding, interleave):
    """What is fused after it reads two columns of the product."""
    inputs = [
        small_integers(50, 40),
        torch.tensor([7, 7, 45], dtype=torch.int32),
        *weight_of(encoding, 3, 40, 96),
    ]
    check_segments(apart(encoding, interleave), tier, inputs, all_apart(tier)[encoding, interleave])


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("tier", TIERS)
def test_threads_change_no_bit(tier, encoding):
    weight = weight_of(encoding, len(SIZES), 128, 416)
    dy = torch.randn(sum(SIZES), 128).bfloat16()
    compiled = program(fusion_of(weight, torch.bfloat16), tier)
    same_on_any_threads(lambda: compiled([dy, ends_from_sizes(torch.tensor(SIZES)), *weight]))
