"""Which experts lie on the device: the most often used ones. Old uses count less and less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_LIFE = 2  # uses of an expert, on average, after which one counts half
_GAIN = 1.25  # how much more often a newcomer is used than the one it replaces
_PLUS = 1.0


@dataclass(frozen=True)
class Move:
    """An expert that is copied into a slot that no table in use names, in place of another one."""

    expert: int
    slot: int
    evicts: int


class Cache:
    """The experts in slots, least frequently used with ageing. A pure function of the counts that
    it was given, so runs repeat.

    slots: how many there are on the device for it. turning of them hold no expert: a move fills
    one, and what the move evicts leaves one when the new table is in use.
    """

    def __init__(self, experts: int, slots: int, turning: int = 1, half_life: float = HALF_LIFE):
        kept = max(0, min(experts, slots - turning)) if slots < experts else experts
        self.expert_map = torch.full((experts,), -1, dtype=torch.int32, device="cpu")
        self.expert_map[:kept] = torch.arange(kept, dtype=torch.int32, device="cpu")
        self.free = list(range(kept, slots))
        self.scores = torch.zeros(experts, dtype=torch.float64, device="cpu")
        self._half_life = half_life * experts

    def learn(self, uses: Tensor | Sequence[int]) -> list[Move]:
        """What to copy after so many slots named each expert. The moves are carried out together:
        `expert_map` has them from now on, and what was evicted is overwritten from the next call
        on.
        """
        uses = torch.as_tensor(uses, dtype=torch.float64, device="cpu")
        self.scores = self.scores * 0.5 ** (float(uses.sum()) / self._half_life) + uses
        here = self.expert_map >= 0
        scores = self.scores.tolist()
        inside, outside = (mask.nonzero().flatten().tolist() for mask in (here, ~here))
        worst = sorted(inside, key=lambda e: (scores[e], -e))
        best = sorted(outside, key=lambda e: (-scores[e], e))
        moves = [
            Move(newcomer, slot, old)
            for newcomer, old, slot in zip(best, worst, self.free, strict=False)
            if scores[newcomer] > _GAIN * scores[old] + _PLUS
        ]
        for move in moves:
            self.free.remove(move.slot)
            self.free.append(int(self.expert_map[move.evicts]))
            self.expert_map[move.expert], self.expert_map[move.evicts] = move.slot, -1
        return moves
