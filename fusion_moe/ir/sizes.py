"""Sizes that the host knows at launch but not while compiling: integer polynomials of symbols, and
their ceilings.

    >>> t = symbol("t")
    >>> 4 * t + t, ceildiv(4 * t, 128), (t + 2) - t
    (5*t, ceildiv(4*t, 128), 2)

A `Size` is kept in one canonical form, so that equal sizes compare equal: `2 * (t + 1) == t + t +
2`. A constant is an int.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

from ..errors import ShapeError

_MOST_TERMS = 64  # terms of a size; each makes adding and multiplying slower


@dataclass(frozen=True)
class CeilDiv:
    """The size of / by, rounded up."""

    of: Size
    by: int

    def __str__(self) -> str:
        return f"ceildiv({self.of}, {self.by})"


Atom = str | CeilDiv  # a symbol's name, or a ceiling
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Size:
    """A sum of products of symbols: ((atoms, coefficient), ...), sorted, no coefficient zero, not a
    constant.
    """

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: int | Size) -> int | Size:
        if not isinstance(other, (int, Size)):
            return NotImplemented
        return _make([*self.terms, *_terms(other)])

    __radd__ = __add__

    def __mul__(self, other: int | Size) -> int | Size:
        if not isinstance(other, (int, Size)):
            return NotImplemented
        if len(self.terms) * len(_terms(other)) > _MOST_TERMS:
            raise _too_large(len(self.terms) * len(_terms(other)))
        return _make([((*a, *b), ca * cb) for a, ca in self.terms for b, cb in _terms(other)])

    __rmul__ = __mul__

    def __sub__(self, other: int | Size) -> int | Size:
        return self + other * -1

    def __rsub__(self, other: int | Size) -> int | Size:
        return other + self * -1

    def __str__(self) -> str:
        return " + ".join(
            "*".join([str(c)] * (c != 1 or not atoms) + [str(a) for a in atoms])
            for atoms, c in self.terms
        )

    __repr__ = __str__

    def symbols(self) -> Iterator[str]:
        """The names of its symbols, in order, possibly repeated."""
        for atoms, _ in self.terms:
            for atom in atoms:
                yield from [atom] if isinstance(atom, str) else atom.of.symbols()

    def ceilings(self) -> Iterator[Size]:
        """The sizes inside its ceilings, and inside the ceilings of these."""
        for atoms, _ in self.terms:
            for atom in atoms:
                if isinstance(atom, CeilDiv):
                    yield atom.of
                    yield from atom.of.ceilings()

    def value(self, env: Mapping[str, Any]) -> Any:
        """The size with every symbol replaced by its value in `env`: an int, a torch.SymInt or
        another size.
        """
        return sum(
            (reduce(mul, (_atom_value(a, env) for a in atoms), c) for atoms, c in self.terms), 0
        )


AnySize = int | Size


def is_size(size: Any) -> bool:
    """Whether a value is an int or a Size whose numbers all fit in 64 bits."""
    if isinstance(size, Size):
        return all(map(is_size, (*size.ceilings(), *(c for _, c in size.terms))))
    return isinstance(size, int) and not isinstance(size, bool) and -(2**63) <= size < 2**63


def symbol(name: str) -> Size:
    """The size that a symbol called `name` stands for."""
    return Size((((name,), 1),))


def ceildiv(size: AnySize, by: int) -> AnySize:
    """size / by, rounded up; by: a positive number."""
    if not isinstance(by, int) or by < 1:
        raise ShapeError(f"ceildiv({size}, {by})", expected="a number above 0 to divide by")
    if isinstance(size, int):
        return -(-size // by)
    exact = exact_div(size, by)
    return Size((((CeilDiv(size, by),), 1),)) if exact is None else exact


def exact_div(size: AnySize, by: AnySize) -> AnySize | None:
    """The size q with q * by == size, or None if the polynomials do not show one."""
    if isinstance(size, int) and isinstance(by, int):
        return size // by if by and size % by == 0 else None
    divisor = _terms(by)
    if not divisor:
        return None
    (atoms, coefficient), quotient = divisor[0], []
    if len(divisor) > 1:  # a quotient of one term
        parts = [(_without(term, atoms), c) for term, c in _terms(size) if c % coefficient == 0]
        terms = [_make([(left, c // coefficient)]) for left, c in parts if left is not None]
        return next((q for q in terms if q * by == size), None)
    for term, c in _terms(size):
        left = _without(term, atoms)
        if left is None or c % coefficient:
            return None
        quotient.append((left, c // coefficient))
    return _make(quotient)


def never_negative(size: AnySize) -> bool | None:
    """Whether a size is 0 or more for all values of its symbols, which are 0 or more; None if it
    depends on them.
    """
    if isinstance(size, int):
        return size >= 0
    if all(
        c > 0 and all(isinstance(a, str) or never_negative(a.of) for a in atoms)
        for atoms, c in size.terms
    ):
        return True
    refuted = (
        all(c < 0 and all(isinstance(a, str) for a in atoms) for atoms, c in size.terms)
        and not size.terms[-1][0]
    )
    return False if refuted else None


def value(size: AnySize, env: Mapping[str, Any]) -> Any:
    """`size` as a number, with the symbols' values from `env`."""
    return size.value(env) if isinstance(size, Size) else size


def _terms(size: AnySize) -> tuple[tuple[Monomial, int], ...]:
    return size.terms if isinstance(size, Size) else ((((), size),) if size else ())


def _make(terms: list[tuple[Monomial, int]]) -> AnySize:
    total: dict[Monomial, int] = {}
    for atoms, c in terms:
        key = tuple(sorted(atoms, key=str))
        total[key] = total.get(key, 0) + c
    if len(total) > _MOST_TERMS:
        raise _too_large(len(total))
    kept = sorted(
        ((a, c) for a, c in total.items() if c), key=lambda t: (not t[0], -len(t[0]), str(t[0]))
    )
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    return Size(tuple(kept))


def _too_large(terms: int) -> ShapeError:
    return ShapeError(
        f"a size of {terms} terms",
        expected=f"at most {_MOST_TERMS}, which is more than shapes have",
    )


def _without(term: Monomial, atoms: Monomial) -> Monomial | None:
    left = list(term)
    for atom in atoms:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _atom_value(atom: Atom, env: Mapping[str, Any]) -> Any:
    if isinstance(atom, str):
        return env[atom]
    of = value(atom.of, env)
    return ceildiv(of, atom.by) if isinstance(of, Size) else -(-of // atom.by)
