"""Weights in few bits as FP8 with a power of two for 128 x 128 (`fp8_e8m0`), which tensor cores for
FP8 multiply as it is.

An MXFP4 block of 128 x 128 keeps its values if its scales span no more than what e4m3 does between
its least number and its largest, 15 powers of two. NVFP4 and INT4 have scales that are no powers
of two: their weights are rounded once more.

>>> import torch
>>> from fusion_moe.encodings import MXFP4, quantize
>>> requantized, count = requantize(quantize(torch.ones(256, 32), MXFP4))
>>> (requantized.encoding.name, count.tolist())  # 2 of 2 blocks are exact
('fp8_e8m0', [2.0, 2.0, 0.0, 8192.0])
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UnsupportedError
from .convert import dequantize, quantize
from .encoding import Encoding, Quantized
from .fp8 import BLOCK, FP8_E8M0

REQUANTIZED = FP8_E8M0


def requantizable(encoding: Encoding) -> bool:
    """Whether a weight in an encoding can be requantized: codes of fewer than 8 bits, along K."""
    return not encoding.plain and encoding.element.bits < 8 and encoding.axis == -1


def requantize(q: Quantized, runs: int = 1) -> tuple[Quantized, Tensor]:
    """A weight [..., N, K] -> it in FP8, and f64 [4]: how many blocks are exact, of how many; the
    squares of all errors, of all weights. Nothing waits for the device.

    runs: equal runs of rows, such as gate and up, that share no block. UnsupportedError for an
    encoding that is not `requantizable`.
    """
    if not requantizable(q.encoding):
        raise UnsupportedError(
            f"a weight in {q.encoding.name} to requantize", expected="codes of fewer than 8 bits"
        )
    numbers = dequantize(q).unflatten(-2, (runs, -1))
    requantized = quantize(numbers, REQUANTIZED)
    error = dequantize(requantized) - numbers
    rows, columns = (-size % BLOCK for size in error.shape[-2:])
    wrong = pad(error != 0, (0, columns, 0, rows))
    wrong = wrong.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).any(-1).any(-2)
    squares = (error.double().square().sum(), numbers.double().square().sum())
    exact, blocks = (~wrong).sum().double(), torch.full_like(squares[0], wrong.numel())
    joined = requantized.of(part.flatten(-3, -2) for part in requantized)
    return joined, torch.stack([exact, blocks, *squares])
