"""Products of int8 operands on the CPU's tiers: the reference's bits, whatever tier, rows, threads
and numbers.
"""

from __future__ import annotations

import pytest
import torch
from cpu_tiers import OF_VECTORS, program, same, same_on_any_threads
from fusions import evaluate, fusion_of_call
from test_cpu_encodings import random_weights
from test_cpu_kernels import random_weight

from fusion_moe.encodings import MXFP4, NVFP4, Quantized, quantize
from fusion_moe.ir.kinds import int8
from fusion_moe.nn import swiglu

pytestmark = [pytest.mark.compiler, pytest.mark.once, pytest.mark.slow]


def weights(encoding: str, groups: int = 3, n: int = 200, k: int = 544, seed: int = 0) -> Quantized:
    """Codes and scales of any size that occurs. Of one size mostly: kernels of others are
    compiled.
    """
    return (
        random_weight(groups, n, k, seed)
        if encoding == "nvfp4"
        else random_weights(encoding, groups, n, k, seed=seed)
    )


def both(
    tier: str, x: torch.Tensor, w: Quantized, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """By a tier and by the reference, f32."""
    fusion = fusion_of_call(
        "grouped_mm",
        x,
        list(w),
        ends,
        weight_format=w.encoding.name,
        activation_format="int8",
        out_dtype=torch.float32,
    )
    inputs = [x, *w, ends]
    return program(fusion, tier)(inputs)[0], evaluate(fusion, *inputs)[0]


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_bits(tier, encoding):
    """Groups of rows for each kernel there is, and its last rows."""
    for sizes in ((3, 17, 40), (250, 1, 8), (0, 4, 0), (0, 0, 0), (31, 33, 2), (5, 0, 16)):
        x = (
            torch.randn(sum(sizes) + 2, 544, generator=torch.Generator().manual_seed(0)).bfloat16()
            * 3
        )
        same(*both(tier, x, weights(encoding), torch.tensor(sizes).cumsum(0).int()))


@pytest.mark.parametrize("tier", OF_VECTORS)
def test_sizes(tier):
    for n, k, dtype in ((1, 16, torch.float16), (33, 1312, torch.float32)):
        x = torch.randn(50, k, generator=torch.Generator().manual_seed(0)).to(dtype)
        same(
            *both(tier, x, weights("nvfp4", 3, n, k), torch.tensor([1, 20, 50], dtype=torch.int32))
        )


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_every_code_under_every_pair_of_scales(tier, encoding):
    """Row n has scales n and n + d in turns, negative ones and NaN among them; each column of
    activations is one once.
    """
    code = torch.arange(16, dtype=torch.uint8)
    block = 16 if encoding == "nvfp4" else 32
    codes = (code | code.roll(3) << 4).repeat(256 // 32).expand(1, 256, 128).contiguous()
    byte = torch.arange(256)
    for d in (0, 3, 4):
        scales = (
            torch.stack((byte, (byte + d) % 256), -1)
            .repeat(1, 128 // block)
            .to(torch.uint8)[None]
            .contiguous()
        )
        w = (
            Quantized(codes, scales.view(torch.float8_e4m3fn), torch.ones(1), encoding=NVFP4)
            if block == 16
            else _mxfp4(codes, scales)
        )
        for rows in (1, 40):
            x = torch.eye(256)[torch.arange(rows) * 7 % 256] * 127
            x[:, 255] = 100
            same(*both(tier, x, w, torch.tensor([rows], dtype=torch.int32)))


def _mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
    return Quantized(codes, scales.view(torch.float8_e8m0fnu), encoding=MXFP4)


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("nvfp4", torch.bfloat16), ("mxfp4", torch.float32)]
)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_activations_of_any_size(tier, encoding, dtype):
    """Blocks of zeros, of numbers that count as zeros, with infinity or NaN, of the largest numbers
    and of those halfway between codes.
    """
    x = torch.randn(40, 544, generator=torch.Generator().manual_seed(0))
    x[0::8, :256], x[1::8, :256] = 0, 1e-31
    x[2::8, 7], x[3::8, 300], x[4::8, 543] = torch.inf, torch.nan, -torch.inf
    x[5::8] *= torch.finfo(dtype).max / 8
    x[6::8] = torch.arange(544) % 254 - 126.5
    x[6::8, ::256] = 127
    for rows in (8, 40):
        same(
            *both(
                tier,
                x[:rows].to(dtype),
                weights(encoding),
                torch.tensor([0, rows, rows], dtype=torch.int32),
            )
        )


@pytest.mark.parametrize("tier", OF_VECTORS)
def test_threads_change_no_bit(tier):
    x = torch.randn(400, 544).bfloat16()
    w, ends = weights("nvfp4"), torch.tensor([1, 300, 400], dtype=torch.int32)
    same_on_any_threads(lambda: both(tier, x, w, ends)[0])


@pytest.mark.parametrize(
    ("tier", "columns"),
    [*((tier, 2) for tier in OF_VECTORS), (OF_VECTORS[0], 1), (OF_VECTORS[0], 3)],
)
def test_layers(tier, columns):
    """Experts, with gate and up apart and in turns of two (tiles of which a column is made of
    several), with biases and an adapter.
    """
    g = torch.Generator().manual_seed(columns)
    groups, hidden, inner = 3, 288, 48
    gate_up, down = (
        list(quantize(torch.randn(groups, n, k, generator=g) / 9, NVFP4))
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    x, ids, w = (
        torch.randn(30, hidden, generator=g),
        torch.randint(0, groups, (30, 2), generator=g),
        torch.rand(30, 2, generator=g),
    )
    kwargs = {
        "weight_format": "nvfp4",
        "activation_format": "int8",
        "activation": swiglu((0, 2, 0)[columns - 1]),
    }
    if columns == 3:
        kwargs |= {
            f"{name}_bias": torch.randn(groups, n, generator=g)
            for name, n in (("gate_up", 2 * inner), ("down", hidden))
        }
        kwargs |= {
            "down_lora_a": torch.randn(groups, 4, inner, generator=g),
            "down_lora_b": torch.randn(groups, hidden, 4, generator=g),
        }
    fusion = fusion_of_call("fused_experts", x, ids, w, gate_up, down, **kwargs)
    inputs = [
        x,
        ids,
        w,
        *gate_up,
        *down,
        *(t for t in kwargs.values() if isinstance(t, torch.Tensor)),
    ]
    found, want = program(fusion, tier)(inputs)[0], evaluate(fusion, *inputs)[0]
    # the activation between the products may differ in its last bits, which may be half a step of
    # an integer
    same(found, want, rtol=0, atol=float(want.abs().max()) / 200)


def test_steps_are_those_of_the_formula():
    """The reference itself, in float64 and one number at a time."""
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    codes, steps = int8.rows(x)
    for r in range(3):
        for b, block in enumerate((x[r, :256], x[r, 256:])):
            largest = float(block.abs().max())
            assert abs(float(steps[r, b]) * 127 - largest) < 1e-6 * largest
            assert (codes[r, b, : len(block)] - block / largest * 127).abs().max() <= 0.5 + 1e-4
            assert (codes[r, b, len(block) :] == 0).all()
            assert codes[r, b].abs().max() == 127
