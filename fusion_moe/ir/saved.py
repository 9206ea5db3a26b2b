"""What a forward pass saves for its backward: a minimum cut between what is stored or must be
computed and what the backward reads.

An edge of the graph is an operation that may be recomputed; a node is a value with the bytes that
saving it costs. Inputs and outputs are stored anyway and cost nothing. Values on the cut are saved;
values behind it are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from .core import Fusion, Op, Value
from .kinds.shape import elements
from .sizes import value
from .types import DTYPES

Again = Callable[[Op], bool]  # whether the backward may recompute an operation of the forward

_ELEMENTWISE = ("pointwise", "view", "shape", "gather", "grouped_add")
_INDICES = ("invert", "problem_ends")  # arithmetic on 4 bytes a row; `route` sorts
_TYPICAL = 4096  # assumed for sizes that are known only at launch, to compare bytes
_EACH = 64  # bytes that each tensor adds to the cost: one value is better than its two halves
_SOURCE, _SINK = "source", "sink"


def elementwise(op: Op) -> bool:
    """The policy save="values": an element of the result needs one of each input. So products, sums
    and sorts are never recomputed.
    """
    return op.kind.role in _ELEMENTWISE or op.kind.name in _INDICES


def everything(op: Op) -> bool:
    """The policy save="inputs": all of the forward is recomputed, only inputs are saved."""
    return True


POLICIES: Mapping[str, Again] = {"values": elementwise, "inputs": everything}


def saved(forward: Fusion, needed: Collection[Value], again: Again) -> tuple[Value, ...]:
    """The inputs and values of the forward, in order, from which the operations that `again` allows
    make everything that is needed.

    They take the fewest bytes; among equal choices, they are nearest to what is needed.
    """
    flow = _Flow()
    for v in forward.inputs:
        flow.add(_SOURCE, (v, "in"), inf)
        flow.add((v, "in"), (v, "out"), 0)
    for op in forward.ops:
        # whose parts are stored
        once = not again(op) and (all(map(_storable, op.outputs)) or op.kind.role == "quantize")
        for v in op.outputs:
            flow.add((v, "in"), (v, "out"), _cost(forward, op, v, again))
            for source in [_SOURCE] if once else [(operand, "out") for operand in op.values]:
                flow.add(source, (v, "in"), inf)
    for v in needed:
        flow.add((v, "out"), _SINK, inf)
    behind = flow.behind_cut()
    values = (*forward.inputs, *(v for op in forward.ops for v in op.outputs))
    return tuple(v for v in values if (v, "out") in behind and (v, "in") not in behind)


def made_again(
    ops: Sequence[Op], needed: Iterable[Value], kept: Collection[Value]
) -> tuple[Op, ...]:
    """The operations that make the needed values from the kept ones, in order."""
    missing, found = set(needed) - set(kept), []
    for op in reversed(ops):
        if not missing.isdisjoint(op.outputs):
            missing |= set(op.values) - set(kept)
            found.append(op)
    return tuple(reversed(found))


def _cost(forward: Fusion, op: Op, v: Value, again: Again) -> float:
    """The bytes that saving a value takes. A value that shares another value's memory is never
    saved: the other one is.
    """
    if again is everything or op.kind.view or op.kind.name == "reshape" or not _storable(v):
        return inf
    if v in forward.outputs:
        return 0
    count = value(elements(v.type.shape), dict.fromkeys(v.type.symbols(), _TYPICAL))
    return count * DTYPES[v.type.dtype].itemsize + _EACH


def _storable(v: Value) -> bool:
    """Whether a value is held by a single plain tensor."""
    return not v.type.quantized and v.type.layout == "linear"


class _Flow:
    """A flow network with its maximum flow, by shortest augmenting paths."""

    def __init__(self) -> None:
        # node -> remaining capacity of its edges, in both directions
        self._room: dict[Any, dict[Any, float]] = {_SOURCE: {}, _SINK: {}}

    def add(self, a: Any, b: Any, capacity: float) -> None:
        """An edge."""
        self._room.setdefault(a, {})[b] = capacity
        self._room.setdefault(b, {}).setdefault(a, 0)

    def behind_cut(self) -> set[Any]:
        """The nodes from which the sink can be reached at maximum flow: the smallest side of a
        minimum cut.
        """
        while path := self._path():
            fits = min(self._room[a][b] for a, b in path)
            for a, b in path:
                self._room[a][b] -= fits
                self._room[b][a] += fits
        return self._reaching()

    def _path(self) -> list[tuple[Any, Any]]:
        """The edges of a shortest path with remaining capacity from the source to the sink; none if
        there is no such path.
        """
        came: dict[Any, Any] = {_SOURCE: None}
        for node in (queue := [_SOURCE]):
            for b, room in self._room[node].items():
                if room > 0 and b not in came:
                    came[b] = node
                    queue.append(b)
        path, node = [], _SINK
        while came.get(node) is not None:
            path.append((came[node], node))
            node = came[node]
        return path

    def _reaching(self) -> set[Any]:
        found = {_SINK}
        for node in (queue := [_SINK]):
            for a in self._room[node]:  # edges are stored in both directions
                if a not in found and self._room[a][node] > 0:
                    found.add(a)
                    queue.append(a)
        return found
