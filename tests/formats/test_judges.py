"""The same bytes and numbers as other people's quantizers, where these agree with each other; run
where they are installed.

    python -m venv /tmp/judges && /tmp/judges/bin/pip install torch==2.13.0 numpy pytest hypothesis
        ml_dtypes \
        nvidia-modelopt==0.47.0 torchao==0.18.0 compressed-tensors==0.20.1 gguf==0.19.0
    PYTHONPATH=. /tmp/judges/bin/python -m pytest tests/formats/test_judges.py

They do not all agree: torchao multiplies by a reciprocal and lifts tiny block scales to 2^-6,
compressed-tensors divides by an encode scale, so ties, heavy tails and zero blocks are compared
with ModelOpt alone.
"""

import numpy as np
import pytest
import torch

from fusion_moe.encodings import NVFP4, Quantized, dequantize, quantize
from fusion_moe.layouts import SF128X4

pytestmark = pytest.mark.judges
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TIES = torch.tensor(
    [6, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0, -0.25, -0.75, -1.25, -1.75, -2.5, -5]
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def any_bytes(*lead, k, seed=0, decode=None):
    """Every code and every scale that is a number and not negative, at random."""
    rand = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, generator=rand)
    scale = torch.randint(0, 0x7F, (*lead, k // 16), dtype=torch.uint8, generator=rand).view(
        torch.float8_e4m3fn
    )
    return Quantized(
        codes,
        scale,
        torch.rand(lead[:-1], generator=rand) if decode is None else decode,
        encoding=NVFP4,
    )


def assert_same_bytes(q, codes, block_scale):
    differ = (
        (q.codes != codes.view(torch.uint8)).sum().item(),
        (q.block_scale.view(torch.uint8) != block_scale.view(torch.uint8)).sum().item(),
    )
    assert differ == (0, 0), "bytes of codes and of scales that differ"


def assert_same_numbers(got, want):
    """Equal bit for bit but for the sign of zero, which ModelOpt drops."""
    assert got.dtype == want.dtype
    assert torch.equal(got, want), f"{(got != want).sum().item()} of {got.numel()} differ"


# ---------------------------------------------------------------------------------------- ModelOpt


def modelopt_inputs():
    x = normal(512, 1024)
    yield "normal", x, None
    yield "weights", x * 0.02, None
    yield "heavy tail", (x / normal(512, 1024, seed=1)).clamp(-6e4, 6e4), None
    yield "ties", TIES.repeat(512, 64) * torch.exp2(torch.arange(512) % 8 - 4.0)[:, None], None
    yield (
        "exact ties",
        TIES.repeat(512, 64) * torch.exp2(torch.arange(512) % 8 - 4.0)[:, None],
        torch.tensor(2.0**-5),
    )
    holes = x.clone()
    holes[:, :64], holes[3], holes[4, 64:80], holes[5, 64:80] = (
        0,
        holes[3] * 1e-5,
        -0.0,
        holes[5, 64:80] * 1e-6,
    )
    yield "zero and tiny blocks", holes, None
    yield "given", x, torch.tensor(0.01)
    yield "saturated", x, torch.tensor(1e-5)
    yield "tiny", x * 1e-6, None
    yield "subnormal", x * 1e-38, None
    yield "vanishing", x * 1e-43, None
    yield "huge", x * 1e37, None


@DTYPES
@pytest.mark.parametrize(
    ("name", "x", "given"), [pytest.param(*c, id=c[0]) for c in modelopt_inputs()]
)
def test_modelopt(name, x, given, dtype):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    x = x.to(dtype)
    if not x.isfinite().all() or not x.any():
        pytest.skip(f"{dtype} cannot hold it")
    packed, block_scale, decode_scale = qtensor.NVFP4QTensor.quantize(x.clone(), 16, None, given)
    q = quantize(x, NVFP4, given)
    assert_same_bytes(q, packed._quantized_data, block_scale)
    assert torch.equal(q.decode_scale, decode_scale)
    for out in (torch.float32, torch.bfloat16, torch.float16):
        back = packed.dequantize(
            dtype=out, scale=block_scale, double_scale=decode_scale, block_sizes={-1: 16}
        )
        assert_same_numbers(dequantize(q, out), back)


# ---------------------------------------------------------------------------------------- torchao


def torchao():
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats import nvfp4_tensor

    return nvfp4_tensor


@pytest.mark.parametrize(
    "x", [normal(512, 1024), (normal(512, 1024) * 0.02).bfloat16()], ids=["fp32", "bf16"]
)
def test_torchao_quantize(x):
    q = quantize(x, NVFP4)
    block_scale, codes = torchao().nvfp4_quantize(x, 16, q.decode_scale)
    assert_same_bytes(q, codes, block_scale)
    assert torch.equal(torchao().per_tensor_amax_to_scale(x.abs().max()), q.decode_scale)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(64,), (3, 64)], ids=["2-D", "3-D"])
def test_torchao_dequantize(lead, out):
    q = any_bytes(*lead, k=128)
    theirs = torchao().NVFP4Tensor(
        q.codes,
        q.block_scale,
        16,
        out,
        q.decode_scale[..., None, None] if len(lead) > 1 else q.decode_scale,
    )
    got, want = dequantize(q, out), theirs.dequantize(out)
    assert_same_numbers(got, want)
    assert torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (256, 16), (130, 5), (64, 2), (1, 1)])
def test_torchao_swizzle(rows, cols):
    torchao()
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

    x = torch.randint(
        1, 255, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows)
    )
    stored = SF128X4.forward(x)
    assert torch.equal(stored.flatten(), to_blocked(x).flatten())
    assert torch.equal(
        from_blocked(stored.flatten(), rows, cols), SF128X4.inverse(stored, (rows, cols))
    )


# ------------------------------------------------------------------------------- compressed-tensors


def compressed_tensors_args():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
    )


@pytest.mark.parametrize("x", [normal(512, 1024), TIES.repeat(512, 64)], ids=["fp32", "ties"])
def test_compressed_tensors_quantize(x):
    args = compressed_tensors_args()
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    encode_scale = generate_gparam(x.min(), x.max())
    blocks = x.view(512, 64, 16)
    block_scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, encode_scale)
    codes = quantize_and_pack_fp4(x, block_scale, encode_scale)
    assert_same_bytes(quantize(x, NVFP4), codes, block_scale.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_compressed_tensors_dequantize(out):
    """It divides by the encode scale: a power of two, so that dividing by it is multiplying by its
    inverse.
    """
    args = compressed_tensors_args()
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize as theirs

    q = any_bytes(64, k=128, decode=torch.tensor(2.0**-7))
    values = unpack_fp4_from_uint8(q.codes, 64, 128, dtype=torch.float32)
    got, want = (
        dequantize(q, out),
        theirs(
            values, q.block_scale.float(), args=args, dtype=out, global_scale=torch.tensor([2.0**7])
        ),
    )
    assert_same_numbers(got, want)
    assert torch.equal(got.signbit(), want.signbit())


# ---------------------------------------------------------------------------------------- gguf


def test_gguf_dequantize():
    """A superblock is 4 scale bytes and 4 runs of 8 bytes, low nibbles first; 0x00 to 0x7E mean
    what e4m3 says.
    """
    gguf = pytest.importorskip("gguf")
    q = any_bytes(32, k=128, decode=torch.tensor(1.0))
    nibbles = torch.stack([q.codes & 15, q.codes >> 4], -1).view(32, 2, 4, 16)
    runs = nibbles[..., :8] | nibbles[..., 8:] << 4
    blocks = torch.cat(
        [q.block_scale.view(torch.uint8).view(32, 2, 4), runs.reshape(32, 2, 32)], -1
    ).reshape(32, 72)
    want = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(dequantize(q).numpy(), want.reshape(32, 128))
