"""The operations of a Fusion in pieces, which grow along their edges while some scheduler accepts
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from .. import schedule
from ..ir import DTYPES, FLOATS, Fusion, Op, Value, dependent, made_again
from ..target import Target
from .product import some_may_be_added


class Pieces:
    """The operations of a Fusion in disjoint pieces. Views, and group ends in nvFuser's form, that
    are not outputs belong to no piece: every piece that reads one has a copy.

    apart: pairs of operations that no piece may contain together, each with the reason; an
    operation paired with itself is a piece by itself.
    """

    def __init__(self, fusion: Fusion, target: Target, apart: Mapping[frozenset[Op], str]):
        self.fusion, self.target, self.apart = fusion, target, apart
        self.place = {op: i for i, op in enumerate(fusion.ops)}
        self.ops = [
            op
            for op in fusion.ops
            if not _copied(op) or any(v in fusion.outputs for v in op.outputs)
        ]
        self.copied = [op for op in fusion.ops if _copied(op)]
        # each value, and what copied operations make of it
        self.seen_as = {v: dependent(self.copied, [v]) for v in fusion.values}
        self.piece = {op: frozenset([op]) for op in self.ops}

    def grow(self) -> None:
        """Joins what must be one kernel, then pieces along edges until no scheduler accepts a
        larger one.
        """
        for op in self.ops:
            if op.kind.role == "collective":
                self._join_sums(op)
            if op.kind.role in self.target.unshared_roles and len(self.piece[op]) == 1:
                self._join_required(op)
        edges = [(source, op) for op in self.ops for source in self._sources(op)]
        beside = [  # copies of one value, which is read once
            (a, b)
            for a, b in combinations(self.ops, 2)
            if a.kind.role == b.kind.role == "quantize" and a.values[0] is b.values[0]
        ]
        two = some_may_be_added(self.fusion, self.target.added_features)
        for some in (self._first(edges), edges) if two else (edges,):
            joined = True
            while joined:
                joined = False
                for a, b in (*some, *beside):
                    joined = self._join(self.piece[a] | self.piece[b]) or joined
        for op in reversed(self.ops):
            self._widen_later(op)

    def _widen_later(self, op: Op) -> None:
        """Moves a cast to a wider dtype into the piece that reads it, if that is the only one: less
        is stored between them.
        """
        own, readers = self.piece[op], {self.piece[r] for r in self._readers(op)}
        if not _widens(op) or len(own) == 1 or op.outputs[0] in self.fusion.outputs:
            return
        if len(readers) == 1 and own not in readers:
            before, (after,) = own - {op}, readers
            if self._accepted(before) and self._accepted(after | {op}):
                self.piece.update(dict.fromkeys(before, before))
                self.piece.update(dict.fromkeys(after | {op}, after | {op}))

    def _first(self, edges: Sequence[tuple[Op, Op]]) -> list[tuple[Op, Op]]:
        """The edges after products, then the edges from rows that a product gathers.

        Otherwise, of two products that could be one kernel, one would take what comes before both,
        and the other would wait for it.
        """
        result = dependent(
            self.fusion.ops, [v for op in self.ops if op.kind.role == "grouped" for v in op.outputs]
        )
        after = [(source, op) for source, op in edges if not result.isdisjoint(source.outputs)]
        return after + [
            (source, op)
            for source, op in edges
            if (source.kind.role, op.kind.role) == ("gather", "grouped")
        ]

    def topological(self) -> list[frozenset[Op]]:
        """The pieces, each after those that it reads from, otherwise first what other ranks wait
        for, in the order of their first operations in the fusion.
        """
        sent = self._needed(self.piece[op] for op in self.ops if op.kind.role == "collective")
        pending = sorted(
            dict.fromkeys(self.piece[op] for op in self.ops), key=lambda p: p not in sent
        )
        order = []
        while pending:
            ready = next(
                p
                for p in pending
                if not any(q is not p and q in pending for q in self._producing(p))
            )
            order.append(ready)
            pending.remove(ready)
        return order

    def _needed(self, pieces: Iterable[frozenset[Op]]) -> set[frozenset[Op]]:
        """These pieces and all that they need."""
        over, results = list(pieces), set[frozenset[Op]]()
        while over:
            piece = over.pop()
            over += [] if piece in results else self._producing(piece)
            results.add(piece)
        return results

    def boundary(self, ops: frozenset[Op]) -> str:
        """Why a piece was not joined with those that it reads from."""
        direct = [source for source in self._producing(ops) if not self._creates_cycle(source, ops)]
        return "; ".join(dict.fromkeys(self._refusal(source | ops) for source in direct))

    def _join(self, whole: frozenset[Op]) -> bool:
        """Joins operations if a scheduler accepts the piece; returns whether it is new."""
        before = {op: self.piece[op] for op in whole}
        self.piece.update(dict.fromkeys(whole, whole))
        fits = (
            whole not in before.values()
            and not self._kept_apart(whole)
            and not self._creates_cycle(whole, whole)
            and self._accepted(whole)
        )
        if not fits:
            self.piece.update(before)
        return fits

    def _join_required(self, op: Op) -> None:
        """Joins an operation whose result must stay in its kernel with all that read it, if a
        scheduler accepts the piece.
        """
        joined = [op]
        for one in joined:
            unshared = [
                o for o in (one, *self._sources(one)) if o.kind.role in self.target.unshared_roles
            ]
            joined += [
                o
                for o in dict.fromkeys(
                    (*unshared, *(r for u in unshared for r in self._readers(u)))
                )
                if o not in joined
            ]
        self._join(frozenset(joined))

    def _join_sums(self, op: Op) -> None:
        """Joins an operation that sends sums with what makes them."""
        chain, source = [op], self.fusion.producer(op.values[0])
        while source and (source.kind.view or source.kind.role in ("pointwise", "combine")):
            chain += [] if source.kind.view else [source]
            if source.kind.role == "combine":
                self._join(frozenset(chain))
                return
            source = self.fusion.producer(source.values[0])

    def _accepted(self, ops: frozenset[Op]) -> bool:
        return schedule.find(self.part(ops), self.target, self.fusion.outputs) is not None

    def _kept_apart(self, ops: frozenset[Op]) -> str:
        """Why operations may not be one piece, by what a backend said; "" if nothing keeps them
        apart.
        """
        return next((why for pair, why in self.apart.items() if pair <= ops and len(ops) > 1), "")

    def _refusal(self, both: frozenset[Op]) -> str:
        """Why two pieces, with nothing between them, are not joined."""
        whole = self.part(both)
        return schedule.closest(whole, self.target).can_schedule(
            whole, self.target, self.fusion.outputs
        ) or self._kept_apart(both)

    def _creates_cycle(self, a: frozenset[Op], b: frozenset[Op]) -> bool:
        """Whether a path leads from a through other pieces to b: joined, they would form a
        cycle.
        """
        return a in self._needed(p for p in self._producing(b) if p is not a)

    def _producing(self, ops: Iterable[Op]) -> list[frozenset[Op]]:
        """The other pieces that a piece reads from."""
        members = frozenset(ops)
        fromkeys = dict.fromkeys(
            self.piece[s]
            for op in sorted(members, key=self.place.__getitem__)
            for s in self._sources(op)
        )
        return [p for p in fromkeys if p != members]

    def _sources(self, op: Op) -> list[Op]:
        """The operations, copied ones looked through, that an operation reads from."""
        results: list[Op] = []
        for v in op.values:
            source = self.fusion.producer(v)
            if source is not None:
                results += self._sources(source) if _copied(source) else [source]
        return list(dict.fromkeys(results))

    def _readers(self, op: Op) -> list[Op]:
        """The operations, copied ones looked through, that read from an operation."""
        seen = (s for v in op.outputs for s in self.seen_as[v])
        readers = (r for s in seen for r in self.fusion.readers.get(s, ()) if r in self.piece)
        return sorted(set(readers), key=self.place.__getitem__)

    def part(self, ops: Iterable[Op]) -> Fusion:
        """These operations and the copied ones that they read, as a Fusion whose inputs are the
        values read from outside. It writes over none.
        """
        own = set(ops)
        members = {*own, *made_again(self.copied, [v for op in own for v in op.values])}
        ordered = sorted(members, key=self.place.__getitem__)
        results = {v for op in ordered for v in op.outputs}
        inputs = tuple(dict.fromkeys(v for op in ordered for v in op.values if v not in results))
        outputs = tuple(
            v for op in ordered if op in own for v in op.outputs if self._read_outside(v, members)
        )
        roles = {v: self.fusion.role(v) for v in inputs}
        return Fusion(inputs, tuple(ordered), outputs, roles)

    def _read_outside(self, v: Value, members: set[Op]) -> bool:
        """Whether a value, or a copied view of it, is an output or read by an operation outside."""
        seen = self.seen_as[v]
        return not seen.isdisjoint(self.fusion.outputs) or any(
            r not in members and not _copied(r)
            for s in seen
            for r in self.fusion.readers.get(s, ())
        )


def _copied(op: Op) -> bool:
    """Whether an operation takes less than to read what another kernel has made."""
    return op.kind.view or op.kind.name == "problem_ends"


def _widens(op: Op) -> bool:
    """Whether an operation is a cast of floats to a wider dtype."""
    if op.kind.name != "cast":
        return False
    dtypes = [v.type.dtype for v in (*op.values, *op.outputs)]
    narrow, wide = (DTYPES[dtype].itemsize for dtype in dtypes)
    return set(dtypes) <= {*FLOATS} and narrow < wide
