"""What words of integers mean, by the published layouts alone, with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def _of_words(words: Tensor, bits: int) -> np.ndarray:
    """Codes [R, C] of words [R, C * bits / 32], the first in the lowest bits."""
    places = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words.numpy().view(np.uint32)[..., None] >> places & (2**bits - 1)
    return codes.reshape(len(words), -1).astype(np.float32)


def of_packed(words: Tensor, scale: Tensor, zeros: Tensor | None, shape: list[int]) -> Tensor:
    bits = 32 * words.shape[1] // shape[1]
    zero = np.float32(2 ** (bits - 1))
    if zeros is not None:
        zero = (
            _of_words(zeros.T.contiguous(), bits)
            .T[: shape[0]]
            .repeat(shape[1] // scale.shape[1], -1)
        )
    factor = scale.float().numpy().repeat(shape[1] // scale.shape[1], -1)
    return torch.from_numpy((_of_words(words, bits) - zero) * factor)


def of_qweight(
    words: Tensor, zeros: Tensor, scales: Tensor, said: dict[str, Any], g_idx: Tensor | None = None
) -> Tensor:
    """A matrix as AWQ or GPTQ stores it, by the configuration. g_idx: the group of each column, if
    these do not follow one another.
    """
    by, bits = said.get("packing_format", said["quant_method"]), said["bits"]
    zero = _of_words(zeros, bits)
    if "awq" in by:
        order = (np.arange(zero.shape[1]).reshape(-1, 4, 2).swapaxes(1, 2)).ravel()
        codes = np.empty((len(words), zero.shape[1]), np.float32)
        codes[:, order] = _of_words(words, bits)
        zero[:, order] = zero.copy()
    else:
        codes = _of_words(words.T.contiguous(), bits).T
        zero = zero + (said.get("checkpoint_format", "gptq") == "gptq" and by != "auto_round")
    group = np.arange(len(codes)) * len(zero) // len(codes) if g_idx is None else g_idx.numpy()
    number = (codes - zero[group]) * scales.float().numpy()[group]
    return torch.from_numpy(np.ascontiguousarray(number.T))
