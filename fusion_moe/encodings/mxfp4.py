"""MXFP4: E2M1 codes and a power-of-two scale for every 32 of them. The weights of gpt-oss.

    codes        uint8          [..., N, K/2]    two codes a byte, the low nibble is the even k
    block_scale  float8_e8m0fnu [..., N, K/32]   2^(byte - 127); 255 is NaN

The scale is 2^(floor(log2 amax) - 2), 2 being the exponent of the largest code: codes beyond 6
saturate. Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3; torchao's `to_mx`
with its default ScaleCalculationMode.FLOOR, compared byte by byte.

As NVFP4, exactly: the same codes, each power of two stored as two equal e4m3 scales, times a
power-of-two decode scale. e4m3 has the powers 2^-9 to 2^8, so blocks that share a decode scale may
span 17 octaves. Blocks of zeros may have any scale.

>>> from fusion_moe.encodings import NVFP4, exactly, quantize
>>> x = torch.tensor([[2.0**-20, 3 * 2.0**-5] * 16, [1.0, 0.5] * 16])
>>> q = exactly(quantize(x, MXFP4), NVFP4)
>>> q.block_scale.float().tolist(), q.decode_scale.item()
([[16.0, 16.0], [256.0, 256.0]], 0.0009765625)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from .checks import check_part_scales, check_parts
from .e2m1 import E2M1
from .encoding import Encoding, Quantized, Scale, register
from .nvfp4 import NVFP4
from .power_of_two import PowerOfTwo

_BLOCK = 32
_LEAST, _LARGEST = -9, 8  # exponents of the powers of two of e4m3
_TWICE = _BLOCK // NVFP4.block


def _as_nvfp4(weight: Quantized, runs: int) -> Quantized:
    """mxfp4 [..., N, K] -> nvfp4 [..., N, K] with equal values, with decode scales [...], or [...,
    runs]: for gate and up, one each.

    If a matrix, or a run of its rows, spans more than 17 octaves, each row gets a decode scale,
    [..., N]. Reads values, and so waits for the device. UnsupportedError for a row that spans more;
    NonFiniteError for NaN scales; ShapeError unless runs divides N.
    """
    *_, n, k = check_parts(weight, weight.encoding, where="mxfp4 as nvfp4")
    if 0 in (n, k) or n % max(runs, 1):
        raise ShapeError(
            f"{f'{runs} runs of ' if runs else ''}a weight {list(weight.shape)}",
            expected="at least one element in each matrix, and runs that divide N",
            where="mxfp4 as nvfp4",
        )
    check_part_scales(weight.encoding.parts[1], weight.block_scale, "block_scale")
    exponent = weight.block_scale.view(torch.uint8).int() - 127
    used = (weight.codes.view(torch.uint8).unflatten(-1, (-1, _BLOCK // 2)) & 0x77).ne(0).any(-1)
    base, spans = _bases(exponent, used, max(runs, 1))
    if spans.any():
        base, spans = _bases(exponent, used, n)
    if spans.any():
        raise _too_wide(exponent, used, spans)
    scale = _powers(
        torch.where(used, exponent - base.repeat_interleave(n // base.shape[-1], -1)[..., None], 0)
    )
    decode = _powers(base)
    block_scale = (
        scale.to(torch.float8_e4m3fn)
        .view(torch.uint8)
        .repeat_interleave(_TWICE, -1)
        .view(torch.float8_e4m3fn)
    )
    return Quantized(
        weight.codes,
        block_scale,
        decode if runs or base.shape[-1] > 1 else decode.squeeze(-1),
        encoding=NVFP4,
    )


def _bases(exponent: Tensor, used: Tensor, runs: int) -> tuple[Tensor, Tensor]:
    """Exponents of blocks int [..., N, B] -> that of each run's decode scale [..., runs], and
    whether a run spans too much for one scale.

    The largest block scale of a run becomes the largest power of two that e4m3 has.
    """
    none = 2**16
    of_runs = exponent.unflatten(-2, (runs, -1)), used.unflatten(-2, (runs, -1))
    most = torch.where(of_runs[1], of_runs[0], -none).amax((-2, -1))
    least = torch.where(of_runs[1], of_runs[0], none).amin((-2, -1))
    return torch.where(most > -none, most - _LARGEST, 0), most - least > _LARGEST - _LEAST


def _powers(exponent: Tensor) -> Tensor:
    """2^exponent as float32, including subnormal numbers: by the bits of float64, in which they are
    normal.
    """
    return (exponent.long() + 1023 << 52).view(torch.float64).float()


def _too_wide(exponent: Tensor, used: Tensor, spans: Tensor) -> UnsupportedError:
    at = tuple(spans.nonzero()[0].tolist())
    of_row = exponent[at][used[at]]
    text = f"row {at} has block scales from 2^{of_row.min()} to 2^{of_row.max()}"
    return UnsupportedError(
        text,
        expected=f"{_LARGEST - _LEAST} octaves at most, to be NVFP4 exactly",
        todo="keep it in mxfp4",
    )


MXFP4 = register(
    Encoding(
        "mxfp4",
        E2M1,
        (
            Scale(
                "block_scale",
                torch.float8_e8m0fnu,
                _BLOCK,
                PowerOfTwo(bias=2, carry=0, least=(3 << 23) - 1),
                minimum=2.0**-127,
                signed=False,
                others={"mse": ((1.0, -1), (1.0, 1))},
            ),
        ),
        equivalents={NVFP4.name: _as_nvfp4},
    )
)
