"""Indices of elements as expressions, which print as C++ and are folded if numbers are known: `j`,
`(j + 768)`, `(j / 8)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from operator import add, floordiv, mod, mul
from typing import Any

from ...ir import AnySize, CeilDiv, Dim, Size, elements, exact_div, plain

# of numbers, and of indices
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"+": add, "*": mul, "/": floordiv, "%": mod}


class Index(ABC):
    """An integer expression. `str` is its C++; two are equal if they have the same structure.
    Dividends are never negative.
    """

    @property
    @abstractmethod
    def reads(self) -> frozenset[str]:
        """The variables that it depends on."""

    @abstractmethod
    def evaluate(self, variables: Mapping[str, int]) -> int:
        """Its value. KeyError for a variable without one, TypeError for a function that only a
        kernel can call.
        """

    def replaced(self, name: str, by: Index) -> Index:
        """The same with an index in place of a variable."""
        return self

    def __add__(self, other: Index) -> Index:
        if isinstance(self, Number) and isinstance(other, Number):
            return Number(self.value + other.value)
        if self == ZERO or other == ZERO:
            return other if self == ZERO else self
        return _put_together(self, other) or _shifted(self, other) or Operation("+", self, other)

    def __mul__(self, other: Index) -> Index:
        if isinstance(self, Number) and isinstance(other, Number):
            return Number(self.value * other.value)
        if self == ZERO or other == ZERO:
            return ZERO
        if self == ONE or other == ONE:
            return other if self == ONE else self
        return Operation("*", self, other)

    def __floordiv__(self, other: Index) -> Index:
        return self if self == ZERO or other == ONE else Operation("/", self, other)

    def __mod__(self, other: Index) -> Index:
        return ZERO if self == ZERO or other == ONE else Operation("%", self, other)


@dataclass(frozen=True)
class Number(Index):
    """A known number."""

    value: int

    def __str__(self) -> str:
        return str(self.value) if self.value >= 0 else f"({self.value})"

    @property
    def reads(self) -> frozenset[str]:
        """The variables that a number depends on: none."""
        return frozenset()

    def evaluate(self, variables: Mapping[str, int]) -> int:
        """The number itself."""
        return self.value


@dataclass(frozen=True)
class Variable(Index):
    """A C++ variable: that of a loop, or one defined before."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def reads(self) -> frozenset[str]:
        """The variable itself."""
        return frozenset([self.name])

    def evaluate(self, variables: Mapping[str, int]) -> int:
        """The variable's value in `variables`; KeyError without one."""
        return variables[self.name]

    def replaced(self, name: str, by: Index) -> Index:
        """`by` if this is the variable `name`, else the variable itself."""
        return by if self.name == name else self


@dataclass(frozen=True)
class Operation(Index):
    """Two indices and a C++ operator: one of + * / %."""

    operator: str
    left: Index
    right: Index

    def __str__(self) -> str:
        return f"({self.left} {self.operator} {self.right})"

    @property
    def reads(self) -> frozenset[str]:
        """The variables of both sides."""
        return self.left.reads | self.right.reads

    def evaluate(self, variables: Mapping[str, int]) -> int:
        """The operator's result for the values of both sides."""
        return _OPERATORS[self.operator](
            self.left.evaluate(variables), self.right.evaluate(variables)
        )

    def replaced(self, name: str, by: Index) -> Index:
        """The operation on both sides with `by` in place of the variable `name`, simplified."""
        left, right = self.left.replaced(name, by), self.right.replaced(name, by)
        return _OPERATORS[self.operator](left, right)


@dataclass(frozen=True)
class Call(Index):
    """A call of a function of the kernels."""

    function: str
    arguments: tuple[Index, ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"

    @property
    def reads(self) -> frozenset[str]:
        """The variables of all arguments."""
        return frozenset[str]().union(*(a.reads for a in self.arguments))

    def evaluate(self, variables: Mapping[str, int]) -> int:
        """Raises TypeError: only a kernel can call the function."""
        raise TypeError(f"{self} is known only to a kernel")

    def replaced(self, name: str, by: Index) -> Index:
        """The call with `by` in place of the variable `name` in its arguments."""
        return Call(self.function, tuple(a.replaced(name, by) for a in self.arguments))


ZERO: Index = Number(0)
ONE: Index = Number(1)


def _put_together(multiple: Index, rest: Index) -> Index | None:
    """x, from x / n * n and x % n."""
    match multiple, rest:
        case Operation("*", Operation("/", x, n), by), Operation("%", same, other) if (
            n == by == other and x == same
        ):
            return x
    return None


def _shifted(index: Index, by: Index) -> Index | None:
    """x + (a + b), from (x + a) + b."""
    match index, by:
        case Operation("+", x, Number(a)), Number(b):
            return x + Number(a + b)
    return None


def size(n: AnySize | Dim) -> Index:
    """A size: symbols are variables called n_<name>."""
    n = plain(n)
    if not isinstance(n, Size):
        return Number(n)
    total = ZERO
    for atoms, coefficient in n.terms:
        term: Index = Number(coefficient)
        for atom in atoms:
            if isinstance(atom, CeilDiv):
                term = term * ((size(atom.of) + Number(atom.by - 1)) // Number(atom.by))
            else:
                term = term * Variable(f"n_{atom}")
        total = total + term
    return total


def flat(indices: Sequence[Index], shape: Sequence[Dim]) -> Index:
    """The position of an element in a contiguous tensor."""
    at = ZERO
    for i, d in zip(indices, shape, strict=True):
        at = at * size(d) + (ZERO if plain(d) == 1 else i)
    return at


def unflat(at: Index, shape: Sequence[Dim]) -> list[Index]:
    """The indices of the element at a position: the inverse of `flat`."""
    results: list[Index] = []
    for i, d in reversed(list(enumerate(shape))):
        if plain(d) == 1:
            results.append(ZERO)
        elif i == 0 or elements(shape[:i]) == 1:
            results.append(at)
        else:
            results.append(at % size(d))
            at = at // size(d)
    return results[::-1]


def reshaped(indices: Sequence[Index], new: Sequence[Dim], old: Sequence[Dim]) -> list[Index]:
    """The indices in shape `old` of the element at `indices` in shape `new`, with as many elements:
    matching dimensions stay separate.
    """
    results: list[Index] = []
    for a, b in _matching(new, old):
        one_each = len(new[a]) == len(old[b]) == 1
        results += indices[a] if one_each else unflat(flat(indices[a], new[a]), old[b])
    return results


def bounds(index: Index, below: int) -> tuple[int, int] | None:
    """A least and a largest value of an index whose only variable counts from 0 up to below a
    number. None: not known.
    """
    match index:
        case Number(n):
            return n, n
        case Variable():
            return 0, below - 1
        case Operation("+", a, b) if (x := bounds(a, below)) and (y := bounds(b, below)):
            return x[0] + y[0], x[1] + y[1]
        case Operation("%", a, Number(n)) if (x := bounds(a, below)) and x[0] // n != x[1] // n:
            return 0, n - 1
        case Operation(operator, a, Number(n)) if x := bounds(a, below):
            ends = [_OPERATORS[operator](end, n) for end in x]
            return min(ends), max(ends)
    return None


def progression(index: Index, count: int) -> tuple[int, int] | None:
    """How an index of one variable j grows while j goes through `count` numbers from one of their
    multiples on: (step, factor), if it begins at a multiple of `factor` and each further j adds
    `step`, which is not negative. None: not known.
    """
    match index:
        case Number(n):
            return 0, n
        case Variable():
            return 1, count
        case Operation("+", a, b) if (x := progression(a, count)) and (y := progression(b, count)):
            return x[0] + y[0], gcd(x[1], y[1])
        case Operation("*", a, Number(n)) if (x := progression(a, count)) and x[0] * n >= 0:
            return x[0] * n, x[1] * n
        case Operation("/" | "%" as operator, a, Number(n)) if x := progression(a, count):
            (step, factor), length = x, max(1, x[0] * count)
            if factor % length == n % length == 0:  # no run goes past a multiple of n
                if operator == "%":
                    return step, gcd(factor, n)
                return 0, 1 if factor % n else factor // n
    return None


def follow(index: Index, count: int, aligned: int) -> bool:
    """Whether a vector of `count` elements can be read or written at once: whether the columns
    index(j) are runs of `count` adjacent numbers that begin at multiples of `aligned`.
    """
    step, factor = progression(index, count) or (0, 1)
    return step == 1 and factor % aligned == 0


def is_index(i: Index, own: Index, size: Dim) -> bool:
    """Whether an index walks along a dimension of this size as the loop's own index does: it is
    `own`, or 0 where the size is 1.
    """
    return i == own or (i == ZERO and plain(size) == 1)


def _matching(new: Sequence[Dim], old: Sequence[Dim]) -> list[tuple[slice, slice]]:
    """Runs of dimensions with equal products, as short as possible."""
    runs, i, j = [], 0, 0
    while i < len(new) or j < len(old):
        first_i, first_j = i, j
        i, j = min(i + 1, len(new)), min(j + 1, len(old))
        while elements(new[first_i:i]) != elements(old[first_j:j]) and (
            i < len(new) or j < len(old)
        ):
            shorter = exact_div(elements(old[first_j:j]), elements(new[first_i:i])) is not None
            if (shorter and i < len(new)) or j == len(old):
                i += 1
            else:
                j += 1
        runs.append((slice(first_i, i), slice(first_j, j)))
    return runs
