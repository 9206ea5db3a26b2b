"""FP8 with scales for 128 x 128, for rows, for a matrix, by numpy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fusion_moe.encodings import (
    FP8,
    FP8_CHANNEL,
    FP8_E8M0,
    FP8_ROWS,
    FP8_TENSOR,
    check_part_scales,
    dequantize,
    quantize,
)
from fusion_moe.errors import NonFiniteError
from fusion_moe.layouts import W16X64

ALL = (FP8, FP8_E8M0, FP8_CHANNEL, FP8_TENSOR)


def numbers(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    return torch.randn(*shape, generator=g) * 2 ** (torch.rand(*shape[:-1], 1, generator=g) * 8)


def scales(x: np.ndarray, encoding) -> np.ndarray:
    """[N, K], for each element; a matrix whose last blocks are short."""
    found = np.empty_like(x)
    rows = {FP8_CHANNEL: 1, FP8_TENSOR: len(x)}.get(encoding, 128)
    columns = x.shape[1] if rows != 128 else 128
    for n in range(0, len(x), rows):
        for k in range(0, x.shape[1], columns):
            block = x[n : n + rows, k : k + columns]
            scale = np.float32(np.abs(block).max() / np.float32(448))
            if encoding is FP8_E8M0:
                scale = np.float32(2.0 ** np.ceil(np.log2(scale)))
            found[n : n + rows, k : k + columns] = scale
    return found


@pytest.mark.parametrize("columns", [256, 300])
@pytest.mark.parametrize("encoding", ALL, ids=lambda e: e.name)
def test_by_ml_dtypes(encoding, columns):
    x = numbers(200, columns)  # the last block of rows is short, or also that of columns
    scale = scales(x.numpy(), encoding)
    codes = (x.numpy() / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    q = quantize(x, encoding)
    np.testing.assert_array_equal(q.codes.view(torch.uint8).numpy(), codes.view(np.uint8))
    np.testing.assert_array_equal(dequantize(q).numpy(), codes.astype(np.float32) * scale)
    together = torch.stack([x, 3 * x])
    assert torch.equal(dequantize(quantize(together, encoding))[0], dequantize(q))


@pytest.mark.parametrize("encoding", ALL, ids=lambda e: e.name)
def test_tiles_keep_all_bytes(encoding):
    q = quantize(numbers(3, 64, 256), encoding)
    stored = W16X64.pack(*q, encoding=encoding)
    assert all(map(torch.equal, W16X64.unpack(*stored, encoding=encoding), q))
    # row 13, column 64 + 16 + 8 + 6 + 1: r = 5, c = 1, v = 3, j = 1, h = 1, i = 1 of tile 1
    place = 1024 + 512 + 64 * 5 + 16 + 8 + 4 + 2 + 1
    of_tile = stored[0].view(torch.uint8)[0].flatten()
    assert of_tile[place] == q.codes.view(torch.uint8)[0, 13, 64 + 31]


def test_zeros_and_nan():
    x = torch.zeros(128, 128)
    q = quantize(x, FP8)
    assert q.block_scale.eq(1).all()
    assert not dequantize(q).any()
    q.codes.view(torch.uint8)[3, 5], q.codes.view(torch.uint8)[3, 6] = 0x7F, 0xFF
    assert dequantize(q)[3, 5:7].isnan().all()
    assert dequantize(q).isnan().sum() == 2


def test_sizes_and_scales_that_are_refused():
    for encoding in (FP8, FP8_E8M0, FP8_ROWS, FP8_CHANNEL):
        assert quantize(torch.ones(8, 100), encoding).shape == (8, 100)
        assert (encoding.block, encoding.multiple) == (1 if encoding is FP8_CHANNEL else 128, 1)
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(NonFiniteError, match="1 NaN|0 NaN and 1 negative"):
            check_part_scales(FP8.parts[1], torch.tensor([[1.0], [bad]]), "weight_scale_inv")
