"""MXFP4 as NVFP4, exactly: the same codes, each power of two stored as two equal e4m3 scales, times
a power-of-two decode scale.

e4m3 has the powers 2^-9 to 2^8, so blocks that share a decode scale may span 17 octaves. Blocks of
zeros may have any scale.

>>> from fusion_moe.encodings import quantize
>>> x = torch.tensor([[2.0**-20, 3 * 2.0**-5] * 16, [1.0, 0.5] * 16])
>>> q = mxfp4_as_nvfp4(quantize(x, MXFP4))
>>> q.block_scale.float().tolist(), q.decode_scale.item()
([[16.0, 16.0], [256.0, 256.0]], 0.0009765625)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from .checks import check_part_scales, check_parts
from .encoding import Quantized
from .mxfp4 import MXFP4
from .nvfp4 import NVFP4

_LEAST, _LARGEST = -9, 8  # exponents of the powers of two of e4m3
_TWICE = MXFP4.block // NVFP4.block


def mxfp4_as_nvfp4(weight: Quantized, runs: int = 0) -> Quantized:
    """mxfp4 [..., N, K] -> nvfp4 [..., N, K] with equal values, with decode scales [...], or [...,
    runs]: for gate and up, one each.

    If a matrix, or a run of its rows, spans more than 17 octaves, each row gets a decode scale,
    [..., N]. Reads values, and so waits for the device. UnsupportedError for a row that spans more,
    and for another encoding; NonFiniteError for NaN scales; ShapeError unless runs divides N.
    """
    if weight.encoding != MXFP4:
        raise UnsupportedError(
            f"a weight in {weight.encoding.name}", expected="mxfp4", where="mxfp4_as_nvfp4"
        )
    *_, n, k = check_parts(weight, MXFP4, where="mxfp4_as_nvfp4")
    if 0 in (n, k) or n % max(runs, 1):
        found = (
            f"{runs} runs of a weight {list(weight.shape)}"
            if runs
            else f"a weight {list(weight.shape)}"
        )
        raise ShapeError(
            found,
            expected="at least one element in each matrix, and runs that divide N",
            where="mxfp4_as_nvfp4",
        )
    check_part_scales(MXFP4.parts[1], weight.block_scale, "block_scale")
    exponent = weight.block_scale.view(torch.uint8).int() - 127
    used = (
        (weight.codes.view(torch.uint8).unflatten(-1, (-1, MXFP4.block // 2)) & 0x77).ne(0).any(-1)
    )
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
    found = f"row {at} has block scales from 2^{of_row.min()} to 2^{of_row.max()}"
    return UnsupportedError(
        found,
        expected=f"{_LARGEST - _LEAST} octaves at most, to be NVFP4 exactly",
        todo="keep it in mxfp4",
    )
