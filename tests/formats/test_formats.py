"""NVFP4 bytes: what they mean, how they are made, and what is refused."""

import doctest
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch
from bad_calls import messages
from cover import examples
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_moe import encodings
from fusion_moe.encodings import (
    BF16,
    FP8,
    MXFP4,
    NVFP4,
    Quantized,
    check_finite,
    check_part_scales,
    check_parts,
    dequantize,
    matrix_scale_of,
    quantize,
)

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def e4m3(*values):
    return torch.tensor(values, dtype=torch.float32).to(torch.float8_e4m3fn)


def assert_same_bytes(got, want):
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.block_scale.view(torch.uint8), want.block_scale.view(torch.uint8))
    assert torch.equal(got.decode_scale, want.decode_scale)


def test_doctest():
    assert doctest.testmod(encodings).failed == 0


# ---------------------------------------------------------------------------------- bytes -> floats


def every_byte(decode_scale=1.0):
    """Row n has block scale byte n, and the codes 0..15."""
    codes = torch.tensor(
        [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8
    ).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    return Quantized(codes, scale, torch.tensor(decode_scale), encoding=NVFP4)


def codes_and_scales():
    """float64 [16] and [256]: what ml_dtypes says the codes and the scale bytes are worth."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return codes, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def test_every_code_and_scale_byte():
    codes, scales = codes_and_scales()
    want = scales[:, None] * codes  # exact: 2 and 4 bits of mantissa
    got = dequantize(every_byte()).numpy()
    assert got.shape == (256, 16)
    np.testing.assert_array_equal(got, want)  # takes NaN as equal to NaN
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])
    assert np.isnan(got[[0x7F, 0xFF]]).all()
    assert not np.isnan(np.delete(got, [0x7F, 0xFF], 0)).any()


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("decode_scale", [0.0013, 1 / 3, 7e-41])
def test_order_and_rounding(dtype, decode_scale):
    """code * (scale * decode_scale): one float32 rounding a product, then one to dtype. The other
    association gives other bits.
    """
    codes, scales = (v.astype(np.float32) for v in codes_and_scales())
    with np.errstate(invalid="ignore"):
        want = torch.from_numpy(codes * (scales * np.float32(decode_scale))[:, None])
        other = torch.from_numpy(codes * scales[:, None] * np.float32(decode_scale))
    got = dequantize(every_byte(decode_scale), dtype)
    assert got.dtype == dtype
    assert torch.equal(got.nan_to_num(1e9), want.to(dtype).nan_to_num(1e9))
    if dtype == torch.float32:
        assert not torch.equal(got.nan_to_num(1e9), other.nan_to_num(1e9)), (
            "these scales cannot tell the two orders apart"
        )


def test_each_run_of_rows_has_its_decode_scale():
    """decode_scale [G, S]: row n of matrix g takes [g, n // (N // S)], so gate and up keep their
    own.
    """
    q = quantize(torch.randn(2, 6, 32), NVFP4, torch.tensor([1.0, 0.5]))
    split = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    got = dequantize(q.with_(decode_scale=split))
    for g in range(2):
        for n in range(6):
            row = Quantized(
                q.codes[g, n : n + 1], q.block_scale[g, n : n + 1], split[g, n // 2], encoding=NVFP4
            )
            assert torch.equal(got[g, n : n + 1], dequantize(row))


def test_shapes_dtypes_and_views():
    q = quantize(torch.randn(3, 5, 8, 32), NVFP4)
    assert q.shape == (3, 5, 8, 32)
    assert q.decode_scale.shape == (3, 5)
    flat = dequantize(q)
    assert torch.equal(dequantize(q.with_(codes=q.codes.view(torch.float4_e2m1fn_x2))), flat)
    assert torch.equal(dequantize(Quantized(*(t[1, 2] for t in q), encoding=NVFP4)), flat[1, 2])
    across = Quantized(*(t.transpose(0, 1) for t in q), encoding=NVFP4)  # not contiguous
    assert torch.equal(dequantize(across), flat.transpose(0, 1))
    assert dequantize(quantize(torch.ones(0, 4, 16), NVFP4)).shape == (0, 4, 16)


# ---------------------------------------------------------------------------------- floats -> bytes


def nearest_even(value):
    """The code nearest to a float64, by search; a tie goes to the even code."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    return min(range(8), key=lambda c: (abs(abs(value) - magnitudes[c]), c % 2)) + 8 * (value < 0)


def test_codes_are_nearest_and_ties_go_to_even():
    grid = torch.arange(-7 * 64, 7 * 64 + 1, dtype=torch.float64) / 64
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.cat(
        [grid.float(), edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(9.0))]
    )
    rows = torch.zeros(len(values), 16)
    # a block of amax 6 and decode scale 1 has block scale 1
    rows[:, 0], rows[:, 1] = 6.0, values.clamp(-6, 6)
    q = quantize(rows, NVFP4, torch.tensor(1.0))
    assert (q.block_scale.float() == 1).all()
    assert (q.codes[:, 0] >> 4).tolist() == [nearest_even(v) for v in values.clamp(-6, 6).tolist()]


@examples(2)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(list(FLOATS.values())),
    st.floats(-30, 10),
    st.sampled_from([None, -40.0, -10.0, 0.0]),
)
def test_against_ml_dtypes(seed, dtype, log2_size, log2_given):
    rand = torch.Generator().manual_seed(seed)
    x = (
        (
            torch.randn(4, 64, generator=rand)
            * torch.exp2(torch.randn(4, 64, generator=rand) * 3 + log2_size)
        )
        .clamp(-6e4, 6e4)
        .to(dtype)
    )
    q = quantize(x, NVFP4, None if log2_given is None else torch.tensor(2.0**log2_given))
    blocks, f32 = x.float().numpy().reshape(4, 4, 16), np.float32
    decode = np.abs(blocks).max() / f32(2688) if log2_given is None else f32(2.0**log2_given)
    amax = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.where(
            amax == 0, f32(1), np.clip(amax / (f32(6) * decode), f32(2.0**-9), f32(448))
        )
        scale = wanted.astype(ml_dtypes.float8_e4m3fn)
        scaled = blocks / (scale.astype(f32) * decode)[..., None]
    np.testing.assert_array_equal(q.block_scale.view(torch.uint8).numpy(), scale.view(np.uint8))
    assert q.decode_scale.item() == decode
    codes = (
        np.clip(np.where(blocks == 0, f32(0), scaled), -6, 6)
        .astype(ml_dtypes.float4_e2m1fn)
        .view(np.uint8)
        .reshape(4, 64)
    )
    np.testing.assert_array_equal(q.codes.numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)


def test_zeros_stay_zeros():
    """ModelOpt makes a matrix of zeros NaN (0 / 0): an expert that is all zeros must not poison the
    others.
    """
    q = quantize(torch.tensor([[[0.0] * 32] * 3, [[1.0] * 32] * 3, [[-0.0] * 32] * 3]), NVFP4)
    assert q.decode_scale.tolist() == [0.0, torch.tensor(1.0).div(2688).item(), 0.0]
    assert (q.block_scale[[0, 2]].float() == 1).all()
    assert (q.codes[[0, 2]] == 0).all()
    assert torch.equal(dequantize(q)[[0, 2]], torch.zeros(2, 3, 32))


def test_each_matrix_is_quantized_alone():
    x = torch.randn(3, 4, 32) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    for g, want in enumerate(quantize(matrix, NVFP4) for matrix in x):
        assert_same_bytes(Quantized(*(t[g] for t in quantize(x, NVFP4)), encoding=NVFP4), want)
    scales = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    halves = quantize(x, NVFP4, scales)
    for g in range(3):
        for half in range(2):
            rows = slice(2 * half, 2 * half + 2)
            want = quantize(x[g, rows], NVFP4, scales[g, half])
            assert_same_bytes(
                Quantized(
                    halves.codes[g, rows],
                    halves.block_scale[g, rows],
                    halves.decode_scale[g, half],
                    encoding=NVFP4,
                ),
                want,
            )


def test_decode_scale_of():
    x = torch.tensor([[1.0, -2688.0], [3.0, 4.0]]).repeat(1, 8)
    assert matrix_scale_of(x, NVFP4).shape == ()
    assert matrix_scale_of(x, NVFP4).item() == 1.0
    assert matrix_scale_of(torch.stack([x, x / 2]).bfloat16(), NVFP4).tolist() == [1.0, 0.5]


def test_nan_poisons_its_block_only():
    """With a given decode scale; infinity saturates without a word, which is what check_finite is
    for.
    """
    x = torch.ones(2, 32)
    x[0, 3], x[1, 17] = float("nan"), float("inf")
    back = dequantize(quantize(x, NVFP4, torch.tensor(0.01)))
    assert back[0, :16].isnan().all()
    assert back.isnan().sum() == 16
    assert back[1, 17] == pytest.approx(6 * 448 * 0.01)
    assert dequantize(quantize(x[:1], NVFP4)).isnan().all()


def test_nothing_waits_for_the_device():
    """Fake tensors have no values to wait for: reading one raises."""
    with FakeTensorMode():
        q = quantize(torch.empty(4, 6, 64, dtype=torch.bfloat16), NVFP4)
        assert [(t.dtype, tuple(t.shape)) for t in q] == [
            (torch.uint8, (4, 6, 32)),
            (torch.float8_e4m3fn, (4, 6, 4)),
            (torch.float32, (4,)),
        ]
        assert dequantize(q, torch.bfloat16).shape == (4, 6, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_cuda_gives_the_bytes_of_the_cpu(dtype):
    x = torch.randn(64, 64) * torch.exp2(torch.arange(64) - 40.0)[:, None]
    x = torch.cat([x, torch.randint(-12, 13, (64, 64)) / 4]).to(dtype)  # ties
    for scale in (None, torch.tensor(0.25), torch.tensor(1e-4)):
        got = quantize(x.cuda(), NVFP4, None if scale is None else scale.cuda())
        want = quantize(x, NVFP4, scale)
        assert_same_bytes(Quantized(*(t.cpu() for t in got), encoding=NVFP4), want)
        assert torch.equal(dequantize(got).cpu(), dequantize(want))


# ------------------------------------------------------------------------------- sizes and refusals


def test_quantize_refuses(golden):
    plain = torch.ones(2, 6, 16)
    numbers = {
        "float64": plain.double(),
        "int32": plain.int(),
        "a row": plain[0, 0],
        "K": torch.ones(2, 40),
        "nothing": torch.ones(2, 0),
    }
    scales = {
        "one scale": torch.tensor(1.0),
        "four scales for six rows": torch.ones(2, 4),
        "bfloat16": torch.ones(2).bfloat16(),
        "elsewhere": torch.ones(2, device="meta"),
    }
    golden(
        messages(
            {f"x, {what}": partial(quantize, x, NVFP4) for what, x in numbers.items()}
            | {f"scale, {what}": partial(quantize, plain, NVFP4, t) for what, t in scales.items()}
        )
    )


U8, F8, F32 = torch.uint8, torch.float8_e4m3fn, torch.float32


def test_check_parts_names_what_does_not_fit(golden):
    codes, scale, decode = ((2, 4, 16), U8), ((2, 4, 2), F8), ((2,), F32)
    wrong = {
        "floats": (((2, 4, 16), F32), scale, decode),
        "scales in bytes": (codes, ((2, 4, 2), U8), decode),
        "float64": (codes, scale, ((2,), torch.float64)),
        "a row": (((16,), U8), ((2,), F8), ((), F32)),
        "K": (((2, 4, 12), U8), scale, decode),
        "in a kernel's order": (codes, ((2, 128, 4), F8), decode),
        "another matrix's": (codes, scale, ((3,), F32)),
        "3 for 4 rows": (codes, scale, ((2, 3), F32)),
        "none": (codes, scale, ((2, 0), F32)),
        "three dimensions": (codes, scale, ((2, 2, 1), F32)),
    }
    made = {
        what: [torch.empty(shape, dtype=dtype) for shape, dtype in parts]
        for what, parts in ({"elsewhere": (codes, scale, decode)} | wrong).items()
    }
    made["elsewhere"][1] = made["elsewhere"][1].to("meta")
    golden(
        messages(
            {
                what: partial(check_parts, tensors, NVFP4, prefix="w_", where="op")
                for what, tensors in made.items()
            }
        )
    )


def test_check_parts_takes_what_fits():
    codes, block_scale = torch.empty(2, 4, 16, dtype=U8), torch.empty(2, 4, 2, dtype=F8)
    for shape in ((2,), (2, 1), (2, 2), (2, 4)):
        assert check_parts((codes, block_scale, torch.empty(shape)), NVFP4) == (2, 4, 32)


def test_check_block_scales(golden):
    part = NVFP4.parts[1]
    check_part_scales(part, torch.arange(0x7F, dtype=torch.uint8).view(F8), "w.scale")
    bad = torch.full((4, 3, 4), 0x38, dtype=torch.uint8)
    bad[:, 1, 2] = torch.tensor([0x7F, 0xFF, 0x80, 0xFE], dtype=torch.uint8)
    golden(
        messages(
            {
                f"{int(t[1, 2]):#x}": partial(check_part_scales, part, t.view(F8), "w.scale")
                for t in bad
            }
        )
    )


def test_check_finite(golden):
    x = torch.zeros(2, 3)
    check_finite(x, NVFP4)
    x[0, 2], x[1, 0], x[1, 1] = float("-inf"), float("nan"), float("inf")
    golden(
        messages(
            {
                f"{name} to {encoding.name}": partial(check_finite, x.to(dtype), encoding, "gate")
                for name, dtype in FLOATS.items()
                for encoding in (NVFP4, MXFP4, FP8, BF16)
            }
        )
    )
