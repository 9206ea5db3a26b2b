"""What a module does around its forward when each rank has a share of its weights and all have the same tokens.

The result is the sum over ranks, and so are the gradients of what goes in: each rank's are those by way of its own share. Collectives are
operations of torch (`_c10d_functional`): compilers trace them, reorder them and leave them alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def sum_over_ranks(module: nn.Module, group: str) -> None:
    """Makes a module of experts return the sum of what it returns on all ranks of a process group, which a name says."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names, given = list(kwargs), (*args, *kwargs.values())
        at = [i for i, v in enumerate(given) if isinstance(v, Tensor) and v.is_floating_point()]
        made = dict(zip(at, _SumOfGradients.apply(group, *(given[i] for i in at)), strict=True))
        given = tuple(made.get(i, v) for i, v in enumerate(given))
        return given[: len(args)], dict(zip(names, given[len(args) :], strict=True))

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return _Sum.apply(group, output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    module.summed_over = group  # type: ignore[assignment]


def is_summed(module: nn.Module) -> bool:
    """Whether `sum_over_ranks` was called of a module."""
    return hasattr(module, "summed_over")


def _all_reduce(x: Tensor, group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has already."""

    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class _SumOfGradients(torch.autograd.Function):
    """What every rank has, in a share of what is computed from it: the gradients of all shares are added, in the order of the inputs."""

    @staticmethod
    def forward(ctx: Any, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(_all_reduce(dy, ctx.group) if need else None for dy, need in zip(dys, needed, strict=True))
