"""Products of operands in 8 bits, forward and backward: which quantized copies are multiplied.

    y = x W^T      x in blocks along K, W along K
    dx = dy W      dy along N, W along N
    dW = dy^T x    dy along the rows of each group, x along them

Blocks lie along the contracted dimension, so x and dy have two copies each, both made from the
floats. W has two in MXFP8, and one in FP8, whose blocks of 128 x 128 lie along both. Gradients are
straight-through: they ignore the rounding.

Where scales are powers of two, the elements of a copy are exact in bf16, so kernels for bf16 can
compute the product: emulated, for its numbers and not for speed. A tensor with numbers below 2^-133
may lose digits of these. Sources: Transformer Engine's MXFP8BlockScaling and Float8BlockScaling;
torchao's `wgrad_with_hp` is wgrad="bf16".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...encodings import (
    FP8_BLOCKS_F32,
    FP8_COLUMNS,
    FP8_COLUMNS_F32,
    FP8_E8M0,
    FP8_ROWS,
    FP8_ROWS_F32,
    MXFP8,
    MXFP8_COLUMNS,
    Encoding,
)
from ...errors import DtypeError, OptionError
from ...recipe import FORMATS, ORIGINAL
from ..core import Op, Value
from ..types import Dim, TensorType
from .rules import known, need_dtype


class Family(NamedTuple):
    """The encodings of a recipe's operands. rows, columns: of x and dy in blocks along features,
    and along rows; weight: of W in blocks along its last dimension, and the one before. numbers:
    the dtype that has their numbers; wgrad: the name of a wgrad in these encodings.
    """

    rows: Encoding
    columns: Encoding
    weight: tuple[Encoding, Encoding]
    numbers: str
    wgrad: str

    def along(self, axis: int, of_weight: bool) -> Encoding:
        """The encoding in blocks along an axis, -1 or -2."""
        return self.weight[-1 - axis] if of_weight else (self.rows, self.columns)[-1 - axis]


FAMILIES = {
    "mxfp8": Family(MXFP8, MXFP8_COLUMNS, (MXFP8, MXFP8_COLUMNS), "bf16", "mxfp8"),
    "fp8_block": Family(FP8_ROWS, FP8_COLUMNS, (FP8_E8M0, FP8_E8M0), "bf16", "fp8"),
    "fp8_block_f32": Family(
        FP8_ROWS_F32, FP8_COLUMNS_F32, (FP8_BLOCKS_F32, FP8_BLOCKS_F32), "f32", "fp8"
    ),
}
# activation_format -> the family, and what weight gradients are made from
BY_FORMAT = {form: (FAMILIES[name], wgrad) for form, (name, wgrad) in FORMATS.items()}
CODED_MULTIPLE = 64  # of which in- and out-features are, in products of codes
_FROZEN_TOO = (FP8_ROWS.name,)  # which rows of products with frozen weights are too
# of the rows of a product, and of both operands of a wgrad
_BY_OPERAND = {e.name: f for f in FAMILIES.values() for e in (f.rows, f.columns)}
# encodings of all operands, forward and backward
TRAINED = tuple(
    dict.fromkeys(e.name for f in FAMILIES.values() for e in (f.rows, f.columns, *f.weight))
)


def family_of(type: TensorType) -> Family | None:
    """The recipe's formats if a value of this type is one of its copies of activations (x) or of
    their gradients (dy); else None.
    """
    return _BY_OPERAND.get(type.dtype)


def of_recipe(a: TensorType, wgrad: str) -> bool:
    """Whether a product with rows of type a, and this wgrad, is one of a recipe."""
    return family_of(a) is not None and bool(wgrad or a.dtype not in _FROZEN_TOO)


def is_trained(op: Op) -> bool:
    """Whether an operation is a product by a recipe."""
    return op.kind.role == "grouped" and of_recipe(op.values[0].type, op.attrs.get("wgrad", ""))


def by_codes(*features: Dim) -> bool:
    """Whether there are kernels that multiply codes of so many features. Half of them, gate or up,
    are then runs of 32, which lie in one block.
    """
    return not any(known(size) % CODED_MULTIPLE for size in features)


def need_along(name: str, type: TensorType, like: TensorType, axis: int) -> None:
    """DtypeError unless a type is in the family of `like`, with blocks along an axis, -1 or -2."""
    family = family_of(like)
    assert family is not None
    wanted = family.along(axis, len(type.shape) == 3)
    if type.dtype != wanted.name:
        raise DtypeError(
            f"{name} is {type}",
            expected=f"{wanted.name}: blocks along what is contracted, as those of the other "
            "operand",
            todo="quantize the floats that it was made from along the other axis",
        )


def need_wgrad(a: TensorType, wgrad: str) -> None:
    """OptionError unless a product with rows of type a can take this wgrad."""
    family = family_of(a)
    allowed = [] if family is None else [family.wgrad, family.wgrad + ORIGINAL, "bf16"]
    if family is None or a.dtype in _FROZEN_TOO:
        allowed = ["", *allowed]
    if wgrad not in allowed:
        raise OptionError(
            f"wgrad = {wgrad!r} of a product on {a.dtype}",
            expected=f"one of {', '.join(map(repr, allowed))}",
        )


def computed(encoding: Encoding) -> torch.dtype:
    """The dtype in which a product computes with an encoding's numbers."""
    mx = encoding.name in (MXFP8.name, MXFP8_COLUMNS.name)
    return torch.bfloat16 if mx else torch.float32


def product(
    fd: Any,
    x: Value,
    weight: Value,
    ends: Value,
    activation_format: str,
    transposed: bool = False,
    held: Sequence[Value] = (),
) -> Value:
    """x float[M/g, K], weight float[G, N, K], or [G, K, N] if transposed -> f32[M/g, N], by the
    recipe that has this activation_format. held: what `copy_of_weight` made before, if anything.
    ShapeError unless the recipe's blocks divide K and N, or may be short.
    """
    family, wgrad = BY_FORMAT[activation_format]
    need_dtype("x", x.type, "f32", "bf16", "f16")
    need_dtype("the weight", weight.type, "f32", "bf16", "f16")
    for letter, size in zip("KN" if transposed else "NK", weight.type.shape[1:], strict=True):
        family.rows.need_whole(known(size), letter)
    a = fd.ops.quantize(x, encoding=family.rows.name)
    encoding = family.along(-2 if transposed else -1, True).name
    if held:
        results = (
            fd.ops.pack(*parts, encoding=encoding, layout="linear")
            for parts in (held[:2], held[2:])
            if parts
        )
        packed, *turned = results
        w = fd.ops.straight_through(packed, weight, *turned, how="saved")
    else:
        w = fd.ops.quantize(weight, encoding=encoding)
    return (fd.ops.grouped_mm_t if transposed else fd.ops.grouped_mm)(a, w, ends, wgrad=wgrad)


def copy_of_weight(fd: Any, weight: Value, activation_format: str) -> Sequence[Value]:
    """What products by a recipe read of a weight float[G, N, K]: the parts of its copy, and of that
    of the transposed matrices if these are the same blocks.
    """
    family, _ = BY_FORMAT[activation_format]
    result = fd.ops.unpack(fd.ops.quantize(weight, encoding=family.along(-1, True).name))
    return [*result, *(fd.ops.transpose_blocks(*result) if _turns(family, weight.type) else [])]


def _turns(family: Family, weight: TensorType) -> bool:
    """Whether the backward reads a weight's copy transposed, which is a copy of its transpose."""
    along, before = family.weight
    return along == before and by_codes(*weight.shape[1:])


def turned(fd: Any, w: Value) -> Value:
    """The copy of the transposed matrices."""
    held = fd.producer(w, "straight_through")
    if held is not None and len(held.values) > 2:
        return held.values[2]
    packed = fd.producer(in_parts(fd, w))
    return fd.ops.pack(
        *fd.ops.transpose_blocks(*packed.values), encoding=w.type.dtype, layout="linear"
    )


def gradients(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    """The gradients of x and of the weight, by way of their copies, for dy f32[M/g, N]."""
    (a, w, ends), transposed = op.values, op.kind.name == "grouped_mm_t"
    x, weight, family = _floats(fd, a), _floats(fd, w), family_of(a.type)
    assert family is not None
    back = fd.ops.grouped_mm if transposed else fd.ops.grouped_mm_t
    other = family.along(-1 if transposed else -2, True)
    if not transposed and _turns(family, w.type):
        w, back = turned(fd, w), fd.ops.grouped_mm
    else:
        w = in_parts(fd, w) if w.type.encoding == other else fd.ops.quantize(weight, other.name)
    dx = back(fd.ops.quantize(dy, family.rows.name), w, ends, wgrad=family.wgrad)
    if op.attrs["wgrad"].startswith(family.wgrad):
        x, dy = (fd.ops.quantize(t, ends, encoding=family.columns.name) for t in (x, dy))
        if not op.attrs["wgrad"].endswith(ORIGINAL):  # else the backward makes the copy of x too
            x = by_columns(fd, x, ends) if fd.by_columns and _are_turned(x, dy) else in_parts(fd, x)
    dw = fd.ops.grouped_outer(*((x, dy) if transposed else (dy, x)), ends)
    return [
        fd.ops.cast(dx, dtype=_floats(fd, a).type.dtype),
        fd.ops.cast(dw, dtype=weight.type.dtype),
        None,
    ]


def _are_turned(*copies: Value) -> bool:
    """Whether the codes of copies along rows are stored by `transpose_row_blocks`."""
    return all(v.type.encoding is FP8_COLUMNS and by_codes(v.type.shape[1]) for v in copies)


def by_columns(fd: Any, copied: Value, ends: Value) -> Value:
    """The same copy, [M, K] in 8 bits, but its codes go through memory by columns, [blocks, K,
    128], as gradients of weights read them: so the forward can save one copy for both uses. ends:
    of the groups of its rows. A copy whose codes do so already is returned as it is.
    """
    codes, scales = fd.producer(in_parts(fd, copied)).values
    if fd.producer(codes, "untranspose_row_blocks"):
        return copied
    back = fd.ops.untranspose_row_blocks(
        fd.ops.transpose_row_blocks(codes, ends), ends, rows=copied.type.shape[0]
    )
    return fd.ops.pack(back, scales, encoding=copied.type.dtype, layout="linear")


def _floats(fd: Any, copied: Value) -> Value:
    """The floats that a copy was made from."""
    op = fd.producer(copied, "quantize", "straight_through")
    if op is None:
        raise NotImplementedError(
            f"the derivative of a product of {copied.type} that was not made from floats here"
        )
    return op.values[1] if op.kind.name == "straight_through" else op.values[0]


def in_parts(fd: Any, copied: Value) -> Value:
    """The same copy in 8 bits as a `pack` of codes and scales, which the forward can save and
    kernels can pass on one by one.
    """
    if fd.producer(copied, "pack"):
        return copied
    if held := fd.producer(copied, "straight_through"):
        return held.values[0]
    return fd.ops.pack(*fd.ops.unpack(copied), encoding=copied.type.dtype, layout="linear")
