"""Operations that move elements, or make tensors of nothing."""

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


def size(x: Any, *, dim: int) -> Scalar:
    return Scalar(tensor(x).shape[dim], "Index")


# Indexing -----------------------------------------------------------------------------------------
# Indices count from the start and must lie within; torch checks the upper end.


def _indices(index: Any) -> torch.Tensor:
    index = tensor(index, *INTS)
    need(not bool((index.data < 0).any()), "a negative index")
    return index.data.long()


def index_select(x: Any, index: Any, *, dim: int) -> Value:
    """The index is 1-d, or of x's rank with size 1 in all dimensions but `dim`."""
    x, at = tensor(x), _indices(index)
    need(at.numel() == max(at.shape, default=1), f"index_select with indices {list(at.shape)}")
    return x.with_(torch.index_select(x.data, axis(dim, x.data.dim()), at.reshape(-1)))


OPS = {
    **{
        f.__name__: f
        for f in (
            reshape,
            permute,
            broadcast,
            expand,
            squeeze,
            pad,
            cat,
            full,
            iota,
            size,
            index_select,
        )
    },
    "slice": slice_,
}
