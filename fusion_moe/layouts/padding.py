"""Zero padding that makes a weight whole tiles of a layout. A product with the padded weight gives
zeros in the added out-features, and adds zeros for the added in-features: no bit of the other
results changes if activations are finite.

>>> import torch
>>> from fusion_moe.encodings import ENCODINGS
>>> w = torch.tensor([[1., 2.], [3., 4.]]).bfloat16()  # rows of two runs: gate above up
>>> padding = Padding((2, 2), (4, 3), runs=2)
>>> padded = padding.pack(w, encoding=ENCODINGS["bf16"])
>>> padded[0].tolist()
[[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
>>> torch.equal(padding.unpack(*padded, encoding=ENCODINGS["bf16"])[0], w)
True
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..encodings import Encoding, Part, real_tensors
from .layout import as_bytes


@dataclass(frozen=True)
class Padding:
    """The sizes to which matrices [N, K] are padded, N out-features and K in-features.

    shape, padded: (N, K) before and after; runs: equal runs of rows, each padded at its end.
    """

    shape: tuple[int, int]
    padded: tuple[int, int]
    runs: int = 1

    def __bool__(self) -> bool:
        return self.shape != self.padded

    def pack(self, *parts: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
        """The parts of a weight [..., N, K] in linear order, or only the first, padded with zeros;
        scales of a matrix unchanged.
        """
        return tuple(
            self._pad(part, t, encoding) for part, t in zip(encoding.parts, parts, strict=False)
        )

    def unpack(self, *parts: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
        """The inverse of `pack`."""
        return tuple(
            self._cut(part, t, encoding) for part, t in zip(encoding.parts, parts, strict=False)
        )

    def pad_columns(self, x: Tensor) -> Tensor:
        """Activations, or A of an adapter, [..., K], with zeros appended. Differentiable, like all
        methods below.
        """
        more = self.padded[1] - self.shape[1]
        return pad(x, (0, more)) if more else x

    def pad_rows(self, t: Tensor, dim: int = -1) -> Tensor:
        """Values with one entry a row, such as a bias [..., N] or B of an adapter, [..., N, r] with
        dim = -2, with zeros after each run.
        """
        more = (self.padded[0] - self.shape[0]) // self.runs
        return (
            pad(t.unflatten(dim, (self.runs, -1)), (0, 0) * (-dim - 1) + (0, more)).flatten(
                dim - 1, dim
            )
            if more
            else t
        )

    def cut_rows(self, y: Tensor) -> Tensor:
        """The result of a product with the padded weight, [..., N'], without the added features."""
        if self.shape[0] == self.padded[0]:
            return y
        return torch.cat(
            [run[..., : self.shape[0] // self.runs] for run in y.chunk(self.runs, -1)], -1
        )

    def _pad(self, part: Part, t: Tensor, encoding: Encoding) -> Tensor:
        if part.of_matrix or not self:
            return t
        lead, stored = t.shape[:-2], as_bytes(t)
        zero = 0 if part.scale else _zero(encoding)
        padded = stored.new_full(encoding.part_shape(part, lead, *self.padded), zero)
        _in_runs(padded, self.runs)[..., : self.shape[0] // self.runs, : t.shape[-1]] = _in_runs(
            stored, self.runs
        )
        return padded.view(t.dtype)

    def _cut(self, part: Part, t: Tensor, encoding: Encoding) -> Tensor:
        if part.of_matrix or not self:
            return t
        *lead, n, width = encoding.part_shape(part, t.shape[:-2], *self.shape)
        kept = _in_runs(as_bytes(t), self.runs)[..., : n // self.runs, :width]
        return kept.reshape(*lead, n, width).view(t.dtype)


def _in_runs(t: Tensor, runs: int) -> Tensor:
    """[..., N, W] -> [..., runs, N / runs, W]"""
    return t.unflatten(-2, (runs, -1))


@real_tensors()
def _zero(encoding: Encoding) -> int:
    """The item whose elements are all zero."""
    element = encoding.element
    if element.encode is None:
        return 0
    code = int(element.encode(torch.zeros(1, dtype=torch.float32)))
    return sum(code << i * element.bits for i in range(element.per_item))
