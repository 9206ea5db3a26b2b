"""Operations that move elements without changing them, and sums over dimensions. Named as in
nvFuser, which has no logsumexp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import DtypeError, ShapeError
from ..core import Need, Op, OpKind, Value
from ..sizes import AnySize
from ..types import DTYPES, Dim, TensorType, elements, plain, wide
from .rules import Types, joined_dtype, need_dtype, need_finite, need_float


def _plain_storage(x: TensorType) -> TensorType:
    need_dtype("x", x, *DTYPES)
    if x.layout != "linear":
        raise ShapeError(f"x is {x}", expected="the linear layout")
    return x


def _reshape_type(x: TensorType, new_shape: tuple[Dim, ...]) -> Types:
    """The elements of x in row-major order, in another shape with as many elements."""
    if elements(x.shape) != elements(new_shape):
        raise ShapeError(
            f"new_shape [{', '.join(map(str, new_shape))}] of {x}", expected="as many elements"
        )
    return (TensorType(tuple(new_shape), _plain_storage(x).dtype),)


def _permute_type(x: TensorType, dims: tuple[int, ...]) -> Types:
    """Dimension i of the result is dimension dims[i] of x."""
    if sorted(dims) != list(range(len(_plain_storage(x).shape))):
        raise ShapeError(f"dims {list(dims)} of {x}", expected="each dimension once")
    return (TensorType(tuple(x.shape[d] for d in dims), x.dtype),)


def _broadcast_type(
    x: TensorType, shape: tuple[Dim, ...], broadcast_dims: tuple[int, ...]
) -> Types:
    """Dimension i of x becomes dimension broadcast_dims[i] of the result; sizes of 1 are repeated,
    other dims are new. As in nvFuser.
    """
    increasing = list(broadcast_dims) == sorted(set(broadcast_dims)) and all(
        0 <= place < len(shape) for place in broadcast_dims
    )
    if len(broadcast_dims) != len(_plain_storage(x).shape) or not increasing:
        raise ShapeError(
            f"broadcast_dims {list(broadcast_dims)} of {x}",
            expected=f"one increasing place for each dimension, from 0 to {len(shape) - 1}",
        )
    out = list(shape)
    for d, place in zip(x.shape, broadcast_dims, strict=True):
        if plain(d) not in (1, plain(shape[place])):
            raise ShapeError(f"size {d} of {x} at {shape[place]}", expected="1, or the same size")
        out[place] = d if plain(d) == plain(shape[place]) else shape[place]
    return (TensorType(tuple(out), x.dtype),)


def _broadcast(
    x: torch.Tensor, shape: tuple[int, ...], broadcast_dims: tuple[int, ...]
) -> torch.Tensor:
    placed = [
        x.shape[broadcast_dims.index(i)] if i in broadcast_dims else 1 for i in range(len(shape))
    ]
    return x.reshape(placed).expand(shape)


def _broadcast_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    x, places = op.values[0], op.attrs["broadcast_dims"]
    sizes = dict(zip(places, map(plain, x.type.shape), strict=True))
    new = tuple(
        i
        for i, d in enumerate(dy.type.shape)
        if i not in sizes or (sizes[i] == 1 and plain(d) != 1)
    )
    summed = fd.ops.sum(dy, dims=new, keepdim=False) if new else dy
    return [fd.ops.reshape(summed, new_shape=x.type.shape)]


def _slice_type(
    x: TensorType, start_indices: tuple[AnySize, ...], end_indices: tuple[Dim, ...]
) -> Types:
    """x[start:end] in each dimension."""
    if not len(start_indices) == len(end_indices) == len(_plain_storage(x).shape):
        raise ShapeError(
            f"{len(start_indices)} starts, {len(end_indices)} ends of {x}",
            expected="one for each dimension",
        )
    bounds = zip(x.shape, start_indices, map(plain, end_indices), strict=True)
    return (
        TensorType(tuple(d if (a, b) == (0, plain(d)) else b - a for d, a, b in bounds), x.dtype),
    )


def _slice_needs(
    x: TensorType, start_indices: tuple[AnySize, ...], end_indices: tuple[Dim, ...]
) -> Iterator[Need]:
    for d, a, b in zip(map(plain, x.shape), start_indices, map(plain, end_indices), strict=True):
        why = f"slice {a}:{b} of {x}, where 0 <= start <= end <= {d} does not hold"
        yield from ((size, why) for size in (a, b - a, d - b))


def _slice_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    x = op.values[0]
    ends = [plain(d) - plain(b) for d, b in zip(x.type.shape, op.attrs["end_indices"], strict=True)]
    return [fd.ops.pad(dy, before=op.attrs["start_indices"], after=tuple(ends), shape=x.type.shape)]


def _pad_type(
    x: TensorType, before: tuple[AnySize, ...], after: tuple[AnySize, ...], shape: tuple[Dim, ...]
) -> Types:
    """x with zeros before and after it in each dimension; shape: that of the result."""
    need_dtype("x", x, *(dtype for dtype in DTYPES if dtype != "f8e8m0"))  # which has no zero
    for d, a, b, s in zip(_plain_storage(x).shape, before, after, shape, strict=True):
        if plain(d) + a + b != plain(s):
            raise ShapeError(f"{a} before and {b} after {d}", expected=f"{s} in all")
    return (TensorType(tuple(shape), x.dtype),)


def _pad_needs(
    x: TensorType, before: tuple[AnySize, ...], after: tuple[AnySize, ...], shape: tuple[Dim, ...]
) -> Iterator[Need]:
    for a, b in zip(before, after, strict=True):
        yield from (
            (size, f"{a} before and {b} after {x}, which are to be 0 or more") for size in (a, b)
        )


def _pad(
    x: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    return torch.nn.functional.pad(
        x, [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    )


def _pad_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    before = op.attrs["before"]
    ends = tuple(a + plain(d) for a, d in zip(before, op.values[0].type.shape, strict=True))
    return [fd.ops.slice(dy, start_indices=before, end_indices=ends)]


def _cat_type(*xs: TensorType, dim: int) -> Types:
    """Tensors one after another along a dimension; they have one dtype, and their other sizes are
    equal.
    """
    first = _plain_storage(xs[0])
    if not 0 <= dim < len(first.shape):
        raise ShapeError(f"dim {dim} of {first}", expected=f"0 to {len(first.shape) - 1}")
    for x in xs[1:]:
        if len(x.shape) != len(first.shape):
            raise ShapeError(f"{x} beside {first}", expected="one rank")
        if any(
            plain(a) != plain(b)
            for i, (a, b) in enumerate(zip(first.shape, _plain_storage(x).shape, strict=True))
            if i != dim
        ):
            raise ShapeError(f"{x} beside {first}", expected=f"equal sizes but for dimension {dim}")
    total = sum((plain(x.shape[dim]) for x in xs), 0)
    return (TensorType((*first.shape[:dim], total, *first.shape[dim + 1 :]), joined_dtype(xs)),)


def _full_type(shape: tuple[Dim, ...], fill_value: float | bool, dtype: str) -> Types:
    """A tensor whose elements are all one number."""
    if dtype not in DTYPES:
        raise DtypeError(f"dtype {dtype!r}", expected=f"one of {', '.join(DTYPES)}")
    need_finite("fill_value", fill_value, dtype)
    return (TensorType(tuple(shape), dtype),)


def _sum_type(x: TensorType, dims: tuple[int, ...], keepdim: bool) -> Types:
    """Sums over dimensions, in float32 (float64 for float64), rounded once to the dtype of x."""
    need_float("x", _plain_storage(x))
    if not dims or len(set(dims)) < len(dims) or not all(0 <= d < len(x.shape) for d in dims):
        raise ShapeError(
            f"dims {list(dims)} of {x}",
            expected=f"at least one, each once, from 0 to {len(x.shape) - 1}",
        )
    return (
        TensorType(
            tuple(1 if i in dims else d for i, d in enumerate(x.shape) if keepdim or i not in dims),
            x.dtype,
        ),
    )


def _logsumexp_type(x: TensorType) -> Types:
    """log(sum(exp(x))) over the last dimension, which stays with size 1: computed in float32
    (float64 for float64), rounded once to the dtype of x.
    """
    need_float("x", _plain_storage(x))
    if not x.shape:
        raise ShapeError(f"x is {x}", expected="a dimension or more")
    return (TensorType((*x.shape[:-1], 1), x.dtype),)


def _sum_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    x, dims = op.values[0], op.attrs["dims"]
    places = tuple(i for i in range(len(x.type.shape)) if op.attrs["keepdim"] or i not in dims)
    return [fd.ops.broadcast_in_dim(dy, shape=x.type.shape, broadcast_dims=places)]


def _permute_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    dims = op.attrs["dims"]
    return [fd.ops.permute(dy, dims=tuple(dims.index(i) for i in range(len(dims))))]


def merged(shape: Sequence[Dim], keep: int) -> tuple[Dim, ...]:
    """A shape with its leading dimensions merged into one and its last `keep` dimensions
    unchanged.
    """
    cut = len(shape) - keep
    return (shape[0] if cut == 1 else elements(shape[:cut]), *shape[cut:])


TABLE = (
    OpKind(
        "reshape",
        _reshape_type,
        lambda x, new_shape: (x.reshape(new_shape),),
        lambda fd, op, dy: [fd.ops.reshape(dy, new_shape=op.values[0].type.shape)],
        role="shape",
    ),
    OpKind(
        "permute", _permute_type, lambda x, dims: (x.permute(dims),), _permute_grad, role="shape"
    ),
    OpKind(
        "broadcast_in_dim",
        _broadcast_type,
        lambda x, **a: (_broadcast(x, **a),),
        _broadcast_grad,
        role="shape",
    ),
    OpKind(
        "slice",
        _slice_type,
        lambda x, start_indices, end_indices: (x[tuple(map(slice, start_indices, end_indices))],),
        _slice_grad,
        _slice_needs,
        role="shape",
    ),
    OpKind("pad", _pad_type, lambda x, **a: (_pad(x, **a),), _pad_grad, _pad_needs, role="shape"),
    OpKind("cat", _cat_type, lambda *xs, dim: (torch.cat(xs, dim),), role="shape"),
    OpKind(
        "full",
        _full_type,
        lambda shape, fill_value, dtype: (torch.full(shape, fill_value, dtype=DTYPES[dtype]),),
        role="shape",
    ),
    OpKind(
        "sum",
        _sum_type,
        lambda x, dims, keepdim: (wide(x).sum(dims, keepdim=keepdim).to(x.dtype),),
        _sum_grad,
        flops=lambda op: elements(op.values[0].type.shape),
        role="reduce",
    ),
    OpKind(
        "logsumexp",
        _logsumexp_type,
        lambda x: (wide(x).logsumexp(-1, keepdim=True).to(x.dtype),),
        lambda fd, op, dy: [fd.ops.exp(op.values[0] - op.outputs[0]) * dy],
        flops=lambda op: elements(op.values[0].type.shape),
        role="reduce",
    ),
)
