"""What surrounds the forward of an expert module when each rank has a share of its weights.

The module's result is the sum of what all ranks compute. So is the gradient of its inputs: each
rank computes the gradient by way of its own share. A dispatcher brings the inputs to the ranks that
need them, and adds up the ranks' results:

        Replicated  tokens are the same on all ranks, and all ranks get all sums
        Gathered    each rank has its own tokens, equally many: all ranks compute on all tokens, and
                    each gets the sums of its own
        AllToAll    each rank has its own tokens, and sends them only to the ranks that hold their
                    experts (all_to_all.py)

Of the two functions that a dispatcher consists of, each is the derivative of the other.
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
    """Wraps the forward of an expert module."""

    def dispatch(
        self, module: nn.Module, given: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors on which the module computes, in the order of the given ones, and what
        `combine` needs to know.
        """

    def combine(self, y: Tensor, kept: Any) -> Tensor:
        """The result of the module -> the sums over ranks, for the tokens that were given."""


def divide_forward(module: nn.Module, dispatcher: Dispatcher) -> None:
    """Wraps a module's forward in a dispatcher, outside of earlier ones. Hooks of the module stay
    outside of all.

    The first dimension of the input tensors and of the result counts tokens. Copies of the module
    are wrapped too.
    """
    inner = module.forward.__func__  # type: ignore[attr-defined]  # unbound, for a copy's self instead of this module
    names = tuple(inspect.signature(inner).parameters)[1:]

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        # dispatchers tell tensors by their places
        kwargs = {name: kwargs[name] for name in names if name in kwargs} | kwargs
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
    """Whether `divide_forward` was called for a module."""
    return hasattr(module, "is_divided")


class Replicated:
    """The sum over all ranks of a process group, for tokens that all ranks have."""

    def __init__(self, group: str, ranks: int):
        """group: the name of the process group."""
        self.group, self.ranks = group, ranks

    def dispatch(
        self, module: nn.Module, given: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], None]:
        """The inputs unchanged."""
        return _Replicated.apply(self.group, *given), None

    def combine(self, y: Tensor, kept: None) -> Tensor:
        """An all-reduce."""
        return _Sum.apply(self.group, y)


class Gathered:
    """Gathers the tokens of all ranks of a process group; each rank gets its part of the sum."""

    def __init__(self, group: str, ranks: int):
        """group: the name of the process group."""
        self.group, self.ranks = group, ranks

    def dispatch(
        self, module: nn.Module, given: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], None]:
        """An all-gather of each tensor."""
        return _Gathered.apply(self.group, self.ranks, *given), None

    def combine(self, y: Tensor, kept: None) -> Tensor:
        """A reduce-scatter."""
        return _ScatteredSum.apply(self.group, self.ranks, y)


class _Sum(torch.autograd.Function):
    """The sum over ranks; every rank already has its gradient."""

    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class _Replicated(torch.autograd.Function):
    """A tensor that every rank has: in the backward, the gradients of all ranks' shares are added,
    in the order of the inputs.
    """

    @staticmethod
    def forward(ctx: Any, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.mark_non_differentiable(*(x for x in xs if not x.is_floating_point()))
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            all_reduce(dy, ctx.group) if need else None
            for dy, need in zip(dys, needed, strict=True)
        )


class _ScatteredSum(torch.autograd.Function):
    """Each rank's part of the sum over ranks, to all parts of which every rank contributes."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, x: Tensor) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return reduce_scatter(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, all_gather(dy, ctx.group, ctx.ranks)


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks, one after the other; in the backward, a rank gets the sum of all
    ranks' gradients for its part.
    """

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.ranks = group, ranks
        made = tuple(all_gather(x, group, ranks) for x in xs)
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(
                reduce_scatter(dy, ctx.group, ctx.ranks) if need else None
                for dy, need in zip(dys, needed, strict=True)
            ),
        )
