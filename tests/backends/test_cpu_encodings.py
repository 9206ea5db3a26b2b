"""The CPU's tiers with weights of every encoding but NVFP4 (test_cpu_kernels.py), against the
reference, for every byte there is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_tiers import (
    DTYPES,
    TIERS,
    check_segments,
    emulated_amx,
    fusion_of_call,
    program,
    same,
    same_on_any_threads,
    together,
)

from fusion_moe.encodings import ENCODINGS, INT4, MXFP4, Quantized, dequantize, quantize
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.types import DTYPES as DTYPE_OF
from fusion_moe.nn import swiglu

pytestmark = [pytest.mark.compiler, pytest.mark.once]
PLAIN = ("bf16", "f16", "f32")
FORMATS = ("mxfp4", "int4", *PLAIN)
NAN = 255  # of e8m0
IN_RANGE = (106, 133)  # what kernels/weights/mxfp4.h has in range


@pytest.fixture(autouse=True, scope="module")
def amx() -> Iterator[None]:
    with emulated_amx():
        yield


def mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
    return Quantized(codes, scales.to(torch.uint8).view(torch.float8_e8m0fnu), encoding=MXFP4)


def every_scale(encoding: str) -> list[torch.Tensor]:
    """Scales [n], one for each row of a weight: every byte, or numbers of all exponents and signs;
    and those in range.
    """
    if encoding == "int4":
        return [torch.arange(-(2**15), 2**15, 61).to(torch.int16).view(torch.bfloat16)]
    byte = torch.arange(256)
    return [
        s.to(torch.uint8).view(torch.float8_e8m0fnu)
        for s in (byte, IN_RANGE[0] + byte % (IN_RANGE[1] - IN_RANGE[0]))
    ]


def random_weights(
    encoding: str, groups: int, n: int, k: int, scales: tuple[int, int] = IN_RANGE, seed: int = 0
) -> Quantized:
    """[groups, n, k]. scales: of MXFP4, the first byte and the one after the last."""
    g = torch.Generator().manual_seed(seed)
    if encoding in PLAIN:
        return quantize(torch.randn(groups, n, k, generator=g), encoding=ENCODINGS[encoding])
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    if encoding == "int4":
        return Quantized(
            codes, torch.rand(groups, n, k // 32, generator=g).bfloat16() / 8, encoding=INT4
        )
    return mxfp4(codes, torch.randint(*scales, (groups, n, k // 32), generator=g))


def product(tier: str, x: torch.Tensor, weight: Quantized, sizes: tuple[int, ...]) -> torch.Tensor:
    """f32, of groups of so many rows."""
    return program(fusion_of(x, weight, sizes), tier)([x, *weight, ends_of(sizes)])[0]


def fusion_of(x: torch.Tensor, weight: Quantized, sizes: tuple[int, ...]) -> Fusion:
    return fusion_of_call(
        "grouped_mm",
        x,
        list(weight),
        ends_of(sizes),
        weight_format=weight.encoding.name,
        out_dtype=torch.float32,
    )


def ends_of(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def assert_close(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """K products and K sums of them, each rounded once, to float32 of any size; w [N, K] is
    finite.
    """
    k, exact, dequantized = x.shape[1], x.double(), w.double()
    bound = (k + 3) * (2.0**-24 * (exact.abs() @ dequantized.abs().T) + 2.0**-149)
    assert ((found.double() - exact @ dequantized.T).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("encoding", [MXFP4, INT4], ids=lambda e: e.name)
def test_every_code_under_every_scale(encoding, tier, dtype):
    """Row n has block scale n; block b has code b; a row of activations picks one block."""
    code = torch.arange(16, dtype=torch.uint8)
    codes = (code | code << 4).repeat_interleave(16)
    x = torch.zeros(16, 512, dtype=dtype)
    x[torch.arange(16), torch.arange(0, 512, 32) + torch.arange(16)] = 1
    for scales in every_scale(encoding.name):
        parts = (
            codes.expand(1, len(scales), 256).contiguous(),
            scales[None, :, None].expand(1, -1, 16).contiguous(),
        )
        weight = Quantized(*parts, encoding=encoding)
        want = dequantize(weight)[0, :, ::32].T
        finite = want.isfinite().all(0)
        for rows in (1, 4, 16, 40, 130):  # each kernel there is for so many rows
            for first in range(0, 16, max(rows, 8)):
                picked = (torch.arange(rows) + first) % 16
                found = product(tier, x[picked], weight, (rows,))
                same(found[:, finite], want[picked][:, finite])
                # some block is infinite, or no number: times zero
                assert found[:, ~finite].isnan().all()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("encoding", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_every_number(tier, encoding, dtype):
    """Subnormal, infinite and NaN ones too: K is 1."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    weight = Quantized(numbers[None, :, None].contiguous(), encoding=ENCODINGS[encoding])
    for rows in (1, 20):
        same(product(tier, torch.ones(rows, 1), weight, (rows,)), numbers.float().expand(rows, -1))


@pytest.mark.parametrize(
    ("encoding", "scales"),
    [
        ("mxfp4", IN_RANGE),
        ("mxfp4", (0, NAN - 30)),
        ("mxfp4", (IN_RANGE[0] - 2, IN_RANGE[1] + 2)),
        *((name, IN_RANGE) for name in FORMATS[1:]),
    ],
)
@pytest.mark.parametrize("tier", TIERS)
def test_groups_of_any_size(tier, encoding, scales):
    """K is no multiple of more than a block, and there are columns with zeros under the smallest
    scale, as quantizers make them.
    """
    n, k, sizes = 133, 299 if encoding in PLAIN else 1312, (1, 0, 2, 3, 4, 16, 50, 300)
    weight = random_weights(encoding, len(sizes), n, k, scales)
    if encoding == "mxfp4":
        weight.codes[:, ::5, :16] = 0x80
        weight.block_scale.view(torch.uint8)[:, ::5, 0] = 0
    rows_of = {
        dtype: torch.randn(sum(sizes) + 2, k, generator=torch.Generator().manual_seed(1)).to(dtype)
        for dtype in DTYPES
    }
    for dtype, compiled in together(
        {dtype: fusion_of(x, weight, sizes) for dtype, x in rows_of.items()}, tier
    ).items():
        x = rows_of[dtype]
        x[sum(sizes) :] = torch.nan  # rows of no group are not read
        found, start = compiled([x, *weight, ends_of(sizes)])[0], 0
        for rows, w in zip(sizes, dequantize(weight), strict=True):
            assert_close(found[start : start + rows], x[start : start + rows], w)
            start += rows
        assert not found[start:].any()


@pytest.mark.parametrize("encoding", ["mxfp4", "int4", "bf16"])
@pytest.mark.parametrize("tier", TIERS)
def test_threads_change_no_bit(tier, encoding):
    """Nor do they where some columns have scales out of range, which are for another kernel."""
    weight, sizes = random_weights(encoding, 3, 500, 96), (1, 20, 90)
    if encoding == "mxfp4":
        weight.block_scale.view(torch.uint8)[:, 300, 1] = 70
    x = torch.randn(sum(sizes), 96).bfloat16()
    same_on_any_threads(lambda: product(tier, x, weight, sizes))


@pytest.mark.parametrize("encoding", FORMATS)
@pytest.mark.parametrize("tier", TIERS)
def test_experts(tier, encoding):
    """What is fused around the products, each kernel against its segment. Weights of small
    integers, or halves of them.
    """
    groups, hidden, inner = 4, 96, 64
    g = torch.Generator().manual_seed(2)
    gate_up, down = (
        quantize(
            torch.randint(-2, 3, (groups, *shape), generator=g).float(),
            encoding=ENCODINGS[encoding],
        )
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    ids, w = (
        torch.randint(0, groups, (40, 2), generator=g),
        2.0 ** torch.randint(-3, 1, (40, 2), generator=g),
    )
    dtype = DTYPE_OF[encoding] if encoding in PLAIN else torch.bfloat16
    bias = torch.randint(-3, 4, (groups, 2 * inner), generator=g).to(dtype)
    x = torch.randint(-3, 4, (40, hidden), generator=g).to(dtype)
    fusion = fusion_of_call(
        "fused_experts",
        x,
        ids,
        w,
        list(gate_up),
        list(down),
        bias,
        weight_format=encoding,
        activation=swiglu(interleave=8, limit=7.0),
    )
    check_segments(fusion, tier, [x, ids, w, *gate_up, *down, bias])
