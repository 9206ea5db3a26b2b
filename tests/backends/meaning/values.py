"""What an nvFuser definition computes with: tensors and scalars that know their nvFuser dtype, and
the casts between dtypes.

e4m3, e8m0 and e2m1 elements are held as the float32 they stand for, so that every operation of
torch takes them; their bytes are read from the inputs (`from_torch`) and written to the outputs
(`to_torch`). A tensor's logical shape counts elements, never bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

E2M1, E4M3, E8M0 = "Float4_e2m1fn", "Float8_e4m3fn", "Float8_e8m0fnu"
HALVES, FLOATS, INTS = ("BFloat16", "Half"), ("Float", "Double"), ("Int", "Int32", "Index")
NARROW = {E2M1: torch.float4_e2m1fn_x2, E4M3: torch.float8_e4m3fn, E8M0: torch.float8_e8m0fnu}
TORCH = {
    "Float": torch.float32,
    "Double": torch.float64,
    "BFloat16": torch.bfloat16,
    "Half": torch.float16,
    "Int": torch.int64,
    "Index": torch.int64,
    "Int32": torch.int32,
    "Bool": torch.bool,
}
HELD = TORCH | dict.fromkeys(NARROW, torch.float32)

_E2M1_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_VALUES = torch.cat([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])
E2M1_MAX, E4M3_MAX = 6.0, 448.0


class Refused(AssertionError):
    """The definition does something that nvFuser refuses, leaves undefined, or that has no meaning
    here.
    """


def need(condition: Any, message: str) -> None:
    if not condition:
        raise Refused(message)


@dataclass(frozen=True)
class Scalar:
    """A number that the host knows: an argument, a constant, a size, or arithmetic on them."""

    value: bool | int | float
    dtype: str


@dataclass(frozen=True)
class Value:
    """A tensor. `data` has the logical shape and the torch dtype HELD[dtype]; e2m1 inputs also keep
    the order of their strides.
    """

    data: torch.Tensor
    dtype: str
    # what `pad` enlarged: `cat` takes that
    unpadded: torch.Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def with_(self, data: torch.Tensor) -> Value:
        return Value(data, self.dtype)


@dataclass(frozen=True)
class Swizzled:
    """Block scales in the order of blockscale.py: the elements in memory, padding included, all
    that was never written being poison.

    nvFuser gives such a tensor the logical shape of the scales, which says nothing about its
    memory; hence no operation takes one but cutlass_nvfp4_grouped_mm.
    """

    storage: torch.Tensor
    dtype: str


def poison(dtype: str) -> float | int:
    """What memory holds that nobody wrote: NaN, or the least number."""
    return -(2**31) + 1 if dtype in INTS else math.nan


def held(dtype: str) -> torch.dtype:
    need(dtype in HELD, f"no meaning for the dtype {dtype}; known: {', '.join(HELD)}")
    return HELD[dtype]


# Scalars and operands -----------------------------------------------------------------------------


def scalar(x: Any) -> Scalar:
    """A Scalar, or a literal: nvFuser prints constants of its dtypes Bool, Int (also Index) and
    Double as Python's.
    """
    if isinstance(x, Scalar):
        return x
    for kind, dtype in ((bool, "Bool"), (int, "Int"), (float, "Double")):
        if isinstance(x, kind):
            return Scalar(x, dtype)
    raise Refused(f"expected a scalar, found {described(x)}")


def integer(x: Any) -> int:
    s = scalar(x)
    need(s.dtype in INTS, f"expected an integer, found {described(s)}")
    return int(s.value)


def integers(values: Any) -> list[int]:
    return [integer(v) for v in values]


def tensor(x: Any, *dtypes: str) -> Value:
    need(isinstance(x, Value), f"expected a tensor, found {described(x)}")
    need(not dtypes or x.dtype in dtypes, f"expected {' or '.join(dtypes)}, found {described(x)}")
    return x


def axis(dim: int, rank: int) -> int:
    need(-rank <= dim < rank, f"there is no dimension {dim} among {rank}")
    return dim % rank


def described(x: Any) -> str:
    if isinstance(x, Swizzled):
        return (
            f"a {x.dtype} tensor in the grouped layout of block scales, which only "
            "cutlass_nvfp4_grouped_mm and outputs take"
        )
    if isinstance(x, Value):
        return f"a {x.dtype} tensor {list(x.shape)}"
    return f"a scalar {x.dtype} {x.value}" if isinstance(x, Scalar) else repr(x)


# Casts --------------------------------------------------------------------------------------------


def constant(x: Any, dtype: str) -> torch.Tensor:
    """A scalar as a 0-d tensor of `dtype`: an integer wraps around, as C's casts do, a float is
    rounded.
    """
    s = scalar(x)
    return converted(
        torch.tensor(s.value, dtype=torch.float64 if isinstance(s.value, float) else None),
        s.dtype,
        dtype,
    )


def converted(data: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """`data` of the dtype `source` as kernels of nvFuser convert it to `target`. Refused: a pair
    that nvFuser has no conversion for.
    """
    if source == target:
        return data.to(held(target))
    from_float = source not in INTS and source != "Bool"
    if target in NARROW or source in NARROW:
        widest = target if source in NARROW else source
        need(widest in (*FLOATS, *HALVES), f"nvFuser has no cast from {source} to {target}")
    if target == E4M3:
        # saturates, infinities too; NaN stays
        return data.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    if target == E2M1:
        return to_e2m1(data.float())
    if target == E8M0:
        need(
            source == "Float",
            f"cast from {source} to {E8M0}: its direction of rounding is not "
            "modelled; cast to Float first",
        )
        return to_e8m0(data)
    if from_float and target in INTS:
        return _to_integer(data, source, target)
    return data != 0 if target == "Bool" else data.to(held(target))


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 -> the nearest e2m1, ties to the even code, past 6 to 6; the sign of a zero stays,
    NaN becomes 6.
    """
    x = torch.where(x.isnan(), E2M1_MAX, x)
    halfway = (_E2M1_MAGNITUDES[1:] + _E2M1_MAGNITUDES[:-1]) / 2
    magnitude = x.abs()[..., None]
    odd = torch.arange(7) % 2 == 1  # a tie between the codes i and i + 1 goes up when i is odd
    code = ((magnitude > halfway) | ((magnitude == halfway) & odd)).sum(-1)
    return torch.copysign(_E2M1_MAGNITUDES[code], x)


def to_e8m0(x: torch.Tensor) -> torch.Tensor:
    """float32 that is not negative -> the least power of two that is not below it, between 2^-127
    and 2^127; NaN stays.
    """
    need(not bool((x < 0).any()), f"cast of a negative number to {E8M0}, which has no sign")
    mantissa, exponent = torch.frexp(x.double())
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = torch.ldexp(
        torch.ones_like(mantissa), torch.where(x == 0, -127, exponent).clamp(-127, 127)
    )
    return torch.where(x.isnan(), torch.nan, torch.where(x == torch.inf, 2.0**127, power)).float()


def _to_integer(data: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Toward zero; past the range the nearest end of it. NaN: 0 from 32 bits or fewer to 32 bits,
    else the least number.
    """
    info = torch.iinfo(held(target))
    wide = data.double().nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).trunc()
    top = 2.0**63 - 1024 if info.bits == 64 else info.max  # the largest float64 within
    whole = torch.where(wide > top, info.max, wide.clamp(info.min, top).long())
    nan = 0 if source != "Double" and info.bits == 32 else info.min
    return torch.where(data.isnan(), nan, whole).to(held(target))


# Bytes --------------------------------------------------------------------------------------------


def from_torch(x: torch.Tensor, dtype: str, fastest: int) -> torch.Tensor:
    """An input as it is held. e2m1 comes as float4_e2m1fn_x2, or as uint8, two codes in a byte, the
    low nibble the even element of the dimension `fastest`, whose size doubles.
    """
    if dtype in NARROW:
        accepted = (NARROW[dtype], torch.uint8)
        need(
            x.dtype in accepted,
            f"the input is {x.dtype}, expected {' or '.join(map(str, accepted))}",
        )
        if dtype != E2M1:
            return x.view(NARROW[dtype]).float()
        codes = x.view(torch.uint8).movedim(fastest, -1).contiguous()
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return _E2M1_VALUES[codes.long()].movedim(-1, fastest)
    need(x.dtype == held(dtype), f"the input is {x.dtype}, expected {held(dtype)}")
    return x


def to_torch(x: Value | Swizzled) -> torch.Tensor:
    """An output as nvFuser gives it: e4m3 and e8m0 in torch's dtype, e2m1 packed along the last
    dimension as float4_e2m1fn_x2. Swizzled: its memory, 1-d.
    """
    data = x.storage if isinstance(x, Swizzled) else x.data
    if x.dtype != E2M1:
        return data.to(NARROW.get(x.dtype, data.dtype))
    need(
        data.dim() and data.shape[-1] % 2 == 0,
        f"an output of {x.dtype} has an odd last dimension: {list(data.shape)}",
    )
    codes = (data.abs()[..., None] == _E2M1_MAGNITUDES).int().argmax(-1) + 8 * torch.signbit(data)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(NARROW[E2M1])
