"""The turns of a step that is too long to be decided about on the GPU: experts that are not there
are copied in turns, while what is there by then is multiplied by.

All on the host: it knows how many rows each expert has. A turn has the rows of its experts alone,
so that more turns do not cost more; the rows of experts that were there before are spread over all
turns but the last, so that the link never waits for products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Programs are prepared for each size of a turn, so there are few: multiples of such a part of the
# next power of two, and of at least so many rows
_STEPS, _LEAST = 16, 32


@dataclass(frozen=True)
class Turn:
    """copied: experts; first, rows: of ids that are sorted by turns."""

    copied: list[int]
    first: int
    rows: int

    @property
    def size(self) -> int:
        """How many rows are computed for this part of a long step: its own, rounded up."""
        each = max(_LEAST, (1 << self.rows.bit_length()) // _STEPS)
        return -(-self.rows // each) * each


def missed_of(named: Tensor, expert_map: Tensor) -> Tensor:
    """The experts that are named and not there."""
    return ((named > 0) & (expert_map < 0)).nonzero().flatten()


def turns_of(named: Tensor, expert_map: Tensor, each: int, first: int) -> tuple[list[Turn], Tensor]:
    """Divides a long step into turns, in each of which some experts are copied while others are
    multiplied by.

    named i64[E]: rows of each expert; expert_map i64[E]: its cache slot, or -1; each: how many
    experts a turn copies, into cache slots from `first` on. Returns the turns, the first of which
    copies none, and i64[2, E + 1]: the turn and the cache slot of each expert, and in the last
    column of rows without an expert, which come after all turns and have slot -1.
    """
    missed = missed_of(named, expert_map)
    copies = [[], *(part.tolist() for part in missed.split(each) if len(part))]
    count, e = len(copies), len(named)
    table = torch.full((2, e + 1), -1, dtype=torch.int64)
    table[1, :e] = expert_map
    table[0, e] = count
    there = torch.where(expert_map < 0, 0, named)
    before, shares = there.cumsum(0) - there, max(1, count - 1)
    table[0, :e] = (before * shares // max(1, int(there.sum()))).clamp(max=shares - 1)
    table[0, missed] = torch.arange(len(missed)) // each + 1
    table[1, missed] = torch.arange(len(missed)) % each + first
    rows = torch.zeros(count, dtype=torch.int64).index_add_(0, table[0, :e], named)
    ends = rows.cumsum(0)
    return [
        Turn(copied, end - n, n)
        for copied, end, n in zip(copies, ends.tolist(), rows.tolist(), strict=True)
    ], table
