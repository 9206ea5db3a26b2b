"""Layouts: the same numbers in another order of bytes, as objects with an inverse. A layout never
changes the meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..encodings import Encoding
from ..errors import ShapeError


@dataclass(frozen=True)
class Layout(ABC):
    """An order of elements in memory: of a tensor, and of the parts of a weight, which must be
    whole tiles of a certain size.
    """

    name: str
    tile: ClassVar[tuple[int, int]] = (1, 1)

    def storage_shape(self, shape: tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor of `shape` in this order, its rows in `count` groups (None: not
        partitioned). Sizes: int or SymInt. Where nothing is padded it is `shape`.
        """
        return tuple(shape)

    def why_not(self, n: Any, k: Any, encoding: Encoding) -> str:
        """Why a weight [N, K] in an encoding cannot be stored in this order; "" if it can."""
        return ""

    @abstractmethod
    def pack(self, *parts: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
        """The parts of a weight [..., N, K] in linear order, or only the first of them -> the same
        in this order.

        ShapeError for a weight that cannot be stored in this order.
        """

    @abstractmethod
    def unpack(self, *parts: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
        """The inverse of `pack`."""


@dataclass(frozen=True)
class TensorLayout(Layout):
    """A layout of one tensor, such as block scales. `inverse(forward(x, ends), x.shape, ends)` is
    x, except for rows of no group.
    """

    @abstractmethod
    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x [..., R, C] in row-major order -> the same elements in this order; with ends i32 [G] x
        is [M, C], rows of groups.
        """

    @abstractmethod
    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """The result of `forward` -> x of `shape` in row-major order; rows that belong to no group
        are zero.
        """

    def pack(
        self, *parts: Tensor, encoding: Encoding, ends: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Block scales in this order, other parts unchanged. ends: as of `forward`."""
        return tuple(
            self.forward(t, ends) if part.of_blocks else t
            for part, t in zip(encoding.parts, parts, strict=False)
        )

    def unpack(
        self, *parts: Tensor, encoding: Encoding, ends: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The inverse of `pack`."""
        *lead, n, packed_k = parts[0].shape
        k = encoding.elements(packed_k)
        return tuple(
            self.inverse(t, encoding.part_shape(part, lead, n, k), ends) if part.of_blocks else t
            for part, t in zip(encoding.parts, parts, strict=False)
        )


@dataclass(frozen=True)
class Linear(TensorLayout):
    """Row-major order: nothing moves."""

    name: str = "linear"

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """x itself."""
        return x

    def inverse(self, stored: Tensor, shape: tuple[int, ...], ends: Tensor | None = None) -> Tensor:
        """stored itself. ShapeError if it has another shape."""
        check_stored(stored, tuple(shape), self.name)
        return stored


LINEAR = Linear()


def as_bytes(x: Tensor) -> Tensor:
    """x in a dtype that every operation takes: fp8 and fp4 as uint8, all others unchanged."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def check_stored(stored: Tensor, want: tuple[int, ...], where: str) -> None:
    """ShapeError unless a stored tensor has the shape that `forward` makes."""
    if tuple(stored.shape) != want:
        raise ShapeError(
            f"stored is {list(stored.shape)}",
            expected=f"{list(want)}, what forward returns for this shape",
            todo="pass the shape and the ends that forward was given",
            where=where,
        )
