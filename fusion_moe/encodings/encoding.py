"""The data model of encodings: elements, the scales that multiply them, and the tensors that hold
both.

    element = (code - zero point) * (scale_0 * scale_1 * ...)      every operation one of float32

A matrix `[..., N, K]` (N out-features, K in-features) is stored as the parts of its encoding: the
elements, packed along K if they are narrower than a byte (the first one in the lowest bits), then
each scale: one for each block of elements along K, for each row, or for a whole matrix. Most
encodings have no zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, one_of
from .encoded import plain
from .orders import UNCHANGED, USUAL, CodeOrder, Recoding
from .real import real_tensors

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# the dtypes of parts: those of the IR that are no integers of several bytes
STORED = (
    *FLOATS,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)
ROW = -1  # the block of a scale that covers a whole row, whatever K is


@dataclass(frozen=True)
class Element:
    """The type of the elements of an encoding: its bits, and the number that each code stands for.

    bits: of its code, of which a byte holds a whole number; dtype: of the tensor that holds codes,
    uint8 if they are narrower than a byte; maximum: the largest number. encode: float32 [...] ->
    uint8 [...], one code each, to nearest, ties to even, saturating at the maximum; decode: the
    inverse. Both None: codes are numbers of `dtype`. `integers` and `look_up` make the usual ones.
    nearest: both, one after the other, for encodings whose scales may be searched (search.py).
    order: how codes lie in the tiles that CUDA's kernels read; None: the usual one for so many
    bits. OptionError for other bits.
    """

    name: str
    bits: int
    dtype: torch.dtype
    maximum: float
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None
    order: CodeOrder | None = None
    nearest: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8, 16, 32):
            raise OptionError(
                f"elements of {self.bits} bits ({self.name})",
                expected="1, 2, 4, 8, 16 or 32 bits: a byte holds whole codes",
                todo="store 3-bit codes in 4 bits, 5- and 6-bit codes in 8",
            )

    @classmethod
    def integers(cls, name: str, bits: int, least: int) -> Element:
        """Consecutive integers, of which code 0 is `least`, ties to even. NaN becomes 0."""
        largest = least + 2**bits - 1

        def encode(x: Tensor) -> Tensor:
            return x.nan_to_num(0).round().clamp(least, largest).sub(least).to(torch.uint8)

        def decode(code: Tensor) -> Tensor:
            return code.float() + least

        def nearest(x: Tensor) -> Tensor:
            return x.round().clamp_(least, largest)

        return cls(name, bits, torch.uint8, float(largest), encode, decode, nearest=nearest)

    @classmethod
    @real_tensors()
    def look_up(cls, name: str, values: Sequence[float]) -> Element:
        """Numbers from a table: code i is values[i], for 2, 4, 16 or 256 of them. A tie goes to the
        smaller one. OptionError for NaN or infinity among them.
        """
        table = torch.tensor(values, dtype=torch.float32)
        bits = len(values).bit_length() - 1
        if not table.isfinite().all() or len(values) != 2**bits:
            raise OptionError(
                f"{len(values)} values, {int((~table.isfinite()).sum())} of them NaN or infinite, "
                f"for elements {name}",
                expected="2, 4, 16 or 256 finite numbers, one for each code",
                todo="repeat a number for codes that are not in use",
            )
        rising, codes = table.sort(stable=True)
        numbers, ascending = table.tolist(), codes.tolist()
        between = ((rising[1:].double() + rising[:-1].double()) / 2).tolist()

        def encode(x: Tensor) -> Tensor:
            place = torch.bucketize(x, _filled(between, x.device))
            return _filled(ascending, x.device)[place].to(torch.uint8)

        def decode(code: Tensor) -> Tensor:
            return _filled(numbers, code.device)[code.long()]

        return cls(name, bits, torch.uint8, max(numbers), encode, decode)

    @property
    def per_item(self) -> int:
        """How many elements are in one item of the tensor: 2 for four bits."""
        return max(1, 8 // self.bits)

    @property
    def holds_nan(self) -> bool:
        """Whether one of its codes is NaN."""
        return any(v != v for v in self.values)

    @property
    def tile_order(self) -> CodeOrder | None:
        """The order of codes in a tile of the layout `w16x64`: the element's own, else the usual
        one for its number of bits; None if no kernel has an order for such codes.
        """
        return self.order or USUAL.get(self.bits)

    @cached_property
    @real_tensors()
    def values(self) -> tuple[float, ...]:
        """The number of each code of up to 8 bits; () for wider ones."""
        if self.bits > 8:
            return ()
        codes = torch.arange(2**self.bits, dtype=torch.uint8)
        result = self.decode(codes.int()) if self.decode else codes.view(self.dtype).float()
        return tuple(result.tolist())

    @cached_property
    @real_tensors()
    def few_bits(self) -> tuple[int, float] | None:
        """(mantissa, factor) if a code is a float of few bits: its sign, exponent and `mantissa`
        bits, as those of a float32, make its number over the factor. Codes of ones, whatever their
        sign, may be NaN.
        """
        half, wanted = 2 ** (self.bits - 1), torch.tensor(self.values, dtype=torch.float32)
        codes = torch.arange(len(wanted), dtype=torch.int32)
        ones = codes % half == half - 1
        for mantissa in range(self.bits - 1 if self.values else 0):
            sizes = ((codes % half) << (23 - mantissa)).view(torch.float32)
            factor = self.values[1] / float(sizes[1])
            result = torch.where(codes < half, sizes, -sizes) * factor
            same = result.view(torch.int32) == wanted.view(torch.int32)
            if bool((same | (ones & wanted[ones].isnan().all())).all()):
                return mantissa, factor
        return None

    @cached_property
    def affine(self) -> tuple[int, int] | None:
        """(flip, first) if the number of each code is the integer `(code ^ flip) + first`: flip is
        0, or the sign bit of two's complement.
        """
        for flip in (0, 2 ** (self.bits - 1)):
            first = self.values[flip] if self.values else 0.5
            line = [(i ^ flip) + first for i in range(len(self.values))]
            if first % 1 == 0 and list(map(str, self.values)) == list(map(str, line)):  # no -0.0
                return flip, int(first)
        return None


def _filled(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Numbers as a float32 tensor, by fills and no copy: a CUDA graph may capture it."""
    return torch.stack([torch.full((), n, dtype=torch.float32, device=device) for n in numbers])


@dataclass(frozen=True)
class Scale:
    """One level of scales of an encoding, or its zero points: what one of them covers, and its
    dtype.

    block: how many elements along K one scale covers; ROW: a whole row; 0: a whole matrix, or each
    of S equal runs of its rows (gate and up keep their own). divides: whether it is stored as a
    divisor. zero_point: whether it is no factor but what is subtracted from the code; it covers as
    many elements as the finest scale. choose(amax, outer) -> float32: the scale for elements with
    this largest magnitude if the scales around it multiply to `outer`; it is clamped to minimum ..
    maximum and rounded to dtype. Where there are zero points, `amax` is the distance from the least
    element to the largest, 0 among them; the zero points follow from the scales.

    signed: whether files may hold negative ones. rows: how many rows, from the first on, have equal
    ones. short: whether the last block of a row may have fewer elements. recoding: of its bytes, in
    the tiles that CUDA's kernels read. over(amax): what elements are multiplied by to become codes,
    if this is the only scale; None: they are divided by the scale. others: by the rules that search
    (search.py), what else may be chosen: the scale for so many times amax, then so many numbers of
    dtype up. usual: the rule that `quantize_` takes.
    """

    part: str
    dtype: torch.dtype
    block: int
    choose: Callable[[Tensor, Tensor | float], Tensor] = lambda amax, outer: amax
    minimum: float = 0.0
    maximum: float = float("inf")
    divides: bool = False
    zero_point: bool = False
    signed: bool = True
    rows: int = 1
    short: bool = False
    recoding: Recoding = field(default=UNCHANGED, repr=False)
    over: Callable[[Tensor], Tensor] | None = None
    others: Mapping[str, Sequence[tuple[float, int]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    usual: str = field(default="max", compare=False, repr=False)

    def rounded(self, amax: Tensor, outer: Tensor | float) -> Tensor:
        """The scale, in its dtype, for elements with this largest magnitude f32 [...]."""
        wanted = self.choose(amax, outer)
        if self.minimum or self.maximum != float("inf"):
            wanted = wanted.clamp(self.minimum, self.maximum)
        return wanted.to(self.dtype)

    def count(self, size: Any) -> Any:
        """How many of them `size` elements along the blocks have (int or SymInt)."""
        if self.block == ROW:
            return 1
        return -(-size // self.block) if self.short else size // self.block


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
        """Whether this part holds the scales of blocks along K, or of rows."""
        return self.scale is not None and self.scale.block != 0

    @property
    def of_matrix(self) -> bool:
        """Whether this part is the scale of a whole matrix, or of runs of its rows."""
        return self.scale is not None and self.scale.block == 0


@dataclass(frozen=True)
class Encoding:
    """How a matrix is stored. scales: from the finest to the coarsest, zero points anywhere among
    them. axis: the dimension along which blocks lie. equivalents: by the names of other encodings,
    functions that give a weight and a number of runs of its rows (0: none) the same values there;
    `exactly` calls them. OptionError for scales that do not fit together.
    """

    name: str
    element: Element
    scales: tuple[Scale, ...] = ()
    axis: int = -1
    equivalents: Mapping[str, Callable[[Quantized, int], Quantized]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for actual, expected in self._misfits():
            raise OptionError(f"{actual} of {self.name}", expected=expected)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of a registered one, and what a pickle of it gives, is itself: it holds functions,
        which pickles do not take, and copies of which are not equal.
        """
        registered = ENCODINGS.get(self.name) is self
        return (find, (self.name,)) if registered else super().__reduce_ex__(protocol)

    def _misfits(self) -> Iterator[tuple[str, str]]:
        names, each = [part.name for part in self.parts], self.element.per_item
        sizes = [s.block for s in self.factors]
        blocks = [b for b in sizes if b > 0]
        if len(set(names)) < len(names):
            yield f"the parts {', '.join(names)}", "a name for each"
        if sizes != sorted(sizes, key=_coarseness):
            yield f"scales for {sizes} elements", "the finest first"
        if any(b % a for a, b in zip([each, *blocks], blocks, strict=False)):
            yield (
                f"scales for {blocks} elements",
                "each a multiple of the one before, and of a byte",
            )
        if len(self.zero_points) > 1 or any(z.block not in sizes[:1] for z in self.zero_points):
            yield "the zero points", "one for each scale of the finest kind"
        for part in self.parts:
            if part.dtype not in STORED:
                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED)
                yield f"{part.name} in {part.dtype}", f"what products read: {dtypes}"
        least, largest = min(self.element.values, default=0), max(self.element.values, default=0)
        for dtype in (z.dtype for z in self.zero_points if not z.dtype.is_floating_point):
            if least < torch.iinfo(dtype).min or largest > torch.iinfo(dtype).max:
                yield (
                    f"zero points in {dtype} beside codes for {least:g} to {largest:g}",
                    "a dtype that holds these: element = (code - zero point) * scales",
                )
        if self.axis == -2 and each > 1:
            yield "blocks along N", "elements of at least a byte: narrower ones are packed along K"

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
    def factors(self) -> tuple[Scale, ...]:
        """The scales that multiply: all but zero points."""
        return tuple(s for s in self.scales if not s.zero_point)

    @property
    def zero_points(self) -> tuple[Scale, ...]:
        """The zero points: none or one."""
        return tuple(s for s in self.scales if s.zero_point)

    @property
    def block_scales(self) -> tuple[Scale, ...]:
        """The scales, and zero points, of blocks along K or of rows."""
        return tuple(s for s in self.scales if s.block)

    @property
    def block(self) -> int:
        """The number of which K is a multiple, unless last blocks may be short: then that of where
        a matrix can be cut.
        """
        return max([self.element.per_item, *(s.block for s in self.scales)])

    @property
    def multiple(self) -> int:
        """The number of which K is a multiple."""
        return max([self.element.per_item, *(s.block for s in self.scales if not s.short)])

    @property
    def weight_bits(self) -> float:
        """Bits of an element including its share of the block scales; those of rows do not
        count.
        """
        of_blocks = (s for s in self.block_scales if s.block > 0)
        return self.element.bits + sum(8 * s.dtype.itemsize / s.block for s in of_blocks)

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
        return self.block_scales[0].count(k) if self.block_scales else 0

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
            along_n = self.axis == -2
            count = part.scale.count(n if along_n else k)
            return (*lead, count, k) if along_n else (*lead, n, count)
        return (*lead, runs) if runs else tuple(lead)

    def need_whole(self, size: int, name: str = "") -> None:
        """ShapeError unless a size along the blocks, called `name`, is a multiple of the block."""
        name = name or ("N" if self.axis == -2 else "K")
        if size % self.multiple != 0:
            raise ShapeError(
                f"{name} = {size}",
                expected=f"a multiple of {self.multiple}, the block of {self.name}",
                todo=f"pad {name} with zeros to a multiple of {self.multiple}, or keep this weight "
                "in floating point",
                where=self.name,
            )


def _coarseness(block: int) -> float:
    return block if block > 0 else float("inf") if block == 0 else 2.0**62


class Quantized(tuple[Tensor, ...]):
    """A matrix `[..., N, K]` as the parts of its encoding: a tuple of the parts, which are also
    attributes by their names.
    """

    encoding: Encoding

    def __new__(cls, *parts: Tensor, encoding: Encoding) -> Quantized:
        """The parts in the order of the encoding, also a module's parameters. ShapeError if there
        are more or fewer.
        """
        result = super().__new__(cls, map(plain, parts))
        result.encoding = encoding
        if len(parts) != len(result.encoding.parts):
            raise ShapeError(
                f"{len(parts)} parts of {result.encoding.name}",
                expected=", ".join(p.name for p in result.encoding.parts),
            )
        return result

    def __getnewargs_ex__(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return tuple(self), {"encoding": self.encoding}

    def __getattr__(self, name: str) -> Tensor:
        for part, tensor in self.named():
            if part.name == name:
                return tensor
        raise AttributeError(name)

    def named(self) -> Iterator[tuple[Part, Tensor]]:
        """Each part of the weight by its name."""
        return zip(
            self.__dict__["encoding"].parts if "encoding" in self.__dict__ else (),
            self,
            strict=False,
        )

    @property
    def elements(self) -> Tensor:
        """The part with the codes, or of a weight in floats the floats themselves."""
        return self[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        return (*self[0].shape[:-1], self.encoding.elements(self[0].shape[-1]))

    @property
    def device(self) -> torch.device:
        """The device on which the parts are."""
        return self[0].device

    def with_(self, **parts: Tensor) -> Quantized:
        """The same weight with some parts changed."""
        return self.of(parts.get(part.name, tensor) for part, tensor in self.named())

    def of(self, parts: Any) -> Quantized:
        """Other parts in this encoding."""
        return Quantized(*parts, encoding=self.encoding)


ENCODINGS: dict[str, Encoding] = {}


def register(encoding: Encoding) -> Encoding:
    """Registers an encoding by its name, for types, operations and kernels. OptionError if another
    one has the name.
    """
    if ENCODINGS.setdefault(encoding.name, encoding) != encoding:
        raise OptionError(
            f"another encoding called {encoding.name!r}",
            expected="an unused name",
            todo="unregister it first",
        )
    return encoding


def unregister(name: str) -> None:
    """Removes an encoding that `register` added."""
    ENCODINGS.pop(name, None)


def find(name: str) -> Encoding:
    """The encoding called `name`. OptionError if there is none."""
    if name not in ENCODINGS:
        raise OptionError(
            f"encoding {name!r}",
            expected=one_of(name, ENCODINGS),
            todo="fusion_moe.encodings.register adds one",
        )
    return ENCODINGS[name]
