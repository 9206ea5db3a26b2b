"""The quantizers of Transformer Engine's recipe Float8BlockScaling, by its published rules in numpy
and ml_dtypes (tests/fp8_block.py), bit for bit, and at their edges.
"""

import math

import fp8_block
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fusion_moe.encodings import (
    FP8_BLOCKS_F32,
    FP8_COLUMNS,
    FP8_COLUMNS_F32,
    FP8_E8M0,
    FP8_ROWS,
    FP8_ROWS_F32,
    Encoding,
    Quantized,
    dequantize,
    quantize,
)

# tile, whether scales are powers of two -> the encoding
ENCODINGS = {
    ((1, 128), True): FP8_ROWS,
    ((128, 1), True): FP8_COLUMNS,
    ((128, 128), True): FP8_E8M0,
    ((1, 128), False): FP8_ROWS_F32,
    ((128, 1), False): FP8_COLUMNS_F32,
    ((128, 128), False): FP8_BLOCKS_F32,
}
ROWS = [FP8_ROWS, FP8_ROWS_F32]


def numbers(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """f32[n, k] of many sizes, tiles of zeros among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=g) * 2.0 ** torch.randint(-20, 20, (n, k), generator=g)
    x[:128, :128] = 0
    return x


def scales_of_tiles(q: Quantized, tile: tuple[int, int]) -> np.ndarray:
    """The scale of each tile; those of 128 x 128 are stored for each of their rows."""
    found = q.block_scale.float().numpy()
    if tile == (128, 128):
        np.testing.assert_array_equal(found, found[::128].repeat(128, 0)[: len(found)])
        found = found[::128]
    return found


@pytest.mark.parametrize(("tile", "power_of_two"), ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bit_for_bit(tile, power_of_two, dtype):
    x = numbers(256, 384).to(dtype)
    x[x.isinf()] = 3  # beyond float16
    codes, scales = fp8_block.encoded(x, tile, power_of_two)
    q = quantize(x, ENCODINGS[tile, power_of_two])
    np.testing.assert_array_equal(q.codes.view(torch.uint8).numpy(), codes.view(np.uint8))
    found = scales_of_tiles(q, tile)
    if q.encoding is FP8_E8M0:  # which has its least scale for zeros
        found = np.where(found == 2.0**-127, np.float32(1), found)
    np.testing.assert_array_equal(found, scales)
    assert torch.equal(dequantize(q).double(), fp8_block.rounded(x, tile, power_of_two))


def every_amax() -> torch.Tensor:
    """bf16[32640, 128]: a row for each finite number that is not negative, its largest one."""
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    g = torch.Generator().manual_seed(0)
    x = (amax[:, None].float() * (torch.rand(len(amax), 128, generator=g) * 2 - 1)).bfloat16()
    x[:, 5] = amax
    return x


def assert_encoded(x: torch.Tensor, encoding: Encoding) -> Quantized:
    """x in an encoding, which has Transformer Engine's codes and scales."""
    codes, scales = fp8_block.encoded(x, (1, 128), encoding is FP8_ROWS)
    q = quantize(x, encoding)
    np.testing.assert_array_equal(q.codes.view(torch.uint8).numpy(), codes.view(np.uint8))
    np.testing.assert_array_equal(q.block_scale.numpy(), scales)
    return q


@pytest.mark.parametrize("encoding", ROWS)
def test_every_amax(encoding):
    x = every_amax()
    q = assert_encoded(x, encoding)
    if encoding is FP8_ROWS:  # its numbers are those of bf16 but for the smallest of these
        usual = x[:, 5].float() > 2.0**-110
        assert torch.equal(dequantize(q)[usual], dequantize(q, torch.bfloat16).float()[usual])


@given(
    st.floats(width=32, min_value=0, max_value=float(np.finfo(np.float32).max)),
    st.floats(-1, 1, width=32),
)
def test_any_amax(amax, share):
    """Of float32, powers of two and their neighbours among them."""
    near = np.float32(448 * 2.0 ** round(math.log2(amax / 448))) if amax > 1e-30 else amax
    for most in (amax, near, np.nextafter(near, np.float32(np.inf))):
        x = torch.full((1, 128), float(np.float32(most) * np.float32(share)))
        x[0, 77] = float(most)
        if not x.isfinite().all():
            continue
        for encoding in (*ROWS, FP8_E8M0):
            codes, scales = fp8_block.encoded(x, (1, 128), encoding is not FP8_ROWS_F32)
            q = quantize(x, encoding)
            assert q.codes.view(torch.uint8).tolist() == codes.view(np.uint8).tolist()
            if most:
                assert q.block_scale.float().tolist() == scales.tolist()


def test_the_transpose_of_blocks_is_exact():
    x = numbers(256, 128).bfloat16()
    for encoding in (FP8_E8M0, FP8_BLOCKS_F32):
        here, there = quantize(x, encoding), quantize(x.T.contiguous(), encoding)
        assert torch.equal(here.codes.view(torch.uint8).T, there.codes.view(torch.uint8))
        assert torch.equal(dequantize(here).T, dequantize(there))


@pytest.mark.parametrize("encoding", [*ROWS, FP8_COLUMNS, FP8_COLUMNS_F32])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_nan_in_its_block_alone(encoding: Encoding, bad: float):
    x = numbers(256, 256)
    x[130, 5] = bad
    found = dequantize(quantize(x, encoding)).isnan()
    block = (
        (slice(130, 131), slice(0, 128)) if encoding.axis == -1 else (slice(128, 256), slice(5, 6))
    )
    assert found[block].all()
    assert found.sum() == 128


def test_short_last_blocks():
    x = numbers(3, 200).bfloat16() + 1
    for encoding in ROWS:
        assert assert_encoded(x, encoding).block_scale.shape == (3, 2)


def test_signed_zeros_and_saturation():
    x = torch.tensor([[-0.0] * 128, [448.0] * 128, [449.0] * 128])
    for encoding in ROWS:
        q = quantize(x, encoding)
        assert q.codes.view(torch.uint8)[:, 0].tolist() == [
            0x80,
            0x7E,
            {FP8_ROWS: 0x76}.get(encoding, 0x7E),
        ]
    assert ml_dtypes.float8_e4m3fn(224) == quantize(x, FP8_ROWS).codes[2, 0].item()
