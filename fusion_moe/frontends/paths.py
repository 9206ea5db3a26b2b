"""Order of nodes in a graph, as bit masks over their positions: paths are looked up instead of
searched.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from torch.fx import Node


@dataclass(frozen=True)
class Span:
    """Nodes, and all nodes before and after them, as bit masks over positions in a graph."""

    inside: int = 0
    before: int = 0
    after: int = 0

    def __or__(self, other: Span) -> Span:
        return Span(
            self.inside | other.inside, self.before | other.before, self.after | other.after
        )

    @property
    def convex(self) -> bool:
        """Whether no path leads out of the nodes and back in."""
        return not self.before & self.after & ~self.inside

    def follows(self, place: int) -> bool:
        """Whether the node at `place` is outside and comes before one of the nodes."""
        return bool((self.before & ~self.inside) >> place & 1)


class Paths:
    """The nodes before and after each node: looked up instead of searched."""

    def __init__(self, nodes: Sequence[Node], place: Mapping[Node, int]):
        self.nodes, self.place = nodes, place
        self.before = self._reach(nodes, lambda n: n.all_input_nodes)
        self.after = self._reach(list(reversed(nodes)), lambda n: n.users)

    def span(self, nodes: Iterable[Node]) -> Span:
        """The span of a set of nodes: these, and all that are before and after any of them."""
        return reduce(
            operator.or_,
            (Span(1 << self.place[n], self.before[n], self.after[n]) for n in nodes),
            Span(),
        )

    def contract(self, nodes: Sequence[Node]) -> None:
        """Treats the nodes as one from now on: what comes before one comes before all. Otherwise
        two regions could wait for each other.
        """
        one = self.span(nodes)
        for n, i in self.place.items():
            if (one.inside | one.before) >> i & 1:
                self.after[n] |= one.inside | one.after
            if (one.inside | one.after) >> i & 1:
                self.before[n] |= one.inside | one.before

    def _reach(
        self, order: Sequence[Node], next_to: Callable[[Node], Iterable[Node]]
    ) -> dict[Node, int]:
        reach: dict[Node, int] = {}
        for n in order:
            reach[n] = reduce(operator.or_, (reach[m] | 1 << self.place[m] for m in next_to(n)), 0)
        return reach
