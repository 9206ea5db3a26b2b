"""Products of MXFP8 operands, forward and backward: which quantized copies are multiplied.

    y = x W^T      x in blocks along K, W along K
    dx = dy W      dy along N, W along N
    dW = dy^T x    dy along the rows of each group, x along them

Blocks lie along the contracted dimension, so W, x and dy have two copies each, both made from the
floats. Gradients are straight-through: they ignore the rounding. The elements of a copy are exact
in bf16 (E4M3 times a power of two), so kernels for bf16 compute the product: it is emulated, for
its numbers and not for speed. A float32 tensor may lose digits below 2^-133. Source: Transformer
Engine's MXFP8BlockScaling; torchao's `wgrad_with_hp` is wgrad="bf16".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...encodings import Encoding
from ...encodings.mxfp8 import BY_AXIS
from ...errors import DtypeError, OptionError
from ...recipe import FORMATS
from ..core import Op, Value
from ..types import TensorType
from .quantized import TRAINED, known
from .rules import need_dtype

# activation_format -> what weight gradients use: copies, or floats
WGRADS = {form: wgrad for wgrad, form in FORMATS.items()}


def is_one(type: TensorType) -> bool:
    """Whether a type is MXFP8."""
    return type.dtype in TRAINED


def need_along(name: str, type: TensorType, axis: int) -> None:
    """DtypeError unless a type is MXFP8 with blocks along an axis, -1 or -2."""
    if type.dtype != BY_AXIS[axis].name:
        expected = (
            f"{BY_AXIS[axis].name}: blocks along what is contracted, as those of the other operand"
        )
        raise DtypeError(
            f"{name} is {type}",
            expected=expected,
            todo="quantize the floats that it was made from along the other axis",
        )


def need_wgrad(a: TensorType, wgrad: str) -> None:
    """OptionError unless a product with rows of type a can take this wgrad."""
    allowed = tuple(WGRADS.values()) if is_one(a) else ("",)
    if wgrad not in allowed:
        raise OptionError(
            f"wgrad = {wgrad!r} of a product on {a.dtype}",
            expected=f"one of {', '.join(map(repr, allowed))}",
        )


def computed(encoding: Encoding) -> torch.dtype:
    """The dtype in which a product computes with an encoding's numbers."""
    return torch.bfloat16 if encoding.name in TRAINED else torch.float32


def product(
    fd: Any, x: Value, weight: Value, ends: Value, wgrad: str, transposed: bool = False
) -> Value:
    """x float[M/g, K], weight float[G, N, K], or [G, K, N] if transposed -> f32[M/g, N]. ShapeError
    unless 32 divides K and N.
    """
    need_dtype("x", x.type, "f32", "bf16", "f16")
    need_dtype("the weight", weight.type, "f32", "bf16", "f16")
    for name, size in zip("KN" if transposed else "NK", weight.type.shape[1:], strict=True):
        BY_AXIS[-1].need_whole(known(size), name)
    a, w = copy(fd, x, -1), copy(fd, weight, -2 if transposed else -1)
    return (fd.ops.grouped_mm_t if transposed else fd.ops.grouped_mm)(a, w, ends, wgrad=wgrad)


def copy(fd: Any, x: Value, axis: int, *ends: Value) -> Value:
    """x quantized in blocks along an axis; ends: of its rows' groups, if that axis is the rows."""
    return fd.ops.quantize(x, *ends, encoding=BY_AXIS[axis].name)


def gradients(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    """The gradients of x and of the weight, by way of their copies, for dy f32[M/g, N]."""
    (a, w, ends), transposed = op.values, op.kind.name == "grouped_mm_t"
    x, weight = _floats(fd, a), _floats(fd, w)
    back = fd.ops.grouped_mm if transposed else fd.ops.grouped_mm_t
    dx = back(copy(fd, dy, -1), copy(fd, weight, -1 if transposed else -2), ends, wgrad="mxfp8")
    if op.attrs["wgrad"] == "mxfp8":
        x, dy = in_parts(fd, copy(fd, x, -2, ends)), copy(fd, dy, -2, ends)
    dw = fd.ops.grouped_outer(*((x, dy) if transposed else (dy, x)), ends)
    return [
        fd.ops.cast(dx, dtype=_floats(fd, a).type.dtype),
        fd.ops.cast(dw, dtype=weight.type.dtype),
        None,
    ]


def _floats(fd: Any, copied: Value) -> Value:
    """The floats that a copy was made from."""
    op = fd.producer(copied)
    if op is None or op.kind.name != "quantize":
        raise NotImplementedError(
            f"the derivative of a product of {copied.type} that was not made from floats here"
        )
    source: Value = op.values[0]
    return source


def in_parts(fd: Any, copied: Value) -> Value:
    """A copy rebuilt from its parts, which the forward can save and kernels can pass on."""
    if fd.made_by(copied) == "pack":
        return copied
    packed: Value = fd.ops.pack(*fd.ops.unpack(copied), encoding=copied.type.dtype, layout="linear")
    return packed
