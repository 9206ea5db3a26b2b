"""Encodings as data: what is derived from a descriptor, and MXFP4 and INT4 against others'
implementations, bit for bit.
"""

import copy
import itertools
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from bad_calls import messages

from fusion_moe import encodings
from fusion_moe.encodings import (
    BF16,
    ENCODINGS,
    F16,
    INT4,
    MXFP4,
    MXFP8,
    MXFP8_COLUMNS,
    NVFP4,
    Element,
    Encoding,
    Quantized,
    Scale,
    dequantize,
    quantize,
)
from fusion_moe.errors import NonFiniteError, OptionError
from fusion_moe.layouts import W16X64

E8M0 = torch.float8_e8m0fnu


def numbers(*shape: int, spread: float = 6.0) -> torch.Tensor:
    """Floats whose magnitudes span many powers of two, so that blocks get scales of their own."""
    g = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=g) * 2 ** (
        torch.rand(*shape[:-1], 1, generator=g) * 2 * spread - spread
    )


def test_what_is_derived():
    assert [name for name in ENCODINGS if "int" not in name or name == "int4"] == [
        "mxfp8",
        "mxfp8_columns",
        "fp8",
        "fp8_channel",
        "fp8_tensor",
        "fp8_rows",
        "fp8_e8m0",
        "fp8_columns",
        "fp8_rows_f32",
        "fp8_columns_f32",
        "fp8_blocks_f32",
        "int4",
        "nvfp4",
        "mxfp4",
        "nf4",
        "bf16",
        "f16",
        "f32",
    ]
    assert len(encodings.INTEGERS) == 3 * 4 * 2  # elements, groups, dtypes of scales
    assert all(ENCODINGS[e.name] is e for e in encodings.INTEGERS.values())
    assert [(p.name, p.dtype) for p in MXFP4.parts] == [
        ("codes", torch.uint8),
        ("block_scale", E8M0),
    ]
    assert [MXFP4.part_shape(p, (2,), 3, 64) for p in MXFP4.parts] == [(2, 3, 32), (2, 3, 2)]
    assert (NVFP4.block, MXFP4.block, BF16.block) == (16, 32, 1)
    assert (NVFP4.weight_bits, MXFP4.weight_bits, BF16.weight_bits) == (4.5, 4.25, 16)
    assert [e.plain for e in (NVFP4, MXFP4, BF16)] == [False, False, True]
    assert encodings.register(NVFP4) is NVFP4
    with pytest.raises(
        OptionError, match="encoding 'fp5'; expected one of fp8, nvfp4, .* and [0-9]+ others; fus"
    ):
        encodings.find("fp5")


def test_mxfp4_by_ml_dtypes():
    """The OCP specification, section 6.3, written with numpy: its own e2m1 rounds to nearest, ties
    to even.
    """
    x = numbers(5, 64, 256)
    blocks = x.numpy().reshape(5, 64, 8, 32)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1))).astype(int) - 2
    codes = (
        (blocks / np.ldexp(np.float32(1), exponent)[..., None])
        .clip(-6, 6)
        .astype(ml_dtypes.float4_e2m1fn)
        .view(np.uint8)
    )
    codes = codes.reshape(5, 64, 256) & 15
    q = quantize(x, encoding=MXFP4)
    np.testing.assert_array_equal(
        q.block_scale.view(torch.uint8).numpy(), (exponent + 127).astype(np.uint8)
    )
    found = q.codes.numpy()
    same = (found & 15 == codes[..., 0::2]) & (found >> 4 == codes[..., 1::2])
    assert same.all()
    back = (
        codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(5, 64, 8, 32)
        * np.ldexp(np.float32(1), exponent)[..., None]
    )
    np.testing.assert_array_equal(dequantize(q).numpy(), back.reshape(5, 64, 256))


@pytest.mark.judges
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_by_torchao(dtype):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = numbers(96, 320, spread=20).to(dtype)
    x[3, 32:64] = 0
    scale, codes = mx.to_mx(x, torch.float4_e2m1fn_x2, 32)
    q = quantize(x, encoding=MXFP4)
    assert torch.equal(q.block_scale.view(torch.uint8), scale.view(torch.uint8))
    # a number that rounds to zero is -0.0 here if it is negative, as in NVFP4
    assert torch.equal(
        dequantize(q), dequantize(Quantized(codes.view(torch.uint8), scale, encoding=MXFP4))
    )


def test_every_e8m0_scale():
    """All bytes: 2^(byte - 127), the least of which is subnormal in float32; 255 is NaN."""
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 1)
    got = dequantize(Quantized(codes, scale.view(E8M0), encoding=MXFP4), torch.float32)[:, ::2]
    value = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want = np.concatenate([value, -value]) * 2.0 ** (np.arange(255)[:, None] - 127)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got[:255].numpy(), want.astype(np.float32))
    assert got[255].isnan().all()


def test_mxfp4_edges():
    """Zeros, the smallest and the largest numbers, NaN."""
    x = torch.zeros(4, 32)
    x[1, 5], x[2, 5], x[3, 5] = 2.0**-140, 3e38, math.nan
    q = quantize(x, encoding=MXFP4)
    assert q.block_scale.view(torch.uint8).flatten().tolist() == [0, 0, 127 + 127 - 2, 255]
    assert dequantize(q)[2, 5] == 6 * 2.0**125
    with pytest.raises(
        NonFiniteError,
        match=r"1 NaN and 0 negative among the 4 elements of "
        r"block_scale \[4, 1\], the first at \(3, 0\)",
    ):
        encodings.check_part_scales(q.encoding.parts[1], q.block_scale, "block_scale")


def test_plain_weights_are_themselves():
    x = numbers(3, 8, 32).bfloat16()
    q = quantize(x, encoding=BF16)
    assert [part.data_ptr() for part in q] == [x.data_ptr()]
    assert torch.equal(dequantize(q, torch.bfloat16), x)
    assert torch.equal(quantize(x, encoding=F16).values, x.half())


def test_int4_by_numpy():
    """bf16(amax / 7.5), x over it to the nearest integer, ties to even; a nibble is the integer +
    8.
    """
    x = numbers(5, 64, 256, spread=20)
    x[0, 0, :32], x[1, 1, 32:64] = 0, 2.0**-148
    blocks = x.numpy().reshape(5, 64, 8, 32)
    scale = (np.abs(blocks).max(-1) / np.float32(7.5)).astype(ml_dtypes.bfloat16)
    scale[scale == 0] = ml_dtypes.finfo(ml_dtypes.bfloat16).eps
    integers = (
        (blocks / scale.astype(np.float32)[..., None])
        .round()
        .clip(-8, 7)
        .astype(int)
        .reshape(5, 64, 256)
    )
    q = quantize(x, encoding=INT4)
    np.testing.assert_array_equal(q.block_scale.float().numpy(), scale.astype(np.float32))
    np.testing.assert_array_equal(
        q.codes.numpy(), integers[..., 0::2] + 8 | integers[..., 1::2] + 8 << 4
    )
    back = integers.reshape(5, 64, 8, 32).astype(np.float32) * scale.astype(np.float32)[..., None]
    np.testing.assert_array_equal(dequantize(q).numpy(), back.reshape(5, 64, 256))
    assert len((q.codes & 15).unique()) == len((q.codes >> 4).unique()) == 16


@pytest.mark.judges
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_by_compressed_tensors(dtype):
    """Its words, seen as bytes, are the codes. It divides in the dtype of x, so with bf16 an
    integer may be the other neighbour.
    """
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import (
        dequantize as theirs_back,
        quantize as theirs,
    )
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    args = ct.quantization.QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=32,
        scale_dtype=torch.bfloat16,
    )
    x = numbers(96, 320, spread=20).to(dtype)
    x[3, 32:64] = 0
    scale = compute_dynamic_scales_and_zp(x, args, None)[0].squeeze(-1).bfloat16()
    integers = theirs(x=x, scale=scale, zero_point=None, args=args, dtype=torch.int8)
    words, q = pack_to_int32(integers, 4), quantize(x, encoding=INT4)
    assert torch.equal(q.block_scale, scale)
    assert torch.equal(
        dequantize(Quantized(words.view(torch.uint8), scale, encoding=INT4), torch.bfloat16),
        theirs_back(integers, scale, args=args),
    )
    if dtype == torch.float32:
        assert torch.equal(q.codes, words.view(torch.uint8))
    else:
        ours = torch.stack([q.codes & 15, q.codes >> 4], -1).flatten(-2).int() - 8
        quotient = x.float() / scale.float().repeat_interleave(32, -1)
        other = ours != integers
        assert 0 < other.sum() < 0.02 * x.numel()
        # half a unit of bf16 from a tie
        assert ((quotient - ours)[other].abs() > 0.5 - 2.0**-6).all()


def test_int4_edges():
    """The largest and the smallest numbers, NaN; a scale that is no number. A negative one is
    right: -8 has no opposite.
    """
    x = torch.zeros(4, 32)
    x[0, 5], x[1, 5], x[2, 5], x[3, 5] = 7.5 * 2.0**125, -7.5 * 2.0**125, 2.0**-149, math.nan
    q = quantize(x, encoding=INT4)
    assert (q.codes[:2, 2] >> 4).tolist() == [15, 0]  # 7.5 is even 8, too large; -7.5 is -8
    assert q.block_scale[2].item() == 2.0**-7
    assert dequantize(q)[3].isnan().all()
    with pytest.raises(
        NonFiniteError,
        match=r"1 NaN or infinite among the 4 elements of "
        r"block_scale \[4, 1\], the first at \(3, 0\)",
    ):
        encodings.check_part_scales(q.encoding.parts[1], q.block_scale, "block_scale")
    signed = torch.tensor([[1.0, -0.0, -2.0]], dtype=torch.bfloat16)
    encodings.check_part_scales(INT4.parts[1], signed, "block_scale")


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
def test_another_encoding(divides, axis):
    """Integers with bf16 scales for 32, along K or along N, which multiply or divide."""
    choose = (lambda amax, outer: 7 / amax) if divides else (lambda amax, outer: amax / 7)
    made = Encoding(
        "int8g32",
        Element.integers("int8", 8, -128),
        (Scale("scale", torch.bfloat16, 32, choose, divides=divides),),
        axis,
    )
    x = numbers(2, 64, 96)
    q = quantize(x, encoding=made)
    assert [t.shape for t in q] == (
        [(2, 64, 96), (2, 64, 3)] if axis == -1 else [(2, 64, 96), (2, 2, 96)]
    )
    error = (dequantize(q) - x).abs()
    along = x if axis == -1 else x.mT
    unit = (
        along.reshape(*along.shape[:-1], -1, 32)
        .abs()
        .amax(-1, keepdim=True)
        .expand(*along.shape[:-1], -1, 32)
        .reshape(along.shape)
        / 7
    )
    assert (error <= (unit if axis == -1 else unit.mT) * 0.54).all()


@pytest.mark.parametrize("encoding", [INT4, MXFP4, BF16, F16], ids=lambda e: e.name)
def test_w16x64_of_other_encodings(encoding):
    """There and back; and where an element and a scale go, by the formula that kernels read by."""
    q = quantize(numbers(2, 32, 128), encoding=encoding)
    stored = W16X64.pack(*q, encoding=encoding)
    assert [t.shape for t in stored] == [t.shape for t in q]
    back = W16X64.unpack(*stored, encoding=encoding)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(back, q, strict=True)
    )
    tile = 3  # of matrix 1: rows 16 .. 31, columns 64 .. 127
    for r, i, c in ((0, 0, 0), (3, 1, 2), (7, 1, 3)):
        row, column = 16 + r + 8 * i, 64 + 16 * c
        if encoding in (INT4, MXFP4):
            place = 32 * tile + 4 * r + 2 * (c // 2) + i
            assert (
                stored[1][1].flatten()[place].float() == q.block_scale[1, row, column // 32].float()
            )
        if encoding is INT4:
            word = (
                stored[0][1]
                .flatten()
                .view(torch.int32)[128 * tile + 16 * r + 4 * c : 128 * tile + 16 * r + 4 * c + 4]
                .tolist()
            )
            # kernels/weights/int4.cuh
            for v, h, j in itertools.product(range(4), range(2), range(2)):
                assert (
                    word[v] >> 8 * h + 4 * i + 16 * j & 15
                    == q.codes[1, row, column // 2 + 4 * h + v] >> 4 * j & 15
                )
        if not encoding.plain:
            continue
        for v, h, j in ((0, 0, 0), (2, 1, 0), (3, 1, 1)):
            place = 1024 * tile + (512 * v + 64 * r + 16 * c) // 2 + 4 * h + 2 * i + j
            assert stored[0][1].flatten()[place] == q.values[1, row, column + 8 * h + 2 * v + j]


def test_refusals(golden):
    golden(
        messages(
            {
                "K": lambda: MXFP4.packed(48),
                "another of a name": lambda: encodings.register(Encoding("nvfp4", MXFP4.element)),
                "no order": lambda: W16X64.pack(torch.zeros(16, 64), encoding=encodings.F32),
                "MXFP8, K": lambda: quantize(torch.zeros(32, 48), encoding=MXFP8),
                "MXFP8, N": lambda: quantize(torch.zeros(48, 32), encoding=MXFP8_COLUMNS),
            }
        )
    )


@pytest.mark.judges
def test_nf4_by_bitsandbytes():
    """Every byte, and every number; its first code is in the high nibble."""
    functional = pytest.importorskip("bitsandbytes.functional")
    x = numbers(64, 256)
    theirs, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    q, codes = quantize(x, encodings.NF4), theirs.view(64, 128)
    assert torch.equal(q.codes, codes >> 4 | codes << 4)
    assert torch.equal(q.block_scale.flatten(), state.absmax)
    assert torch.equal(dequantize(q), functional.dequantize_4bit(theirs, state))


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_copy_of_an_encoding_is_itself(name):
    """As a module that is copied or pickled has it: it would not be equal."""
    encoding = ENCODINGS[name]
    assert copy.deepcopy(encoding) is copy.copy(encoding) is encoding
    assert pickle.loads(pickle.dumps(encoding)) is encoding
