"""What a module of experts does around its forward when each rank has a share of its weights.

Its result is the sum of what all ranks compute, and so are the gradients of what goes in: each rank's are those by way of its own share.
A dispatcher brings what goes in to the ranks that need it, and adds up what they return:

    Replicated  tokens are the same on all ranks, which get all sums
    Gathered    each rank has tokens of its own, as many as any other: all ranks compute on all of them, each gets the sums of its own
    AllToAll    each rank has tokens of its own, and sends them to the ranks that hold their experts alone (all_to_all.py)

Of both functions that a dispatcher consists of, the one is the derivative of the other.
"""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .collectives import all_gather, all_reduce, reduce_scatter

TOKENS = ("replicated", "sharded")


class Dispatcher(Protocol):
    """Around the forward of a module of experts."""

    def dispatch(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
        """What the module computes on, in the order of what it was given, and what `combine` wants to know."""

    def combine(self, y: Tensor, kept: Any) -> Tensor:
        """The result of the module -> the sums over ranks, of the tokens that were given."""


def divide_forward(module: nn.Module, dispatcher: Dispatcher) -> None:
    """Puts a dispatcher around a module's forward, outside of those that are there. Hooks of the module stay outside of all.

    First dimensions of tensors that go in, and of the result, are tokens. Copies of the module have copies of this.
    """
    inner = module.forward.__func__  # type: ignore[attr-defined]  # of a copy's self, not of this module
    names = tuple(inspect.signature(inner).parameters)[1:]

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        kwargs = {name: kwargs[name] for name in names if name in kwargs} | kwargs  # dispatchers tell tensors by their places
        given = (*args, *kwargs.values())
        at = [i for i, v in enumerate(given) if isinstance(v, Tensor)]
        tensors, kept = dispatcher.dispatch(self, tuple(given[i] for i in at))
        made = dict(zip(at, tensors, strict=True))
        given = tuple(made.get(i, v) for i, v in enumerate(given))
        y = inner(self, *given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        return dispatcher.combine(y, kept)

    module.forward = MethodType(forward, module)
    module.is_divided = True  # type: ignore[assignment]


def is_divided(module: nn.Module) -> bool:
    """Whether `divide_forward` was called of a module."""
    return hasattr(module, "is_divided")


class Replicated:
    """The sum over all ranks of a process group."""

    def __init__(self, group: str, ranks: int):
        """group: its name."""
        self.group, self.ranks = group, ranks

    def dispatch(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], None]:
        """As it is."""
        return _Replicated.apply(self.group, *given), None

    def combine(self, y: Tensor, kept: None) -> Tensor:
        """An all-reduce."""
        return _Sum.apply(self.group, y)


class Gathered:
    """Tokens of all ranks of a process group, and each rank's part of the sum."""

    def __init__(self, group: str, ranks: int):
        """group: its name."""
        self.group, self.ranks = group, ranks

    def dispatch(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], None]:
        """An all-gather of each tensor."""
        return _Gathered.apply(self.group, self.ranks, *given), None

    def combine(self, y: Tensor, kept: None) -> Tensor:
        """A reduce-scatter."""
        return _ScatteredSum.apply(self.group, self.ranks, y)


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has already."""

    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class _Replicated(torch.autograd.Function):
    """What every rank has, in a share of what is computed from it: the gradients of all shares are added, in the order of the inputs."""

    @staticmethod
    def forward(ctx: Any, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.mark_non_differentiable(*(x for x in xs if not x.is_floating_point()))
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(all_reduce(dy, ctx.group) if need else None for dy, need in zip(dys, needed, strict=True))


class _ScatteredSum(torch.autograd.Function):
    """Each rank's part of the sum over ranks. Every rank added to all parts."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, x: Tensor) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return reduce_scatter(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, all_gather(dy, ctx.group, ctx.ranks)


class _Gathered(torch.autograd.Function):
    """What all ranks have, one after the other; a rank's gradient is what all of them found for its part."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.ranks = group, ranks
        made = tuple(all_gather(x, group, ranks) for x in xs)
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, None, *(reduce_scatter(dy, ctx.group, ctx.ranks) if need else None for dy, need in zip(dys, needed, strict=True))
