"""Routers: which experts a token goes to, by its logits, and the weight of each.

    ids = topk_ids(logits, bias)     integers, without a derivative
    w = topk_weights(logits, ids)    differentiable in logits

T tokens, E experts, k slots a token. Scores are the softmax or sigmoid of the logits, in float32
(f64 for float64). If only their order matters, logits are compared instead, which have the same
order: scores that are equal in float32 are still told apart. Of equal numbers the first expert is
chosen, and NaN is the largest number, as in `torch.sort(descending=True, stable=True)`; ids are
always k different experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import FusionError, ShapeError, need_one_of
from ...layouts import check_ids
from ..core import Op, OpKind, Value
from ..types import DTYPES, FLOATS, INTS, TensorType, accumulated, plain, wide
from .rules import Types, need, need_same

SCORINGS = ("softmax", "sigmoid")
EPSILON = 1e-20  # added to a sum of sigmoids, which may be 0


def compares_scores(bias: object, n_group: int, best_of_group: int) -> bool:
    """Whether `topk_ids` adds to scores, so that more than their order matters."""
    return isinstance(bias, (TensorType, Value, torch.Tensor)) or (
        n_group > 1 and best_of_group > 1
    )


def _topk_ids_type(
    logits: TensorType,
    bias: Any,
    k: int,
    scoring: str = "softmax",
    n_group: int = 1,
    topk_group: int = 1,
    best_of_group: int = 1,
) -> Types:
    """logits [T, E], bias [E] or 0 -> ids i64[T, k]: the experts with the best scores (plus bias),
    best first; of equal ones the first.

    n_group > 1: of n_group equal runs of experts, only the topk_group with the largest sums of
    best_of_group scores count.
    """
    need_experts(logits, scoring)
    count = logits.shape[1]
    assert isinstance(count, int)
    if isinstance(bias, TensorType):
        need("bias", bias, 1, accumulated(logits.dtype))
        need_same("expert count", "bias", bias.shape[0], "logits", count)
    elif bias != 0 or isinstance(bias, bool):
        raise FusionError(
            f"bias = {bias!r}", expected=f"{accumulated(logits.dtype)}[{count}], or 0"
        )
    if n_group < 1 or count % n_group:
        raise ShapeError(f"{n_group} groups of {count} experts", expected="groups of equally many")
    if not 1 <= topk_group <= n_group:
        raise ShapeError(
            f"topk_group = {topk_group}", expected=f"1 to {n_group}, the groups that there are"
        )
    if not 1 <= best_of_group <= min(2, count // n_group):
        raise ShapeError(
            f"best_of_group = {best_of_group}",
            expected=f"1 to {min(2, count // n_group)}, of {count // n_group} in a group",
        )
    if not 1 <= k <= topk_group * (count // n_group):
        raise ShapeError(
            f"k = {k}",
            expected=f"1 to {topk_group * (count // n_group)}, the experts that are chosen from",
        )
    return (TensorType((plain(logits.shape[0]), k), "i64"),)


def need_experts(logits: TensorType, scoring: str) -> None:
    """Raises unless logits are float[T, E] with a known number of experts, and scoring is a known
    one.
    """
    need("logits", logits, 2, *FLOATS)
    if not isinstance(logits.shape[1], int) or not 1 <= logits.shape[1] < 2**31:
        raise ShapeError(f"logits {logits}", expected="a number of experts known when compiling")
    need_one_of("scoring", scoring, SCORINGS)


def _topk_ids(
    logits: torch.Tensor,
    bias: Any,
    k: int,
    scoring: str = "softmax",
    n_group: int = 1,
    topk_group: int = 1,
    best_of_group: int = 1,
) -> tuple[torch.Tensor]:
    x = wide(logits)
    if compares_scores(bias, n_group, best_of_group):
        x = scores(x, scoring) + bias
    order = _best_first(x)
    if n_group > 1:
        of_groups = x.view(len(x), n_group, x.shape[1] // n_group)
        best = of_groups.gather(2, _best_first(of_groups)[..., :best_of_group]).sum(2)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, _best_first(best)[:, :topk_group], True
        )
        outside = ~chosen.repeat_interleave(of_groups.shape[2], dim=1).gather(1, order)
        order = order.gather(1, outside.byte().sort(dim=1, stable=True).indices)
    return (order[:, :k].contiguous(),)


def _best_first(x: torch.Tensor) -> torch.Tensor:
    """x [..., N] -> i64[..., N]: the indices of the largest numbers first; of equal numbers the
    first index.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices


def scores(x: torch.Tensor, scoring: str) -> torch.Tensor:
    """x float[..., E] -> its scores, in its dtype."""
    return x.softmax(-1) if scoring == "softmax" else x.sigmoid()


def _need_ids(logits: TensorType, ids: TensorType) -> None:
    need("ids", ids, 2, *INTS)
    need_same("token count", "ids", ids.shape[0], "logits", logits.shape[0])


def _routing_map_type(ids: TensorType, experts: int) -> Types:
    """ids int[T, k] -> bool[T, experts]: whether an expert is one of the token's. An id that is no
    expert is none.
    """
    need("ids", ids, 2, *INTS)
    if not 1 <= experts < 2**31:
        raise ShapeError(f"{experts} experts", expected="1 or more")
    if not isinstance(ids.shape[1], int):
        raise ShapeError(f"ids {ids}", expected="a number of slots known when compiling")
    return (TensorType((plain(ids.shape[0]), experts), "bool"),)


def _routing_map(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor]:
    every = torch.arange(experts, device=ids.device)
    result = torch.zeros(len(ids), experts, dtype=torch.bool, device=ids.device)
    for of_slot in ids.unbind(1):
        result |= of_slot[:, None] == every
    return (result,)


def _topk_weights_type(
    logits: TensorType,
    ids: TensorType,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    dtype: str | None = None,
) -> Types:
    """logits [T, E], ids int[T, k] -> f32[T, k]: the scores of these experts times
    routed_scaling_factor (f64 for f64).

    renormalize: divided by their sum; for softmax, the softmax of only the chosen logits. dtype: to
    which results are rounded.
    """
    need_experts(logits, scoring)
    _need_ids(logits, ids)
    if not math.isfinite(routed_scaling_factor):
        raise FusionError(
            f"routed_scaling_factor = {routed_scaling_factor}", expected="a finite number"
        )
    if dtype is not None:
        need_one_of("dtype", dtype, FLOATS)
    return (TensorType(tuple(map(plain, ids.shape)), dtype or accumulated(logits.dtype)),)


def _topk_weights(
    logits: torch.Tensor,
    ids: torch.Tensor,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    dtype: str | None = None,
) -> tuple[torch.Tensor]:
    w = _weights(wide(logits), _checked(ids, logits), scoring, renormalize) * routed_scaling_factor
    return (w.to(DTYPES[dtype]) if dtype else w,)


def _weights(x: torch.Tensor, ids: torch.Tensor, scoring: str, renormalize: bool) -> torch.Tensor:
    if not renormalize:
        return scores(x, scoring).gather(1, ids)
    chosen = scores(x.gather(1, ids), scoring)
    return chosen if scoring == "softmax" else chosen / (chosen.sum(1, keepdim=True) + EPSILON)


def _checked(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """ids as indices, after a check that they are experts."""
    if not ids.is_cuda:  # on CUDA the check would wait for the device
        check_ids(ids, logits.shape[1])
    return ids.long()


def _topk_weights_grad(fd: Any, op: Op, dw: Value) -> Sequence[Value | None]:
    attrs = {name: attr for name, attr in op.attrs.items() if name != "dtype"}
    dw = fd.ops.cast(dw, dtype=accumulated(op.values[0].type.dtype))
    return [fd.ops.topk_weights_backward(*op.values, dw, **attrs), None]


def _topk_weights_backward_type(
    logits: TensorType,
    ids: TensorType,
    dw: TensorType,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
) -> Types:
    """logits [T, E], ids int[T, k], dw f32[T, k], the gradient of `topk_weights` -> the gradient of
    logits [T, E], in their dtype.
    """
    (w,) = _topk_weights_type(logits, ids, scoring, renormalize, routed_scaling_factor)
    need("dw", dw, 2, w.dtype)
    for a, b in zip(dw.shape, w.shape, strict=True):
        need_same("size", "dw", a, "ids", b)
    return (logits.with_(shape=tuple(map(plain, logits.shape))),)


def _topk_weights_backward(
    logits: torch.Tensor,
    ids: torch.Tensor,
    dw: torch.Tensor,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor]:
    """With s, the scores of the chosen experts before scaling, and g = dw * routed_scaling_factor:

    softmax:              (g - <g, s>) s where chosen; -<g, s> s elsewhere, unless renormalized
    sigmoid:              g s (1 - s); renormalized g becomes (g - <g, s> / S) / S, with S the sum
                          of s
    """
    x, ids, g = wide(logits), _checked(ids, logits), dw * routed_scaling_factor
    s = _weights(x, ids, scoring, renormalize and scoring == "softmax")
    along = (g * s).sum(1, keepdim=True)
    dx = torch.zeros_like(x)
    if scoring == "softmax":
        dx = (
            dx.scatter_add_(1, ids, (g - along) * s)
            if renormalize
            else (-along * x.softmax(1)).scatter_add_(1, ids, g * s)
        )
    else:
        if renormalize:
            total = s.sum(1, keepdim=True) + EPSILON
            g = (g - along / total) / total
        dx.scatter_add_(1, ids, g * s * (1 - s))
    return (dx.to(logits.dtype),)


TABLE = (
    OpKind("topk_ids", _topk_ids_type, _topk_ids, role="routing"),
    OpKind("routing_map", _routing_map_type, _routing_map, role="gather"),
    OpKind("topk_weights", _topk_weights_type, _topk_weights, _topk_weights_grad, role="routing"),
    OpKind(
        "topk_weights_backward", _topk_weights_backward_type, _topk_weights_backward, role="reduce"
    ),
)
