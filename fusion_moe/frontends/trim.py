"""Gives calls that gain nothing from being in a region back to the graph's own compiler, from the
boundary inwards.

- Views at the boundary: they cost nothing there.
- At the end of the region, operations that make it write more than without them: a cast to a wider
  type, or a power, of a value that is read outside anyway.
- torch's own operations in segments without a grouped product. The compiler could only call other
  operations: inside they cost no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch.fx import Node

from ..definitions.nodes import call_of, is_call, is_torchs, is_view, tensors, with_parts
from ..definitions.walk import Walk
from ..schedule.segment import Segment


def trim(
    walk: Walk, segments: Sequence[Segment], convex: Callable[[Iterable[Node]], bool]
) -> tuple[list[Node], dict[Node, str]]:
    """The nodes of a walk that stay, in order, and the reason for each node that goes."""
    kept, why = dict.fromkeys(walk.nodes), {}
    alone = [s for s in segments if not any(op.kind.role == "grouped" for op in s.fusion.ops)]
    before = None
    while before != len(kept):
        before = len(kept)
        for n in _boundary_views(kept):
            kept.pop(n)
        for n in list(_boundary_writers(kept)):
            kept.pop(n)
            why[n] = "left to the graph's compiler: fusing it would write more memory"
        for segment in alone:
            gone = _only_in(segment, kept, walk)
            if gone and convex(n for n in kept if n not in gone):
                reason = (
                    "no grouped product to fuse with "
                    f"({segment.boundary or 'it comes before or after them'})"
                )
                why.update((n, f"left to the graph's compiler: {reason}") for n in gone)
                kept = {n: None for n in kept if n not in gone}
    return list(kept), why


def _only_in(segment: Segment, kept: Iterable[Node], walk: Walk) -> set[Node]:
    """The calls of torch's whose operations are all in one segment."""
    ops = set(segment.fusion.ops)
    calls = (
        n
        for n in kept
        if (result := walk.made[n]) and ops.issuperset(result) and is_torchs(call_of(n))
    )
    return {part for n in calls for part in with_parts(n)}


def _boundary_views(region: Collection[Node]) -> list[Node]:
    """Views that read only from outside a region or are read only outside."""
    results = []
    for n in region:
        if is_call(n) and is_view(n):
            parts = with_parts(n)
            readers = [u for part in parts for u in part.users if u not in parts]
            if not any(m in region for m in n.all_input_nodes) or not any(
                u in region for u in readers
            ):
                results += parts
    return results


def _boundary_writers(region: Collection[Node]) -> Iterator[Node]:
    """torch's calls that are read only outside a region and without which it would write less."""
    for n in region:
        if (
            is_call(n)
            and is_torchs(n)
            and with_parts(n) == [n]
            and not any(u in region for u in n.users)
        ):
            inside = [m for m in n.all_input_nodes if m in region]
            new = [m for m in inside if not any(u not in region for u in m.users)]
            if inside and (not new or (len(new) == 1 and _wider(n, new[0]))):
                yield n


def _wider(n: Node, m: Node) -> bool:
    """Whether one result has the shape of another in a wider dtype. Sizes are compared as
    expressions, which adds no guards.
    """
    (a,), (b,) = tensors(n.meta["val"]), tensors(m.meta["val"])
    return (
        list(map(str, a.shape)) == list(map(str, b.shape)) and a.element_size() > b.element_size()
    )
