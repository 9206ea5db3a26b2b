"""What a module does around its forward when each rank has a share of its weights.

Its result is the sum of what all ranks compute, and so are the gradients of what goes in: each rank's are those by way of its own share.
Replicated tokens are the same on all ranks, which get all sums. Of sharded tokens each rank has its own, as many as any other: all ranks
compute on all of them, and each gets the sums of its own. Collectives are operations of torch (`_c10d_functional`): compilers trace them,
reorder them and leave them alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TOKENS = ("replicated", "sharded")


def sum_over_ranks(module: nn.Module, group: str, ranks: int, tokens: str) -> None:
    """Makes a module of experts return the sum of what it returns on all ranks of a process group, which a name says.

    tokens: one of TOKENS. Sharded ones lie along the first dimension of each tensor that goes in, and of the result.
    Called once more for another group, the sums are over both: what was called first is outside.
    """
    spread, total = (_Gathered, _ScatteredSum) if tokens == "sharded" else (_Replicated, _Sum)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names, given = list(kwargs), (*args, *kwargs.values())
        at = [i for i, v in enumerate(given) if isinstance(v, Tensor)]
        made = dict(zip(at, spread.apply(group, ranks, *(given[i] for i in at)), strict=True))
        given = tuple(made.get(i, v) for i, v in enumerate(given))
        return given[: len(args)], dict(zip(names, given[len(args) :], strict=True))

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return total.apply(group, ranks, output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, prepend=True)
    module.is_summed = True  # type: ignore[assignment]


def is_summed(module: nn.Module) -> bool:
    """Whether `sum_over_ranks` was called of a module."""
    return hasattr(module, "is_summed")


def _all_reduce(x: Tensor, group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


def _all_gather(x: Tensor, group: str, ranks: int) -> Tensor:
    """[T, ...] of each rank -> [ranks T, ...]"""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks, group))


def _reduce_scatter(x: Tensor, group: str, ranks: int) -> Tensor:
    """[ranks T, ...] on each rank -> the sums of a rank's own [T, ...]"""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has already."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, x: Tensor) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, dy


class _Replicated(torch.autograd.Function):
    """What every rank has, in a share of what is computed from it: the gradients of all shares are added, in the order of the inputs."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.mark_non_differentiable(*(x for x in xs if not x.is_floating_point()))
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, None, *(_all_reduce(dy, ctx.group) if need else None for dy, need in zip(dys, needed, strict=True))


class _ScatteredSum(torch.autograd.Function):
    """Each rank's part of the sum over ranks. Every rank added to all parts."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, x: Tensor) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _reduce_scatter(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _all_gather(dy, ctx.group, ctx.ranks)


class _Gathered(torch.autograd.Function):
    """What all ranks have, one after the other; a rank's gradient is what all of them found for its part."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.ranks = group, ranks
        made = tuple(_all_gather(x, group, ranks) for x in xs)
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, None, *(_reduce_scatter(dy, ctx.group, ctx.ranks) if need else None for dy, need in zip(dys, needed, strict=True))
