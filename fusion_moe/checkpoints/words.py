"""Codes in int32 words, as compressed-tensors, GPTQ and AWQ pack them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..encodings import NIBBLES


@dataclass(frozen=True)
class Words:
    """Where codes lie in words, the first in the lowest bits.

    bits: 4 or 8; along_rows: whether a word has codes of one column, not of one row; order: for
    each place of a word, which of the eight codes lies there; (): they lie in order. less: how much
    smaller stored numbers are than codes.
    """

    bits: int
    along_rows: bool = False
    order: tuple[int, ...] = ()
    less: int = 0

    def codes(self, t: Tensor) -> Tensor:
        """int32 words [..., R, C] -> u8 codes, one each."""
        t = _viewed(t.mT if self.along_rows else t, torch.uint8)
        t = NIBBLES.unpacked(t) if self.bits == 4 else t
        t = _in_order(t, sorted(range(len(self.order)), key=self.order.__getitem__)) + self.less
        return t.mT if self.along_rows else t

    def words(self, t: Tensor) -> Tensor:
        """The inverse. Zeros follow if a word is not full."""
        t = (t.mT if self.along_rows else t) - self.less
        t = _in_order(pad(t, (0, -t.shape[-1] % (32 // self.bits))), self.order)
        t = _viewed(NIBBLES.packed(t) if self.bits == 4 else t, torch.int32)
        return (t.mT if self.along_rows else t).contiguous()


def _viewed(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as another dtype. (Rows of one number may have any stride.)"""
    return t.reshape(-1).view(dtype).view(*t.shape[:-1], -1)


def _in_order(t: Tensor, order: tuple[int, ...] | list[int]) -> Tensor:
    """Of every eight codes u8 [..., K], in place i the one of number order[i]."""
    if not order:
        return t
    places = torch.tensor(order, device=t.device)
    return t.unflatten(-1, (-1, len(order))).index_select(-1, places).flatten(-2)
