"""The arithmetic of Blackwell's 4-bit instruction, simulated, beside exact products of the same
operands. `pytest tests/backends/test_block_scaled_mma.py -s` prints the largest errors that
docs/nvfuser.md has.
"""

from __future__ import annotations

import pytest
import torch
from definitions import dequantized
from meaning.block_scaled_mma import block_scaled_mma
from torch import Tensor

from fusion_moe.encodings import NVFP4, quantize

M, N, K = 16, 64, 2048


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def heavy(*shape: int) -> Tensor:
    """Sizes of blocks are spread over e^(3 z)."""
    return drawn(*shape) * (3 * drawn(shape[0], shape[1] // 16)).exp().repeat_interleave(16, -1)


def denormal(*shape: int) -> Tensor:
    """A large number in each row leaves denormal scales, or zero, to all other blocks."""
    x = drawn(*shape)
    x[:, 0] = 2.0**17
    return x


def cancelling(*shape: int) -> Tensor:
    """Products of the second half of K take away those of the first, but for a few."""
    half = heavy(shape[0], shape[1] // 2)
    other = half.clone() if shape[0] == N else -half
    other[:, :64] += 0.01
    return torch.cat([half, other], -1)


INPUTS = {
    "normal": drawn,
    "heavy-tailed": heavy,
    "denormal scales": denormal,
    "cancelling": cancelling,
}
STEPS = K // 64


def operand(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of e2m1 and of block scales; and both multiplied, in float64."""
    codes, scale, _ = quantize(x[None], NVFP4)
    values = dequantized(codes[0], torch.ones(scale[0].shape))
    return values, scale[0].float(), dequantized(codes[0], scale[0]).double()


@pytest.mark.parametrize("name", INPUTS)
def test_beside_exact_products(name):
    """Each step cuts less than a bit of float32, which rounding to bf16 hides unless products
    cancel.
    """
    (a, scale_a, left), (b, scale_b, right) = (operand(INPUTS[name](rows, K)) for rows in (M, N))
    got, want = block_scaled_mma(a, b, scale_a, scale_b), left @ right.T
    error = (got.double() - want).abs() / (left.abs() @ right.abs().T)
    differ = int((got.bfloat16() != want.bfloat16()).sum())
    print(f"{name}: {error.max():.1e} of the sum of magnitudes; in bf16 {differ} of {M * N} differ")
    assert error.max() <= (0 if name == "normal" else STEPS * 2.0**-23)
    assert differ == 0 or name == "cancelling"


@pytest.mark.parametrize(("value", "kept"), [(0.25, False), (0.5, True)])
def test_a_step_keeps_35_bits(value, kept):
    """Below the largest exponent of two scales, although all values of their block are zero."""
    a, scale = torch.zeros(1, 64), torch.ones(1, 4)
    a[0, 16], scale[0, :2] = value, torch.tensor([2.0**8, 2.0**-9])
    sums = block_scaled_mma(a, torch.ones(1, 64), scale, scale)
    assert sums.item() == (value * 2.0**-18 if kept else 0.0)


def test_accumulators_are_cut_to_float32():
    """Towards zero, so a second step's 3 does not count beside 8, the last bit of the first."""
    a, b, scale = torch.zeros(1, 128), torch.full((1, 128), 6.0), torch.ones(1, 8)
    a[0, :16], a[0, 64], scale[0, 0] = 6.0, 0.5, 448.0
    whole = 6 * 6 * 16 * 448.0**2
    assert block_scaled_mma(a, b, scale, scale) == whole
    assert block_scaled_mma(-a, b, scale, scale) == -whole
