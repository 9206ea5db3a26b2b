"""MXFP4 as NVFP4: equal numbers by an independent decode, for random codes and scales; what is
refused.
"""

import ml_dtypes
import numpy as np
import torch
from bad_calls import messages
from hypothesis import given, strategies as st

from fusion_moe.encodings import BF16, MXFP4, NVFP4, Quantized, exactly, quantize

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
OCTAVES = 17


def weight(
    low: np.ndarray, span: int, zeros: float, seed: int, shape: tuple[int, int, int]
) -> Quantized:
    """mxfp4 [E, N, K] whose exponents are low .. low + span, but for blocks of zeros, which have
    any; low: [E, 1 or N, 1].
    """
    e, n, k = shape
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (e, n, k // 32, 16), dtype=np.uint8)
    exponent = low + rng.integers(0, span + 1, (e, n, k // 32))
    empty = rng.random((e, n, k // 32)) < zeros
    codes[empty] &= 0x88  # zeros of both signs
    exponent = np.where(empty, rng.integers(-127, 128, exponent.shape), exponent)
    scale = torch.from_numpy((exponent.clip(-127, 127) + 127).astype(np.uint8)).view(
        torch.float8_e8m0fnu
    )
    return Quantized(torch.from_numpy(codes.reshape(e, n, k // 2)), scale, encoding=MXFP4)


def decoded(q: Quantized) -> np.ndarray:
    """float64 [E, N, K], by ml_dtypes."""
    codes = q.codes.numpy()
    values = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(
        codes.shape[0], codes.shape[1], -1
    )
    kind = ml_dtypes.float8_e8m0fnu if q.encoding == MXFP4 else ml_dtypes.float8_e4m3fn
    scale = q.block_scale.view(torch.uint8).numpy().view(kind).astype(np.float64)
    found = values * scale.repeat(values.shape[-1] // scale.shape[-1], -1)
    if q.encoding == MXFP4:
        return found
    decode = q.decode_scale.numpy().astype(np.float64).reshape(len(codes), -1)
    return found * decode.repeat(values.shape[1] // decode.shape[1], -1)[..., None]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b) and np.array_equal(np.signbit(a), np.signbit(b)))


@given(
    span=st.integers(0, OCTAVES),
    low=st.integers(-127, 127),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
    runs=st.sampled_from([0, 1, 2, 6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equal_numbers_with_a_scale_for_a_matrix_or_a_run(span, low, zeros, runs, seed):
    q = weight(np.full((2, 1, 1), low), span, zeros, seed, (2, 6, 96))
    made = exactly(q, NVFP4, runs)
    assert (made.encoding, tuple(made.decode_scale.shape)) == (NVFP4, (2, runs) if runs else (2,))
    assert same(decoded(made), decoded(q))
    assert made.codes is q.codes


@given(
    lows=st.lists(st.integers(-127, 110), min_size=12, max_size=12),
    span=st.integers(0, OCTAVES),
    seed=st.integers(0, 2**32 - 1),
)
def test_equal_numbers_with_a_scale_for_a_row(lows, span, seed):
    q = weight(np.array(lows).reshape(2, 6, 1), span, 0.1, seed, (2, 6, 96))
    assert same(decoded(exactly(q, NVFP4)), decoded(q))


def test_rows_get_scales_of_their_own_only_where_one_is_too_few():
    x = torch.ones(1, 4, 64)
    x[0, :2] = 2.0**17
    assert exactly(quantize(x, encoding=MXFP4), NVFP4).decode_scale.shape == (1,)
    x[0, :2] = 2.0**18
    q = quantize(x, encoding=MXFP4)
    assert exactly(q, NVFP4).decode_scale.tolist() == [[2.0**8, 2.0**8, 2.0**-10, 2.0**-10]]
    assert exactly(q, NVFP4, 2).decode_scale.tolist() == [[2.0**8, 2.0**-10]]


def test_refusals(golden):
    x = torch.ones(2, 4, 64)
    x[1, 2, 40] = 2.0**18
    q, no_number = (quantize(x, encoding=MXFP4) for _ in range(2))
    no_number.block_scale.view(torch.uint8)[0, 1, 1] = 255
    golden(
        messages(
            {
                "too many octaves": lambda: exactly(q, NVFP4),
                "no FP4": lambda: exactly(quantize(x.bfloat16(), encoding=BF16), NVFP4),
                "runs": lambda: exactly(q, NVFP4, 3),
                "NaN": lambda: exactly(no_number, NVFP4),
            }
        )
    )
