"""Translators of aten's shape operations, and of sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion_moe.definitions.translate import translator
from fusion_moe.errors import Untranslatable
from fusion_moe.ir.builder import FusionDefinition, rows_like
from fusion_moe.ir.core import Value
from fusion_moe.ir.sizes import exact_div
from fusion_moe.ir.types import FLOATS, Dim, elements, plain


def reshaped(fd: FusionDefinition, x: Value, shape: Sequence[Dim]) -> Value:
    """x in another shape; if the first dimension's rows stay, they stay partitioned."""
    known = elements([d for d in shape if d != -1])
    whole = elements(x.type.shape)
    rest = exact_div(whole, known) if -1 in shape else 1
    if rest is None:
        raise Untranslatable(
            f"a reshape of {x.type} to {list(shape)}",
            expected="a size that follows from those of x",
        )
    new: list[Dim] = [rest if d == -1 else plain(d) for d in shape]
    if new and x.type.shape:
        new[0] = rows_like(x.type.shape[0], plain(new[0]))
    return x if tuple(new) == x.type.shape else fd.ops.reshape(x, new_shape=tuple(new))


def from_start(dim: int, rank: int) -> int:
    """A dimension that may be counted from the end."""
    return dim % rank if rank else 0


@translator("aten::view")
def view(fd: FusionDefinition, x: Value, shape: Sequence[Dim]) -> Value:
    """x in another shape"""
    return reshaped(fd, x, shape)


translator("aten::reshape")(view)
translator("aten::_unsafe_view")(view)


@translator("aten::clone")
def clone(fd: FusionDefinition, x: Value, *, memory_format: Any = None) -> Value:
    """x itself: values of the IR have no memory of their own"""
    return x


translator("aten::alias")(clone)
translator("aten::detach")(clone)


@translator("aten::unsqueeze")
def unsqueeze(fd: FusionDefinition, x: Value, dim: int) -> Value:
    """x with a new dimension of size 1"""
    at = from_start(dim, len(x.type.shape) + 1)
    return reshaped(fd, x, (*x.type.shape[:at], 1, *x.type.shape[at:]))


@translator("aten::squeeze.dim")
def squeeze(fd: FusionDefinition, x: Value, dim: int) -> Value:
    """x without a dimension of size 1"""
    at = from_start(dim, len(x.type.shape))
    is_one = [plain(d) for d in x.type.shape[at : at + 1]] == [1]
    return reshaped(fd, x, (*x.type.shape[:at], *x.type.shape[at + 1 :])) if is_one else x


@translator("aten::expand")
def expand(
    fd: FusionDefinition, x: Value, shape: Sequence[Dim], *, implicit: bool = False
) -> Value:
    """x with dimensions of size 1 repeated and new ones in front"""
    new = len(shape) - len(x.type.shape)
    full = [x.type.shape[i - new] if d == -1 else d for i, d in enumerate(shape)]
    return fd.ops.broadcast_in_dim(
        x, shape=tuple(full), broadcast_dims=tuple(range(new, len(shape)))
    )


@translator("aten::permute")
def permute(fd: FusionDefinition, x: Value, dims: Sequence[int]) -> Value:
    """x with its dimensions in another order"""
    return fd.ops.permute(x, dims=tuple(from_start(d, len(x.type.shape)) for d in dims))


@translator("aten::t")
def t(fd: FusionDefinition, x: Value) -> Value:
    """x [A, B] -> [B, A]"""
    return fd.ops.permute(x, dims=tuple(reversed(range(len(x.type.shape)))))


@translator("aten::slice.Tensor")
def slice_(
    fd: FusionDefinition, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    """x[start:end] along one dimension"""
    at = from_start(dim, len(x.type.shape))
    size = plain(x.type.shape[at])
    if step != 1:
        raise Untranslatable(f"a slice with step {step}", expected="step 1")
    first, last = _bound(start, 0, size), _bound(end, size, size)
    last = first if isinstance(first, int) and isinstance(last, int) and last < first else last
    starts = tuple(first if i == at else 0 for i in range(len(x.type.shape)))
    ends = tuple(last if i == at else d for i, d in enumerate(x.type.shape))
    return (
        x if (first, last) == (0, size) else fd.ops.slice(x, start_indices=starts, end_indices=ends)
    )


def _bound(n: Any, default: Any, size: Any) -> Any:
    if n is None:
        return default
    if isinstance(n, int) and isinstance(size, int):
        return max(0, min(size, n + size if n < 0 else n))
    if n == size or (isinstance(n, int) and n >= 2**62):
        return size
    if n == 0:
        return 0
    raise Untranslatable(
        f"a slice bound {n} of a size {size}", expected="bounds and a size known when compiling"
    )


@translator("aten::select.int")
def select(fd: FusionDefinition, x: Value, dim: int, i: int) -> Value:
    """x[i] along one dimension"""
    at = from_start(dim, len(x.type.shape))
    size = plain(x.type.shape[at])
    if not isinstance(size, int) or not isinstance(i, int):
        raise Untranslatable(
            f"element {i} of a size {size}", expected="a size known when compiling"
        )
    first = i % size
    part = slice_(fd, x, at, first, first + 1)
    return reshaped(fd, part, (*x.type.shape[:at], *x.type.shape[at + 1 :]))


@translator("aten::split.Tensor")
def split(fd: FusionDefinition, x: Value, split_size: int, dim: int = 0) -> tuple[Value, ...]:
    """x in pieces of split_size; the last one may be smaller"""
    size = plain(x.type.shape[from_start(dim, len(x.type.shape))])
    if not isinstance(size, int) or not isinstance(split_size, int):
        raise Untranslatable(
            f"pieces of {split_size} of a size {size}", expected="sizes known when compiling"
        )
    return tuple(
        slice_(fd, x, dim, s, min(s + split_size, size))
        for s in range(0, max(size, 1), split_size or 1)
    )


@translator("aten::split_with_sizes")
def split_with_sizes(
    fd: FusionDefinition, x: Value, sizes: Sequence[int], dim: int = 0
) -> tuple[Value, ...]:
    """x in pieces of these sizes"""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(slice_(fd, x, dim, s, s + n) for s, n in zip(starts, sizes, strict=True))


@translator("aten::cat")
def cat(fd: FusionDefinition, xs: Sequence[Value], dim: int = 0) -> Value:
    """xs one after the other"""
    return fd.ops.cat(*xs, dim=from_start(dim, len(xs[0].type.shape)))


@translator("aten::full")
def full(
    fd: FusionDefinition,
    shape: Sequence[Dim],
    value: float,
    *,
    dtype: str | None = None,
    **others: Any,
) -> Value:
    """A tensor whose elements are all one number"""
    if dtype is None:
        raise Untranslatable("full without a dtype", expected="dtype given")
    if not isinstance(value, (int, float)):
        raise Untranslatable(f"full of {value}", expected="a number known when compiling")
    return fd.ops.full(
        shape=tuple(shape), fill_value=float(value) if dtype in FLOATS else value, dtype=dtype
    )


@translator("aten::sum.dim_IntList")
def sum_(
    fd: FusionDefinition,
    x: Value,
    dims: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: str | None = None,
) -> Value:
    """x summed over dimensions"""
    rank = len(x.type.shape)
    x = x if dtype is None else fd.ops.cast(x, dtype=dtype)
    return fd.ops.sum(
        x, dims=tuple(sorted(from_start(d, rank) for d in dims or range(rank))), keepdim=keepdim
    )
