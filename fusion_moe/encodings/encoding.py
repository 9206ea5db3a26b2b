"""The data model of encodings: elements, the scales that multiply them, and the tensors that hold
both.

    element = code * (scale_0 * scale_1 * ...)        every product one float32 operation, in that
                                                      order

A matrix `[..., N, K]` (N out-features, K in-features) is stored as the parts of its encoding: the
elements, packed along K if they are narrower than a byte (the first one in the lowest bits), then
each scale: one for each block of elements along K, or one for a whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Element:
    """The type of an element.

    bits: of its code; dtype: of the tensor that holds codes, uint8 if they are narrower than a
    byte; maximum: the largest number. encode: float32 [...] -> uint8 [...], one code each, to
    nearest, ties to even, saturating at the maximum; decode: the inverse. Both None: codes are
    numbers of `dtype`.
    """

    name: str
    bits: int
    dtype: torch.dtype
    maximum: float
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None

    @property
    def per_item(self) -> int:
        """How many elements are in one item of the tensor: 2 for four bits."""
        return max(1, 8 // self.bits)


@dataclass(frozen=True)
class Scale:
    """One of the factors of an element.

    block: how many elements along K one scale covers; 0: a whole matrix, or each of S equal runs of
    its rows (gate and up keep their own). divides: whether it is stored as a divisor. choose(amax,
    outer) -> float32: the scale for elements with this largest magnitude if the scales around it
    multiply to `outer`; it is clamped to minimum .. maximum and rounded to dtype.
    """

    part: str
    dtype: torch.dtype
    block: int
    choose: Callable[[Tensor, Tensor | float], Tensor]
    minimum: float = 0.0
    maximum: float = float("inf")
    divides: bool = False


@dataclass(frozen=True)
class Part:
    """A tensor of an encoded value: its name, its dtype, and the scale that it holds (None: the
    elements).
    """

    name: str
    dtype: torch.dtype
    scale: Scale | None = None

    @property
    def of_blocks(self) -> bool:
        """Whether this part holds the scales of blocks along K."""
        return self.scale is not None and self.scale.block > 0

    @property
    def of_matrix(self) -> bool:
        """Whether this part is the scale of a whole matrix, or of runs of its rows."""
        return self.scale is not None and self.scale.block == 0


@dataclass(frozen=True)
class Encoding:
    """How a matrix is stored. scales: from the finest to the coarsest. axis: the dimension along
    which blocks lie.
    """

    name: str
    element: Element
    scales: tuple[Scale, ...] = ()
    axis: int = -1

    @property
    def plain(self) -> bool:
        """Whether a value is one tensor of numbers."""
        return self.element.encode is None and not self.scales

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors of a value, in order."""
        elements = "codes" if self.element.encode else "values"
        return (
            Part(elements, self.element.dtype),
            *(Part(s.part, s.dtype, s) for s in self.scales),
        )

    @property
    def block_scales(self) -> tuple[Scale, ...]:
        """The scales of blocks along K."""
        return tuple(s for s in self.scales if s.block)

    @property
    def block(self) -> int:
        """The number of which K is a multiple."""
        return max([self.element.per_item, *(s.block for s in self.scales)])

    @property
    def weight_bits(self) -> float:
        """Bits of an element including its share of the block scales."""
        return self.element.bits + sum(8 * s.dtype.itemsize / s.block for s in self.block_scales)

    def packed(self, k: int) -> int:
        """How many items along K hold k elements (int or SymInt). ShapeError if k is not a multiple
        of the block and blocks lie along K.
        """
        if self.axis == -1:
            self.need_whole(k)
        return k // self.element.per_item

    def elements(self, packed_k: int) -> int:
        """How many elements along K are in packed_k items (int or SymInt): the inverse of
        `packed`.
        """
        return packed_k * self.element.per_item

    def blocks(self, k: int) -> int:
        """How many block scales k elements (int or SymInt) have along K. ShapeError if k is not a
        multiple of the block.
        """
        self.need_whole(k)
        return k // self.block_scales[0].block if self.block_scales else 0

    def part_shape(
        self, part: Part, lead: Sequence[Any], n: Any, k: int, runs: int = 0
    ) -> tuple[Any, ...]:
        """The shape of a part of a `[*lead, N, K]`, in linear order. runs: S for a scale of runs of
        rows, 0 for one scale a matrix.
        """
        if part.scale is None:
            return (*lead, n, self.packed(k))
        if part.scale.block:
            self.need_whole(n if self.axis == -2 else k)
            return (
                (*lead, n // part.scale.block, k)
                if self.axis == -2
                else (*lead, n, k // part.scale.block)
            )
        return (*lead, runs) if runs else tuple(lead)

    def need_whole(self, size: int, name: str = "") -> None:
        """ShapeError unless a size along the blocks, called `name`, is a multiple of the block."""
        name = name or ("N" if self.axis == -2 else "K")
        if size % self.block != 0:
            raise ShapeError(
                f"{name} = {size}",
                expected=f"a multiple of {self.block}, the block of {self.name}",
                todo=f"pad {name} with zeros to a multiple of {self.block}, or keep this weight "
                "in floating point",
                where=self.name,
            )


class Quantized(tuple[Tensor, ...]):
    """A matrix `[..., N, K]` as the parts of its encoding: a tuple of the parts, which are also
    attributes by their names.
    """

    encoding: Encoding

    def __new__(cls, *parts: Tensor, encoding: Encoding | None = None) -> Quantized:
        """The parts in the order of the encoding, NVFP4 unless another one is given."""
        made = super().__new__(cls, parts)
        made.encoding = encoding or ENCODINGS["nvfp4"]
        if len(parts) != len(made.encoding.parts):
            raise ShapeError(
                f"{len(parts)} parts of {made.encoding.name}",
                expected=", ".join(p.name for p in made.encoding.parts),
            )
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return tuple(self), {"encoding": self.encoding}

    def __getattr__(self, name: str) -> Tensor:
        for part, tensor in self.named():
            if part.name == name:
                return tensor
        raise AttributeError(name)

    def named(self) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its tensor."""
        return zip(
            self.__dict__["encoding"].parts if "encoding" in self.__dict__ else (),
            self,
            strict=False,
        )

    @property
    def elements(self) -> Tensor:
        """The first part, which holds the elements."""
        return self[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        return (*self[0].shape[:-1], self.encoding.elements(self[0].shape[-1]))

    @property
    def device(self) -> torch.device:
        """The device of the parts."""
        return self[0].device

    def with_(self, **parts: Tensor) -> Quantized:
        """The same with some parts changed."""
        return self.of(parts.get(part.name, tensor) for part, tensor in self.named())

    def of(self, parts: Any) -> Quantized:
        """Other parts in this encoding."""
        return Quantized(*parts, encoding=self.encoding)


ENCODINGS: dict[str, Encoding] = {}


def register(encoding: Encoding) -> Encoding:
    """Registers an encoding by its name, for types, operations and readers of kernels.

    OptionError if another one has the name, or if two of its parts have the same name.
    """
    names = [part.name for part in encoding.parts]
    if len(set(names)) < len(names):
        raise OptionError(
            f"the parts {', '.join(names)} of {encoding.name}", expected="a name for each"
        )
    if ENCODINGS.setdefault(encoding.name, encoding) != encoding:
        raise OptionError(
            f"another encoding called {encoding.name!r}",
            expected="an unused name",
            todo="unregister it first",
        )
    return encoding


def unregister(name: str) -> None:
    """Undoes `register`."""
    ENCODINGS.pop(name, None)


def find(name: str) -> Encoding:
    """The encoding called `name`. OptionError if there is none."""
    if name not in ENCODINGS:
        raise OptionError(
            f"encoding {name!r}",
            expected=f"one of {', '.join(ENCODINGS)}",
            todo="fusion_moe.encodings.register adds one",
        )
    return ENCODINGS[name]
