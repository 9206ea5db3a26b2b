"""Operations that move elements, make tensors of nothing, or ask for sizes."""

from __future__ import annotations

from typing import Any

import torch

from .values import (
    INTS,
    Scalar,
    Value,
    axis,
    constant,
    held,
    integer,
    integers,
    need,
    scalar,
    tensor,
)


def reshape(x: Any, *, new_shape: list[Any]) -> Value:
    x, shape = tensor(x), integers(new_shape)
    need(
        x.data.numel() == torch.Size(shape).numel() and min(shape, default=0) >= 0,
        f"reshape of {list(x.shape)} to {shape}",
    )
    return x.with_(x.data.reshape(shape))


def permute(x: Any, *, dims: list[int]) -> Value:
    return tensor(x).with_(tensor(x).data.permute(dims))


def broadcast(x: Any, *, is_broadcast_dim: list[bool]) -> Value:
    """Inserts dimensions of size 1 where the list says True."""
    x = tensor(x)
    need(
        is_broadcast_dim.count(False) == x.data.dim(),
        f"broadcast of {list(x.shape)} with {is_broadcast_dim}",
    )
    sizes = iter(x.shape)
    return x.with_(x.data.reshape([1 if new else next(sizes) for new in is_broadcast_dim]))


def expand(x: Any, *, shape: list[Any]) -> Value:
    """Repeats dimensions of size 1."""
    x, sizes = tensor(x), integers(shape)
    fits = len(sizes) == x.data.dim() and all(
        a in (1, b) for a, b in zip(x.shape, sizes, strict=True)
    )
    need(fits, f"expand of {list(x.shape)} to {sizes}")
    return x.with_(x.data.expand(sizes))


def broadcast_in_dim(x: Any, *, shape: list[Any], broadcast_dims: list[int]) -> Value:
    x = tensor(x)
    need(
        len(broadcast_dims) == x.data.dim(),
        f"broadcast_in_dim of {list(x.shape)} with {broadcast_dims}",
    )
    return expand(
        broadcast(x, is_broadcast_dim=[i not in broadcast_dims for i in range(len(shape))]),
        shape=shape,
    )


def squeeze(x: Any, *, dims: list[int], squeeze_expanded: bool = False) -> Value:
    """Drops dimensions of size 1; with squeeze_expanded also repeated ones, whose elements are
    equal.
    """
    x = tensor(x)
    for dim in dims:
        need(
            squeeze_expanded or x.shape[dim] == 1, f"squeeze of dimension {dim} of {list(x.shape)}"
        )
    data = x.data
    for dim in sorted(dims, reverse=True):
        data = data.select(dim, 0)
    return x.with_(data)


def slice_(
    x: Any,
    *,
    start_indices: list[Any],
    end_indices: list[Any],
    strides: list[Any],
    manual_normalization: bool,
) -> Value:
    """Bounds are not clamped: they must lie within."""
    x, starts, ends = tensor(x), integers(start_indices), integers(end_indices)
    need(
        manual_normalization and set(integers(strides)) <= {1},
        "slice with steps, or with bounds to be clamped",
    )
    data = x.data
    for dim, (start, end, size) in enumerate(zip(starts, ends, x.shape, strict=True)):
        need(
            0 <= start <= end <= size, f"slice {start}:{end} of dimension {dim} of {list(x.shape)}"
        )
        data = data.narrow(dim, start, end - start)
    return x.with_(data)


def pad(x: Any, *, pad_widths: list[Any], value: Any = None) -> Value:
    """pad_widths as torch has them, the last dimension first; negative ones cut off."""
    x, widths = tensor(x), integers(pad_widths)
    fill = constant(value, x.dtype).item() if value is not None else 0
    if x.dtype == "Bool":
        return x.with_(torch.nn.functional.pad(x.data.int(), widths, value=int(fill)).bool())
    return Value(torch.nn.functional.pad(x.data, widths, value=fill), x.dtype, unpadded=x.data)


def cat(tensors: list[Any], *, dim: int, manual_padding: bool) -> Value:
    """Each tensor was padded to the size of the result; what was padded is put side by side."""
    values = [tensor(x) for x in tensors]
    need(
        manual_padding and len({v.dtype for v in values}) == 1,
        "cat of tensors that are not padded, or of several dtypes",
    )
    data = torch.cat(
        [v.data if v.unpadded is None else v.unpadded for v in values],
        axis(dim, values[0].data.dim()),
    )
    shapes = [list(v.shape) for v in values]
    need(
        all(shape == list(data.shape) for shape in shapes),
        f"cat: padded to {shapes}, together {list(data.shape)}",
    )
    return values[0].with_(data)


def full(*, shape: list[Any], fill_value: Any, dtype: str) -> Value:
    return Value(constant(fill_value, dtype).expand(integers(shape)), dtype)


def iota(*, length: Any, start: Any = None, step: Any = None, dtype: str = "Int") -> Value:
    first, by = (
        constant(default if x is None else x, dtype) for x, default in ((start, 0), (step, 1))
    )
    need(by != 0, "iota with a step of 0")
    return Value(first + by * torch.arange(integer(length)).to(held(dtype)), dtype)


def stride_order(x: Any, *, stride_order: list[int]) -> Value:
    """The same elements; stride_order[i] tells how many dimensions are faster in memory than
    dimension i.
    """
    x = tensor(x)
    need(
        sorted(stride_order) == list(range(x.data.dim())),
        f"stride_order {stride_order} of {list(x.shape)}",
    )
    slowest_first = sorted(range(x.data.dim()), key=lambda d: -stride_order[d])
    back = [slowest_first.index(d) for d in range(x.data.dim())]
    return x.with_(x.data.permute(slowest_first).contiguous().permute(back))


def size(x: Any, *, dim: int) -> Scalar:
    return Scalar(tensor(x).shape[dim], "Index")


def shape(x: Any) -> tuple[Scalar, ...]:
    return tuple(size(x, dim=d) for d in range(tensor(x).data.dim()))


# Indexing -----------------------------------------------------------------------------------------
# Indices count from the start and must lie within; torch checks the upper end.


def _indices(index: Any) -> torch.Tensor:
    index = tensor(index, *INTS)
    need(not bool((index.data < 0).any()), "a negative index")
    return index.data.long()


def gather(x: Any, index: Any, *, dim: int) -> Value:
    x = tensor(x)
    return x.with_(torch.gather(x.data, axis(dim, x.data.dim()), _indices(index)))


def take_along_axis(x: Any, index: Any, *, dim: int) -> Value:
    """gather, but all other dimensions are equal, or 1 and repeated."""
    x, at = tensor(x), _indices(index)
    dim = axis(dim, x.data.dim())
    need(
        at.dim() == x.data.dim(),
        f"take_along_axis of {list(x.shape)} with indices {list(at.shape)}",
    )
    others = torch.broadcast_shapes(
        *([n for d, n in enumerate(t.shape) if d != dim] for t in (x.data, at))
    )
    wide = [(*others[:dim], t.shape[dim], *others[dim:]) for t in (x.data, at)]
    return x.with_(torch.gather(x.data.expand(wide[0]), dim, at.expand(wide[1])))


def scatter(x: Any, index: Any, src: Any, *, dim: int) -> Value:
    """Two different elements for one place are refused: which one stays is not defined."""
    x, at = tensor(x), _indices(index)
    source = (
        tensor(src, x.dtype).data
        if isinstance(src, Value)
        else constant(src, x.dtype).expand(at.shape)
    )
    need(source.shape == at.shape, f"scatter of {list(source.shape)} with indices {list(at.shape)}")
    dim = axis(dim, x.data.dim())
    data = torch.scatter(x.data, dim, at, source)
    kept = torch.gather(data, dim, at)
    need(
        bool(((kept == source) | ((kept != kept) & (source != source))).all()),
        "scatter of two values to one place",
    )
    return x.with_(data)


def index_select(x: Any, index: Any, *, dim: int) -> Value:
    """The index is 1-d, or of x's rank with size 1 in all dimensions but `dim`."""
    x, at = tensor(x), _indices(index)
    need(at.numel() == max(at.shape, default=1), f"index_select with indices {list(at.shape)}")
    return x.with_(torch.index_select(x.data, axis(dim, x.data.dim()), at.reshape(-1)))


def select(x: Any, index: Any, *, dim: int) -> Value:
    """The index is a scalar or a 0-d tensor."""
    x = tensor(x)
    at = int(_indices(index).item()) if isinstance(index, Value) else integer(scalar(index))
    need(at >= 0, f"a negative index: {at}")
    return x.with_(torch.select(x.data, axis(dim, x.data.dim()), at))


OPS = {
    **{
        f.__name__: f
        for f in (
            reshape,
            permute,
            broadcast,
            expand,
            broadcast_in_dim,
            squeeze,
            pad,
            cat,
            full,
            iota,
            stride_order,
        )
    },
    **{
        f.__name__: f for f in (size, shape, gather, take_along_axis, scatter, index_select, select)
    },
    "slice": slice_,
}
