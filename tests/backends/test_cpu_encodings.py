"""The CPU's tiers with weights of every encoding but NVFP4 (test_cpu_kernels.py), against the
reference, for every byte there is.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cpu_tiers import (
    DTYPES,
    OF_VECTORS,
    TIERS,
    program,
    same,
    same_on_any_threads,
    together,
)
from fusions import fusion_of_call

from fusion_moe.encodings import (
    ENCODINGS,
    FP8,
    FP8_CHANNEL,
    INT4,
    MXFP4,
    Encoding,
    Quantized,
    dequantize,
    quantize,
)
from fusion_moe.runtime.program import Program

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.once,
    pytest.mark.usefixtures("amx"),
    pytest.mark.slow,
]
PLAIN = ("bf16", "f16", "f32")
FORMATS = ("mxfp4", "int4", *PLAIN)
# with AMX there are kernels of its own for e2m1 codes only
TIERS_AND_FORMATS = [
    (tier, encoding)
    for encoding in FORMATS
    for tier in (TIERS if encoding == "mxfp4" else OF_VECTORS)
]
SIZES = (1, 0, 2, 3, 4, 16, 50, 300)
NAN = 255  # of e8m0
IN_RANGE = (106, 133)  # what kernels/weights/mxfp4.h has in range


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


def key_of(weight: Quantized, dtype: torch.dtype) -> tuple[object, ...]:
    return weight.encoding.name, *weight.shape, dtype


@cache
def products(tier: str) -> dict[tuple[object, ...], Program]:
    """Of all weights below that the tier has, each with its dtypes of activations, in one
    library.
    """
    cases = [(random_weights(e, len(SIZES), 133, columns(e)), DTYPES) for e in FORMATS]
    cases += [(random_weights(e, 1, len(every_scale(e)[0]), 512), DTYPES) for e in FORMATS[:2]]
    cases += [(random_weights(e, 1, 2**16, 1), (torch.float32,)) for e in PLAIN[:2]]
    cases += [(random_weights("mxfp4", 3, 500, 96), DTYPES[:1])]
    fusions = {}
    for weight, dtypes in cases:
        for dtype in dtypes if (tier, weight.encoding.name) in TIERS_AND_FORMATS else ():
            x, ends = torch.empty(2, weight.shape[-1], dtype=dtype), torch.zeros(weight.shape[0])
            fusions[key_of(weight, dtype)] = fusion_of_call(
                "grouped_mm",
                x,
                list(weight),
                ends.int(),
                weight_format=weight.encoding.name,
                out_dtype=torch.float32,
            )
    return together(fusions, tier)


def product(tier: str, x: torch.Tensor, weight: Quantized, sizes: tuple[int, ...]) -> torch.Tensor:
    """f32, of groups of so many rows."""
    return products(tier)[key_of(weight, x.dtype)]([x, *weight, ends_of(sizes)])[0]


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
@pytest.mark.parametrize(
    ("tier", "encoding"), [t for t in TIERS_AND_FORMATS if t[1] in FORMATS[:2]]
)
def test_every_code_under_every_scale(tier, encoding, dtype):
    """Row n has block scale n; block b has code b; a row of activations picks one block."""
    code = torch.arange(16, dtype=torch.uint8)
    codes = (code | code << 4).repeat_interleave(16)
    x = torch.zeros(16, 512, dtype=dtype)
    x[torch.arange(16), torch.arange(0, 512, 32) + torch.arange(16)] = 1
    for scales in every_scale(encoding):
        parts = (
            codes.expand(1, len(scales), 256).contiguous(),
            scales[None, :, None].expand(1, -1, 16).contiguous(),
        )
        weight = Quantized(*parts, encoding=ENCODINGS[encoding])
        want = dequantize(weight)[0, :, ::32].T
        finite = want.isfinite().all(0)
        for rows in (1, 4, 16, 40, 130):  # each kernel there is for so many rows
            for first in range(0, 16, max(rows, 8)):
                picked = (torch.arange(rows) + first) % 16
                found = product(tier, x[picked], weight, (rows,))
                same(found[:, finite], want[picked][:, finite])
                # some block is infinite, or no number: times zero
                assert found[:, ~finite].isnan().all()


@pytest.mark.parametrize("tier", OF_VECTORS)
@pytest.mark.parametrize(("encoding", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_every_number(tier, encoding, dtype):
    """Subnormal, infinite and NaN ones too: K is 1."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    weight = Quantized(numbers[None, :, None].contiguous(), encoding=ENCODINGS[encoding])
    for rows in (1, 20):
        same(product(tier, torch.ones(rows, 1), weight, (rows,)), numbers.float().expand(rows, -1))


def columns(encoding: str) -> int:
    """No multiple of more than a block."""
    return 299 if encoding in PLAIN else 1312


@pytest.mark.parametrize(
    ("tier", "encoding", "scales"),
    [
        *((*both, IN_RANGE) for both in TIERS_AND_FORMATS),
        *((tier, "mxfp4", (0, NAN - 30)) for tier in TIERS),
        *((tier, "mxfp4", (IN_RANGE[0] - 2, IN_RANGE[1] + 2)) for tier in TIERS),
    ],
)
def test_groups_of_any_size(tier, encoding, scales):
    """There are columns with zeros under the smallest scale, as quantizers make them."""
    k = columns(encoding)
    weight = random_weights(encoding, len(SIZES), 133, k, scales)
    if encoding == "mxfp4":
        weight.codes[:, ::5, :16] = 0x80
        weight.block_scale.view(torch.uint8)[:, ::5, 0] = 0
    for dtype in DTYPES:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(sum(SIZES) + 2, k, generator=g).to(dtype)
        x[sum(SIZES) :] = torch.nan  # rows of no group are not read
        found, start = product(tier, x, weight, SIZES), 0
        for rows, w in zip(SIZES, dequantize(weight), strict=True):
            assert_close(found[start : start + rows], x[start : start + rows], w)
            start += rows
        assert not found[start:].any()


@pytest.mark.parametrize("tier", TIERS)
def test_threads_change_no_bit(tier):
    """Where some columns have scales out of range, which are for another kernel."""
    weight, sizes = random_weights("mxfp4", 3, 500, 96), (1, 20, 90)
    weight.block_scale.view(torch.uint8)[:, 300, 1] = 70
    x = torch.randn(sum(sizes), 96).bfloat16()
    same_on_any_threads(lambda: product(tier, x, weight, sizes))


@pytest.mark.parametrize("tier", [t for t in TIERS if t in (TIERS[0], "avx2")])
@pytest.mark.parametrize(
    ("encoding", "k"), [(FP8, 336), (FP8_CHANNEL, 200)], ids=["blocks", "rows"]
)
def test_fp8_of_all_codes_and_scales(tier: str, encoding: Encoding, k: int) -> None:
    """Scales of all sizes; four rows have a code, or a scale, that is no number or infinite."""
    groups, n, g = (1, 3, 0, 8, 13), 64, torch.Generator().manual_seed(0)
    good = torch.tensor([row for row in range(n) if row not in (20, 37, 50, 51)])
    codes = torch.randint(0, 256, (len(groups), n, k), generator=g, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 1
    codes[:, 50, k - 1], codes[:, 51, 0] = 127, 255
    scale = torch.rand(len(groups), n, -(-k // 128) if encoding is FP8 else 1, generator=g) + 0.5
    for group in (0, 4):  # the others have scales of the kernel for bytes alone
        scale[group, :16] *= 2.0 ** torch.arange(-128, 112, 15)[:, None]
    scale[:, 20, -1], scale[:, 37, 0] = torch.inf, torch.nan
    weight = Quantized(codes.view(torch.float8_e4m3fn), scale, encoding=encoding)
    dequantized = dequantize(weight)
    for dtype in DTYPES[::2]:
        x = torch.randn(sum(groups), k, generator=g).to(dtype)
        fusion = fusion_of_call(
            "grouped_mm",
            x,
            list(weight),
            ends_of(groups),
            weight_format=encoding.name,
            out_dtype=torch.float32,
        )
        (found,) = program(fusion, tier)([x, *weight, ends_of(groups)])
        for rows, out, w in zip(x.split(groups), found.split(groups), dequantized, strict=True):
            same(out.isnan().any(0), ~(torch.isin(torch.arange(n), good)) & (len(rows) > 0))
            assert_close(out[:, good], rows, w[good])
