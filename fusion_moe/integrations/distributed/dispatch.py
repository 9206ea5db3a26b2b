"""What surrounds the forward of an expert module when each rank has a share of its weights.

The module's result is the sum of what all ranks compute. So is the gradient of its inputs: each
rank computes the gradient by way of its own share. A dispatcher brings the inputs to the ranks that
need them, and adds up the ranks' results:

        Everywhere  all ranks compute on all tokens. Either these are the same on all ranks, and all
                    ranks get all sums; or each rank has its own, equally many, and gets their sums
        AllToAll    each rank has its own tokens, and sends them only to the ranks that hold their
                    experts (all_to_all.py)

Of the two functions that a dispatcher consists of, each is the derivative of the other (`Linear`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...errors import DtypeError, ShapeError
from .collectives import all_gather, all_reduce, reduce_scatter

TOKENS = ("replicated", "sharded")


class Dispatcher(Protocol):
    """Wraps the forward of an expert module."""

    def dispatch(
        self, module: nn.Module, tensors: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors on which the module computes, in the order of the given ones, and what
        `combine` needs to know.
        """

    def combine(self, y: Tensor, kept: Any) -> Tensor:
        """The result of the module -> the sums over ranks, for the tokens that were given."""


def divide_forward(module: nn.Module, dispatcher: Dispatcher, features: int) -> None:
    """Wraps a module's forward in a dispatcher, outside of earlier ones. Hooks of the module stay
    outside of all. features: of tokens.

    The first dimension of the input tensors and of the result counts tokens. Copies of the module
    are wrapped too. The module gets an attribute `is_divided`.
    """
    inner = module.forward.__func__  # type: ignore[attr-defined]  # unbound, for a copy's self instead of this module
    names = tuple(inspect.signature(inner).parameters)[1:]

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        # dispatchers tell tensors by their places
        kwargs = {name: kwargs[name] for name in names if name in kwargs} | kwargs
        inputs = (*args, *kwargs.values())
        at = [i for i, v in enumerate(inputs) if isinstance(v, Tensor)]
        given = tuple(inputs[i] for i in at)
        _need_rows(type(self).__name__, given, features)
        tensors, kept = dispatcher.dispatch(self, given)
        results = dict(zip(at, tensors, strict=True))
        inputs = tuple(results.get(i, v) for i, v in enumerate(inputs))
        y = inner(self, *inputs[: len(args)], **dict(zip(kwargs, inputs[len(args) :], strict=True)))
        return dispatcher.combine(y, kept)

    module.forward = MethodType(forward, module)
    module.is_divided = True  # type: ignore[assignment]


def _need_rows(name: str, tensors: tuple[Tensor, ...], features: int) -> None:
    """ShapeError or DtypeError for tokens, ids and router weights that do not fit: here, before
    other ranks get what they do not expect.
    """
    x, ids, w = tensors
    if ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError(
            f"top_k_index is {ids.dtype}", expected="torch.int64 or torch.int32", where=name
        )
    rows = math.prod(x.shape[:-1])
    if ids.dim() != 2 or ids.shape[0] != rows or w.shape != ids.shape or x.shape[-1] != features:
        raise ShapeError(
            f"hidden_states {list(x.shape)}, top_k_index {list(ids.shape)}, "
            f"top_k_weights {list(w.shape)}",
            expected=f"[..., {features}] of {rows} tokens, and twice [{rows}, k]",
            where=name,
        )


class Everywhere:
    """All ranks of a process group compute on the tokens of all ranks."""

    def __init__(self, group: str, ranks: int, sharded: bool):
        """group: the name of the process group. sharded: whether each rank has its own tokens."""
        self.group, self.ranks = group, ranks
        self.there, self.back = (all_gather, reduce_scatter) if sharded else (_same, all_reduce)

    def dispatch(
        self, module: nn.Module, tensors: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], None]:
        """The tensors of all ranks."""
        return Linear.apply(
            self.there, self.back, self.group, self.ranks, None, None, *tensors
        ), None

    def combine(self, y: Tensor, kept: None) -> Tensor:
        """The sums over ranks for the rank's own tokens."""
        return Linear.apply(self.back, self.there, self.group, self.ranks, None, None, y)[0]


def _same(x: Tensor, group: str, ranks: int) -> Tensor:
    """What every rank has: in the backward, the gradients of all ranks' shares are added."""
    return x.view_as(x)


class Linear(torch.autograd.Function):
    """there(x, group, ranks) of each tensor; the gradients go through `back`, its transpose.

    at, at_back: a further argument of either, if they take one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        there: Callable[..., Tensor],
        back: Callable[..., Tensor],
        group: str,
        ranks: int,
        at: Tensor | None,
        at_back: Tensor | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        """there(x, group, ranks) of each x; results that are no floats get no gradient."""
        ctx.back, ctx.group, ctx.ranks = back, group, ranks
        ctx.save_for_backward(*([] if at_back is None else [at_back]))
        ys = tuple(there(x, group, ranks, *([] if at is None else [at])) for x in xs)
        ctx.mark_non_differentiable(*(y for y in ys if not y.is_floating_point()))
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        """back(dy, group, ranks) of each x that needs a gradient."""
        at_back = ctx.saved_tensors  # once: checkpoints let go of what they gave
        gradients = (
            ctx.back(dy, ctx.group, ctx.ranks, *at_back) if need else None
            for dy, need in zip(dys, ctx.needs_input_grad[6:], strict=True)
        )
        return None, None, None, None, None, None, *gradients
