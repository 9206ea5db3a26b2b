"""Sends each token to the ranks that hold its experts, once to each, and returns their sums over
its experts.

All sizes are known before the routing: a rank has C rows for each other rank, and an empty row
after them. The token of each row and the rows of each token are tensors on the device, for which
nothing waits, so one captured CUDA graph serves all routings.

    slot_of [T, n]          the rows of a token, in the order of ranks; n = min(k, R); if there is
                            none, the empty row of a rank
    token_of [R (C + 1)]    the token of a row; T if there is none

A row that is always empty has the ids -1, which name no expert: its result is zero, and so are its
gradients. Letters: T tokens of a rank, k experts a token, E experts, R ranks, C capacity, H hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...definitions.operations import restored
from .collectives import all_to_all
from .dispatch import Linear
from .exchange.kinds import holders


class Assignment(NamedTuple):
    """Where the tokens of a rank are sent."""

    slot_of: Tensor
    token_of: Tensor
    dropped: Tensor


def assign_rows(ids: Tensor, experts: int, ranks: int, capacity: int | float) -> Assignment:
    """ids int[T, k] -> slot_of i64[T, n], token_of i64[R (C + 1)], dropped bool[T, R]: tokens for
    which a rank had no row left.

    Rows are given out in the order of tokens. capacity: C, or as a float, C as a fraction of T.
    """
    tokens, slots = ids.shape
    rows = (
        capacity
        if isinstance(capacity, int)
        else tokens
        if capacity == 1
        else math.ceil(tokens * capacity)
    )
    goes = holders(ids, experts, ranks)
    place = goes.cumsum(0) - 1
    sent = goes & (place < rows)
    slot_of = torch.where(sent, place, rows) + torch.arange(ranks, device=ids.device) * (rows + 1)
    token = torch.where(sent, torch.arange(tokens, device=ids.device)[:, None], tokens)
    token_of = torch.full((ranks * (rows + 1),), tokens, device=ids.device).scatter(
        0, slot_of.flatten(), token.flatten()
    )
    first = (~sent).int().argsort(dim=1, stable=True)[:, : min(slots, ranks)]
    return Assignment(slot_of.gather(1, first), token_of, goes & ~sent)


class AllToAll:
    """Sends tokens to the ranks of their experts and brings the sums back."""

    def __init__(self, group: str, ranks: int, experts: int, capacity: int | float):
        """group: the name of a process group. experts: E over all ranks."""
        self.group, self.ranks, self.experts, self.capacity = group, ranks, experts, capacity

    def dispatch(
        self, module: nn.Module, tensors: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Assignment, torch.Size]]:
        """Hidden states [..., H], ids int[T, k], router weights [T, k] -> [R (C + 1), H] and [R (C
        + 1), k]: what all ranks sent here.
        """
        ids = next(x for x in tensors if not x.is_floating_point())
        assigned = assign_rows(ids, self.experts, self.ranks, self.capacity)
        if isinstance(self.capacity, int) or self.capacity < 1:
            module.dropped.add_(assigned.dropped.sum())  # type: ignore[operator]
        flat = (x.reshape(-1, x.shape[-1]) for x in tensors)
        sent = Linear.apply(
            _send, _return, self.group, self.ranks, assigned.token_of, assigned.slot_of, *flat
        )
        return sent, (assigned, tensors[0].shape)

    def combine(self, y: Tensor, kept: tuple[Assignment, torch.Size]) -> Tensor:
        """[R (C + 1), H] -> [..., H]"""
        assigned, shape = kept
        (sums,) = Linear.apply(
            _return, _send, self.group, self.ranks, assigned.slot_of, assigned.token_of, y
        )
        return restored(sums, shape[:-1])


def _send(x: Tensor, group: str, ranks: int, token_of: Tensor) -> Tensor:
    """[T, N] -> [R (C + 1), N], the rows that all ranks sent here: empty rows are zeros, and -1 for
    ids.
    """
    padded = F.pad(x, (0, 0, 0, 1), value=0 if x.is_floating_point() else -1)
    return all_to_all(padded.index_select(0, token_of), group, ranks)


def _return(y: Tensor, group: str, ranks: int, slot_of: Tensor) -> Tensor:
    """[R (C + 1), N] -> [T, N], the sums of each token's rows, added in the order of ranks."""
    return torch.ops.fusion_moe.combine(
        all_to_all(y, group, ranks), slot_of, y.new_ones(slot_of.shape)
    )
