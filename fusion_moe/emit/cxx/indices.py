"""Indices of elements as C++ text, folded where numbers are known: `j`, `j + 768`, `j / 8 * 16 + j % 8`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.kinds.shape import elements
from ...ir.sizes import AnySize, CeilDiv, Size, exact_div
from ...ir.types import Dim, plain


@dataclass(frozen=True)
class Index:
    """An integer expression. number: if it is one; made: the operator and operands of a product, a quotient or a remainder."""

    text: str
    number: int | None = None
    made: tuple[str, Index, Index] | None = None

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Index) -> Index:
        if self.number is not None and other.number is not None:
            return number(self.number + other.number)
        if self.number == 0 or other.number == 0:
            return other if self.number == 0 else self
        return self._put_together(other) or Index(f"({self} + {other})")

    def __mul__(self, other: Index) -> Index:
        if self.number is not None and other.number is not None:
            return number(self.number * other.number)
        if 0 in (self.number, other.number):
            return number(0)
        if 1 in (self.number, other.number):
            return other if self.number == 1 else self
        return Index(f"({self} * {other})", made=("*", self, other))

    def __floordiv__(self, other: Index) -> Index:
        if self.number == 0 or other.number == 1:
            return self
        return Index(f"({self} / {other})", made=("/", self, other))

    def __mod__(self, other: Index) -> Index:
        if self.number == 0 or other.number == 1:
            return number(0)
        return Index(f"({self} % {other})", made=("%", self, other))

    def _put_together(self, rest: Index) -> Index | None:
        """x, where this is x / n * n and the rest is x % n."""
        if self.made and rest.made and (self.made[0], rest.made[0]) == ("*", "%"):
            quotient, n = self.made[1:]
            if quotient.made and quotient.made[0] == "/" and quotient.made[1:] == rest.made[1:] and n == rest.made[2]:
                return rest.made[1]
        return None


def number(n: int) -> Index:
    """A number that is known."""
    return Index(str(n) if n >= 0 else f"({n})", n)


def size(n: AnySize | Dim) -> Index:
    """A size: symbols are variables called n_<name>."""
    n = plain(n)
    if not isinstance(n, Size):
        return number(n)
    total = number(0)
    for atoms, coefficient in n.terms:
        term = number(coefficient)
        for atom in atoms:
            term = term * (_ceiling(atom) if isinstance(atom, CeilDiv) else Index(f"n_{atom}"))
        total = total + term
    return total


def _ceiling(atom: CeilDiv) -> Index:
    return (size(atom.of) + number(atom.by - 1)) // number(atom.by)


def flat(indices: Sequence[Index], shape: Sequence[Dim]) -> Index:
    """The place of an element of a contiguous tensor."""
    at = number(0)
    for i, d in zip(indices, shape, strict=True):
        at = at * size(d) + (number(0) if plain(d) == 1 else i)
    return at


def unflat(at: Index, shape: Sequence[Dim]) -> list[Index]:
    """The indices of the element at a place: the inverse of `flat`."""
    found: list[Index] = []
    for i, d in reversed(list(enumerate(shape))):
        if plain(d) == 1:
            found.append(number(0))
        elif i == 0 or elements(shape[:i]) == 1:
            found.append(at)
        else:
            found.append(at % size(d))
            at = at // size(d)
    return found[::-1]


def reshaped(indices: Sequence[Index], new: Sequence[Dim], old: Sequence[Dim]) -> list[Index]:
    """The indices in the shape `old` of the element at `indices` of the shape `new`, as many elements: dimensions that match stay apart."""
    found: list[Index] = []
    for a, b in _matching(new, old):
        one_each = len(new[a]) == len(old[b]) == 1
        found += indices[a] if one_each else unflat(flat(indices[a], new[a]), old[b])
    return found


def is_index(i: Index, own: Index, size: Dim) -> bool:
    """Whether i is the index of a dimension: `own`, or 0 where there is no other."""
    return str(i) == str(own) or (i.number == 0 and plain(size) == 1)


def _matching(new: Sequence[Dim], old: Sequence[Dim]) -> list[tuple[slice, slice]]:
    """Runs of dimensions of equal products, as short as they can be."""
    runs, i, j = [], 0, 0
    while i < len(new) or j < len(old):
        first_i, first_j = i, j
        i, j = min(i + 1, len(new)), min(j + 1, len(old))
        while elements(new[first_i:i]) != elements(old[first_j:j]) and (i < len(new) or j < len(old)):
            shorter = _divides(elements(new[first_i:i]), elements(old[first_j:j]))
            if (shorter and i < len(new)) or j == len(old):
                i += 1
            else:
                j += 1
        runs.append((slice(first_i, i), slice(first_j, j)))
    return runs


def _divides(a: AnySize, b: AnySize) -> bool:
    return exact_div(b, a) is not None
