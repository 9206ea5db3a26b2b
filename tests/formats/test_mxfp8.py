"""MXFP8 against ml_dtypes and torchao, bit for bit, and at its edges."""

import math

import mxfp8
import numpy as np
import pytest
import torch

from fusion_moe.encodings import MXFP8, MXFP8_COLUMNS, Quantized, dequantize, quantize

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ALONG = {-1: MXFP8, -2: MXFP8_COLUMNS}


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def test_what_is_derived():
    assert [(p.name, p.dtype) for p in MXFP8.parts] == [
        (p.name, p.dtype) for p in MXFP8_COLUMNS.parts
    ]
    assert [(p.name, p.dtype) for p in MXFP8.parts] == [("codes", E4M3), ("block_scale", E8M0)]
    assert [MXFP8.part_shape(p, (2,), 3, 64) for p in MXFP8.parts] == [(2, 3, 64), (2, 3, 2)]
    assert [MXFP8_COLUMNS.part_shape(p, (2,), 64, 3) for p in MXFP8.parts] == [
        (2, 64, 3),
        (2, 2, 3),
    ]
    assert (MXFP8.weight_bits, MXFP8.block) == (8.25, 32)


def assert_encoded(x: torch.Tensor, axis: int = -1) -> Quantized:
    """x along an axis, which has ml_dtypes' bytes."""
    codes, exponents = mxfp8.encoded(x, axis)
    q = quantize(x, encoding=ALONG[axis])
    np.testing.assert_array_equal(bytes_of(q.codes).numpy(), codes.view(np.uint8))
    np.testing.assert_array_equal(bytes_of(q.block_scale).numpy(), exponents + 127)
    return q


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_ml_dtypes(axis, dtype):
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(96, 160, generator=g) * 2.0 ** torch.randint(-9, 9, (96, 1), generator=g)).to(
        dtype
    )
    x[:32, :32] = 0
    q = assert_encoded(x, axis)
    assert torch.equal(dequantize(q).double(), mxfp8.rounded(x, axis))


def test_every_amax_by_ml_dtypes():
    q = assert_encoded(mxfp8.every_amax())
    # exact, infinity where amax is next to the largest
    assert torch.equal(dequantize(q), dequantize(q, torch.bfloat16).float())


@pytest.mark.judges("torchao")
def test_every_amax_by_torchao():
    """Below 2.7e-36 torchao multiplies by 1."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = mxfp8.every_amax()
    scale, codes = to_mx(x, E4M3, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    q = quantize(x, encoding=MXFP8)
    assert torch.equal(bytes_of(q.block_scale), bytes_of(scale).view(-1, 1))
    large = x[:, 3] > 2.7e-36
    assert torch.equal(bytes_of(q.codes)[large], bytes_of(codes)[large])


def test_edges():
    """Zeros, either side of the least scale, of a power of two and of what saturates; infinity,
    NaN.
    """
    one = 448 * 2.0**-8
    rows = [
        0.0,
        448 * 2.0**-128,
        448 * 2.0**-127,
        one,
        np.nextafter(np.float32(one), np.float32(9)),
        3.4e38,
        math.inf,
        math.nan,
    ]
    x = torch.zeros(len(rows), 32)
    x[:, 7], x[:, 8] = torch.tensor(rows), -0.0
    q = quantize(x, encoding=MXFP8)
    assert bytes_of(q.block_scale).flatten().tolist() == [0, 0, 0, 119, 120, 247, 254, 255]
    assert q.codes[:, 7].float().tolist()[:5] == [0, 224, 448, 448, 224]
    assert bytes_of(q.codes)[:7, 8].tolist() == [0x80] * 7
    back = dequantize(q)
    assert back[6, 7] == math.inf
    assert back[7].isnan().all()


def test_blocks_lie_along_the_axis():
    x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(2))
    columns, rows = quantize(x, encoding=MXFP8_COLUMNS), quantize(x.mT.contiguous(), encoding=MXFP8)
    assert [tuple(t.shape) for t in columns] == [(3, 64, 96), (3, 2, 96)]
    assert all(t.is_contiguous() for t in columns)
    assert all(
        torch.equal(bytes_of(a.mT.contiguous()), bytes_of(b))
        for a, b in zip(columns, rows, strict=True)
    )
