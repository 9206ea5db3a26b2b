"""Operations along dimensions: reductions, scans, sorting.

Sums and products are computed in float64 and rounded once: the order in which a kernel adds is its
own, and the caller's tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .pointwise import NUMBERS
from .values import FLOATS, HALVES, Value, axis, held, integer, need, tensor


def _reduction(
    name: str, function: Callable[[torch.Tensor, int], torch.Tensor]
) -> Callable[..., Value]:
    def reduce(x: Any, *, dims: list[int], dtype: str) -> Value:
        """Sums of integers and of 16-bit floats are printed with a cast to Int or Float before
        them, when they are right.
        """
        x = tensor(x, *FLOATS, "Int")
        need(dtype == x.dtype, f"{name} of {x.dtype} as {dtype}: nvFuser would have printed a cast")
        data = x.data.double() if x.dtype in FLOATS else x.data
        for dim in sorted(dims, reverse=True):
            data = function(data, dim)
        return Value(data.to(held(dtype)), dtype)

    return reduce


def _extreme(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def reduce(x: Any, *, dims: list[int]) -> Value:
        """NaN for a NaN."""
        x = tensor(x, *NUMBERS, *HALVES)
        return x.with_(function(x.data, dims))

    return reduce


def _scan(function: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Value]:
    def scan(x: Any, *, dim: int) -> Value:
        """In the dtype of x, which is not widened: integers wrap around."""
        x = tensor(x, *NUMBERS)
        data = x.data.double() if x.dtype in FLOATS else x.data
        return x.with_(function(data, axis(dim, x.data.dim())).to(held(x.dtype)))

    return scan


def _order(x: torch.Tensor, dim: int, descending: bool, stable: bool) -> torch.Tensor:
    """Where the elements come from when sorted. Equal ones in their order if stable, else, to show
    who relies on it, reversed.
    """
    if stable:
        return torch.argsort(x, dim=dim, descending=descending, stable=True)
    return (
        x.shape[dim] - 1 - torch.argsort(x.flip(dim), dim=dim, descending=descending, stable=True)
    )


def argsort(x: Any, *, dim: int, descending: bool = False, stable: bool = False) -> Value:
    x = tensor(x, *NUMBERS, *HALVES)
    return Value(_order(x.data, axis(dim, x.data.dim()), descending, stable), "Int")


def topk(
    x: Any, k: Any, *, dim: int = -1, largest: bool = True, sorted: bool = False
) -> tuple[Value, Value]:
    """(values, indices), sorted also where that is not asked for; which one of two equal elements
    comes first is not defined.
    """
    x, count = tensor(x, *NUMBERS, *HALVES), integer(k)
    dim = axis(dim, x.data.dim())
    need(0 <= count <= x.shape[dim], f"topk of {count} among {x.shape[dim]}")
    at = _order(x.data, dim, largest, stable=False).narrow(dim, 0, count)
    return x.with_(torch.gather(x.data, dim, at)), Value(at, "Int")


OPS: dict[str, Callable[..., Any]] = {
    "sum": _reduction("sum", torch.sum),
    "prod": _reduction("prod", torch.prod),
    "max": _extreme(torch.amax),
    "min": _extreme(torch.amin),
    "cumsum": _scan(lambda x, dim: torch.cumsum(x, dim, dtype=x.dtype)),
    "cumprod": _scan(lambda x, dim: torch.cumprod(x, dim, dtype=x.dtype)),
    "cummax": _scan(lambda x, dim: torch.cummax(x, dim).values),
    "cummin": _scan(lambda x, dim: torch.cummin(x, dim).values),
    "argsort": argsort,
    "topk": topk,
}
