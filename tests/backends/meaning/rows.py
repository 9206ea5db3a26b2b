"""Operations along dimensions: reductions and sorting.

Sums are computed in float64 and rounded once: the order in which a kernel adds is its
own, and the caller's tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .pointwise import NUMBERS
from .values import FLOATS, HALVES, Value, axis, held, need, tensor


def sum_(x: Any, *, dims: list[int], dtype: str) -> Value:
    """Sums of integers and of 16-bit floats are printed with a cast to Int or Float before them,
    when they are right.
    """
    x = tensor(x, *FLOATS, "Int")
    need(dtype == x.dtype, f"sum of {x.dtype} as {dtype}: nvFuser would have printed a cast")
    data = x.data.double() if x.dtype in FLOATS else x.data
    return Value(data.sum(dims).to(held(dtype)), dtype)


def max_(x: Any, *, dims: list[int]) -> Value:
    """NaN for a NaN."""
    x = tensor(x, *NUMBERS, *HALVES)
    return x.with_(torch.amax(x.data, dims))


def argsort(x: Any, *, dim: int, descending: bool = False, stable: bool = False) -> Value:
    """Equal elements in their order if stable, else, to show who relies on it, reversed."""
    x = tensor(x, *NUMBERS, *HALVES)
    dim = axis(dim, x.data.dim())
    data = x.data if stable else x.data.flip(dim)
    at = torch.argsort(data, dim=dim, descending=descending, stable=True)
    return Value(at if stable else x.shape[dim] - 1 - at, "Int")


OPS: dict[str, Callable[..., Any]] = {"sum": sum_, "max": max_, "argsort": argsort}
