"""Types of the IR: what is known about a tensor before it exists. Shapes count logical elements,
never packed bytes.

bf16[m/g, 256]              rows partitioned into groups by g; K = 256
i32[16]@ends(g)             the ends of those runs
nvfp4[16, 256, 128]         one quantized value: codes, block scales and decode scales
f8e4m3[m/g%128, 16]@sf128x4 each run padded to 128 rows, in the swizzled layout
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from operator import mul
from typing import Any

import torch

from ..encodings import ENCODINGS, Encoding
from ..errors import DtypeError, ShapeError
from ..layouts import LAYOUTS, LINEAR, bound
from .sizes import AnySize, Size, is_size, never_negative, value

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e8m0": torch.float8_e8m0fnu,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NARROW = ("bf16", "f16")
FLOATS = ("f64", "f32", *NARROW)
STORED = ("f8e4m3", "f8e5m2", "f8e8m0")  # only stored: nothing is computed in these dtypes
COMPUTED = tuple(name for name in DTYPES if name not in STORED)
INTS = ("i64", "i32")
MOST_ELEMENTS = 2**63 - 1  # the most that an int64 address can reach


def called_here(dtype: object) -> str:
    """Advice about torch.bfloat16 or "bfloat16" where a name is expected; "" for anything else."""
    of_torch = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    name = DTYPE_NAMES.get(of_torch) if isinstance(of_torch, torch.dtype) else None
    return f"{dtype} is {name!r} here" if name else ""


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bf16"; a dtype that the IR does not have raises DtypeError."""
    if dtype not in DTYPE_NAMES:
        raise DtypeError(f"dtype {dtype}", expected=f"one of {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[dtype]


def accumulated(dtype: str) -> str:
    """The dtype in which values of a dtype, plain or encoded, are summed: f64 for f64, otherwise
    f32.
    """
    return "f64" if dtype == "f64" else "f32"


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype in which its values are summed."""
    return x.to(DTYPES[accumulated(dtype_name(x.dtype))])


@dataclass(frozen=True)
class Groups:
    """A partition of rows into `count` groups. The group sizes are in a device tensor that the host
    never reads.

    stride: group i begins at row i * stride, and rows after its end are nobody's; None: it begins
    where the group before it ends.
    """

    name: str
    count: AnySize
    stride: AnySize | None = None

    def __rtruediv__(self, total: AnySize) -> Rows:
        """m / g: m rows partitioned by g."""
        return Rows(total, self)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


@dataclass(frozen=True)
class Rows:
    """`total` rows partitioned by `groups`, each group starting at a multiple of `align` rows."""

    total: AnySize
    groups: Groups
    align: int = 1

    def __mod__(self, align: int) -> Rows:
        """m / g % 128: each run padded to a multiple of 128 rows."""
        return replace(self, align=align)

    def __str__(self) -> str:
        total = (
            f"({self.total})"
            if isinstance(self.total, Size) and len(self.total.terms) > 1
            else str(self.total)
        )
        return f"{total}/{self.groups}" + (f"%{self.align}" if self.align > 1 else "")

    __repr__ = __str__


Dim = AnySize | Rows


def dim_value(dim: Dim, env: Mapping[str, Any]) -> Any:
    """The number of elements to allocate for a dimension, with the symbols' values from `env`."""
    if isinstance(dim, Rows):
        total = value(dim.total, env)
        return total if dim.align == 1 else bound(total, value(dim.groups.count, env), dim.align)
    return value(dim, env)


def sizes_in(attr: Any) -> Iterator[Size]:
    """The sizes in an attribute, or in a shape, that depend on symbols."""
    if isinstance(attr, tuple):
        for a in attr:
            yield from sizes_in(a)
    elif isinstance(attr, Rows):
        yield from sizes_in((attr.total, attr.groups.count))
    elif isinstance(attr, Size):
        yield attr


def plain(dim: Dim) -> AnySize:
    """A dimension without its partition into groups."""
    return dim.total if isinstance(dim, Rows) else dim


def elements(shape: Sequence[Dim]) -> AnySize:
    """The number of elements of a shape."""
    return reduce(mul, map(plain, shape), 1)


@dataclass(frozen=True)
class TensorType:
    """The type of a Value. layout: a name in layouts/; ends: the partition whose ends an i32 vector
    holds.
    """

    shape: tuple[Dim, ...]
    dtype: str
    layout: str = "linear"
    ends: Groups | None = None

    def __str__(self) -> str:
        mark = (
            f"@ends({self.ends})"
            if self.ends
            else f"@{self.layout}"
            if self.layout != "linear"
            else ""
        )
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{mark}"

    @property
    def quantized(self) -> bool:
        """Whether the value is a Quantized (codes and scales) instead of one tensor."""
        return self.dtype not in DTYPES

    @property
    def encoding(self) -> Encoding:
        """How a matrix of this type is stored. KeyError for a dtype that weights cannot have."""
        return ENCODINGS[self.dtype]

    def with_(self, **changes: Any) -> TensorType:
        """This type with some fields changed."""
        return replace(self, **changes)

    def symbols(self) -> Iterator[str]:
        """The names of the symbols in its shape, possibly repeated."""
        for size in sizes_in(self.shape):
            yield from size.symbols()

    def partitions(self) -> Iterator[Groups]:
        """The partitions of the tensor's rows into groups."""
        yield from (d.groups for d in self.shape if isinstance(d, Rows))


def checked_type(t: TensorType) -> TensorType:
    """A type; DtypeError or ShapeError if no tensor can have it."""
    if t.dtype not in DTYPES and t.dtype not in ENCODINGS:
        raise DtypeError(
            f"dtype {t.dtype!r}",
            expected=f"one of {', '.join(dict.fromkeys((*DTYPES, *ENCODINGS)))}",
        )
    if t.layout not in LAYOUTS:
        raise ShapeError(f"layout {t.layout!r}", expected=f"one of {', '.join(LAYOUTS)}")
    for d in t.shape:
        _check_dim(d, t)
    if (
        count := prod(d for d in map(plain, t.shape) if isinstance(d, int) and d > 0)
    ) > MOST_ELEMENTS:
        raise ShapeError(
            f"{count} elements in {t}",
            expected="no more than 63 bits can count, not counting sizes of 0",
        )
    if t.quantized:
        _check_matrices(t)
    if t.ends is not None and (t.dtype != "i32" or t.shape != (t.ends.count,)):
        raise ShapeError(
            str(t), expected=f"i32[{t.ends.count}]@ends({t.ends}), one end for each group"
        )
    return t


def _check_matrices(t: TensorType) -> None:
    """Encoded values are matrices of whole blocks; blocks along rows of groups begin anew with each
    group.
    """
    if len(t.shape) < 2:
        raise ShapeError(str(t), expected=f"{t.dtype}[..., N, K]")
    if isinstance(size := t.shape[t.encoding.axis], int):
        t.encoding.need_whole(size)


def _check_dim(d: Any, t: TensorType) -> None:
    size, aligned = plain(d), isinstance(d, Rows) and d.align != 1
    if not is_size(size) or never_negative(size) is False:
        raise ShapeError(f"a dimension of {d!r}", expected="a size, 0 or more, of 63 bits")
    if isinstance(d, Rows) and (
        not isinstance(d.groups, Groups) or not isinstance(d.align, int) or d.align < 1
    ):
        raise ShapeError(
            f"rows {d}", expected="rows partitioned by groups, in multiples of a number"
        )
    if aligned and t.layout == LINEAR.name:
        raise ShapeError(f"padded rows in {t}", expected="a layout that pads: sf128x4")
