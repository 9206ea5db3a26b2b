"""dgrad of weights in 4 bits on the CPU, each tier of this machine, against float64: scales that
kernels for pairs take, and others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from cpu_tiers import (
    DTYPES,
    OF_VECTORS,
    check_segments,
    same,
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

pytestmark = [pytest.mark.compiler, pytest.mark.once, pytest.mark.slow]
SIZES = (1, 0, 6, 7, 70, 0, 300)
ENCODED = ("nvfp4", "mxfp4", "int4")


Shape = tuple[str, tuple[tuple[str, tuple[int, ...]], ...], torch.dtype]


def shape_of(weight: Quantized, dtype: torch.dtype) -> Shape:
    """The encoding, the types of the weight's parts, and the dtype of rows."""
    parts = tuple((dtype_name(t.dtype), tuple(t.shape)) for t in weight)
    return weight.encoding.name, parts, dtype


def product(shape: Shape, rest: Rest | None = None) -> Fusion:
    """dy [M, N] of a dtype, ends, the parts of a weight [G, N, K] -> f32 [M/g, K]. rest: what is
    fused after it.
    """
    encoding, parts, dtype = shape
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


ODD = ((45, 160), (96, 32), (1, 64))
RUNS = ((0.5, 2.0), (1.0, 0.0), (-3.0, 1e-3), (1e-35, 1.0), (1e30, 1e-30))


@cache
def products(tier: str) -> dict[Shape, Program]:
    """Of all weights below, in one library."""
    weights = [(weight_of("nvfp4", len(SIZES), n, 80, RUNS[0]), DTYPES[:1]) for n in (96, 90)]
    for encoding in ENCODED:
        weights += [(weight_of(encoding, len(SIZES), n, k), DTYPES) for n, k in ODD]
        weights += [(weight_of(encoding, len(SIZES), 64, 96), DTYPES[:1])]
    shapes = [shape_of(weight, dtype) for weight, dtypes in weights for dtype in dtypes]
    return together({shape: product(shape) for shape in shapes}, tier)


def check(tier: str, weight: Quantized, dtype: torch.dtype = torch.bfloat16) -> None:
    """N products, each rounded once, N sums of them, and the one factor of a sum."""
    n = weight.shape[1]
    dy = torch.randn(sum(SIZES) + 3, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    dy[sum(SIZES) :] = torch.nan  # rows of no group
    compiled = products(tier)[shape_of(weight, dtype)]
    found = compiled([dy, ends_from_sizes(torch.tensor(SIZES)), *weight])[0]
    dy, w = dy.nan_to_num(), dequantize(weight).double()
    want, sizes_of = (
        expected("grouped_mm_t", dy, w, SIZES),
        expected("grouped_mm_t", dy.abs(), w.abs(), SIZES),
    )
    same(found.isnan(), want.isnan())
    near = (found.double() - want).abs() <= (n + 4) * 2.0**-24 * sizes_of + 2.0**-140
    assert (near | want.isnan()).all()


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_every_dtype_and_odd_sizes(tier, encoding):
    for n, k in ODD:
        for dtype in DTYPES:
            check(tier, weight_of(encoding, len(SIZES), n, k), dtype)


@pytest.mark.parametrize("n", [96, 90], ids=["even", "odd"])
@pytest.mark.parametrize("scales", RUNS, ids=str)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_runs_with_a_scale_each(tier, scales, n):
    """Of an even or an odd number of rows, and scales that keep products among the normal numbers
    or do not.
    """
    check(tier, weight_of("nvfp4", len(SIZES), n, 80, scales))


@pytest.mark.parametrize(
    "scales", [IN_RANGE, (IN_RANGE[0] - 2, IN_RANGE[1] + 2), (0, 60), (200, NAN - 30)], ids=str
)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_every_scale_of_mxfp4(tier, scales):
    check(tier, random_weights("mxfp4", len(SIZES), 64, 96, scales))


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_a_scale_that_is_no_number(tier, encoding):
    """Spoils the columns of its block in its group, and nothing else."""
    weight = weight_of(encoding, len(SIZES), 64, 96)
    weight[1].view(torch.uint8)[4, 17, 1] = NAN if encoding == "mxfp4" else 0x7F
    check(tier, weight)


INTERLEAVED = (0, 1, 8)


def apart(encoding: str, interleave: int) -> Fusion:
    return product(shape_of(weight_of(encoding, 3, 40, 96), torch.bfloat16), gated(interleave, 48))


@cache
def all_apart(tier: str) -> dict[tuple[str, int], Program]:
    return together(
        {(encoding, i): apart(encoding, i) for encoding in ENCODED for i in INTERLEAVED}, tier
    )


@pytest.mark.parametrize("interleave", INTERLEAVED)
@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_columns_that_lie_apart(tier, encoding, interleave):
    """What is fused after it reads two columns of the product."""
    inputs = [
        small_integers(50, 40),
        torch.tensor([7, 7, 45], dtype=torch.int32),
        *weight_of(encoding, 3, 40, 96),
    ]
    check_segments(apart(encoding, interleave), tier, inputs, all_apart(tier)[encoding, interleave])
