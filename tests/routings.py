"""Strategies: how rows are partitioned into groups, which experts the slots of tokens chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

SIZES = (0, 1, 7, 15, 17, 127, 128, 129)  # of a group: tiles of 8, 16 and 128 rows, and one off
COUNTS = (63, 64, 65, 128, 256)  # of groups: a warp, a block, and one off


@dataclass(frozen=True)
class Partition:
    """ends i32[G], and how many rows there are: at least the last end."""

    sizes: tuple[int, ...]
    spare: int

    @property
    def ends(self) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.spare

    @property
    def runs(self) -> list[tuple[int, slice]]:
        """(group, its rows), empty groups too."""
        ends = [sum(self.sizes[: g + 1]) for g in range(len(self.sizes))]
        return [
            (g, slice(end - size, end))
            for g, (end, size) in enumerate(zip(ends, self.sizes, strict=True))
        ]


def _hot(count: int, group: int, rows: int) -> tuple[int, ...]:
    return tuple(rows if g == group % count else 0 for g in range(count))


def partitions(*, spare: bool = True) -> st.SearchStrategy[Partition]:
    """Partitions of rows: edges of tiles, empty groups, all rows in one, none at all, one group,
    many; `spare`: rows past the last end.
    """
    few = st.lists(st.sampled_from(SIZES) | st.integers(0, 40), min_size=1, max_size=6).map(tuple)
    hot = st.builds(_hot, st.integers(1, 6), st.integers(0, 5), st.sampled_from(SIZES))
    none = st.integers(1, 6).map(lambda count: (0,) * count)
    many = st.sampled_from(COUNTS).flatmap(
        lambda count: st.builds(lambda seed: _sparse(count, seed), st.integers(0, 99))
    )
    return st.builds(
        Partition, few | hot | none | many, st.sampled_from((0, 0, 1, 5)) if spare else st.just(0)
    )


def _sparse(count: int, seed: int) -> tuple[int, ...]:
    """Many groups, most of them empty or with one row."""
    return tuple(
        torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed))
        .sub(1)
        .clamp(0)
        .tolist()
    )


@dataclass(frozen=True)
class Routing:
    """ids i64[T, k]: the group that each slot of each token goes to, in 0..groups-1."""

    ids: Tensor
    groups: int


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Expert ids: no tokens, one token, all to one expert, a slot twice to one expert, one expert,
    many experts.
    """
    groups = draw(st.sampled_from((1, 2, 3, 8)) | st.sampled_from(COUNTS))
    tokens, slots = draw(st.sampled_from((0, 1, 2, 5, 17, 33))), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ids = torch.randint(0, groups, (tokens, slots), generator=generator)
    return Routing(
        torch.full_like(ids, groups - 1) if draw(st.integers(0, 4)) == 0 else ids, groups
    )
