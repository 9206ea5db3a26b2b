"""C++ statements that know which variables they read, so that loop-invariant ones can be moved out
of loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .indices import Index


@dataclass(frozen=True)
class Expression:
    """A C++ expression as text, and the variables that it reads."""

    text: str
    reads: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.text


def formula(template: str, *operands: Index | Expression | str) -> Expression:
    """A template with operands in place of `{}`. Text operands name things that never change:
    arrays, numbers.
    """
    reads = (o.reads for o in operands if not isinstance(o, str))
    return Expression(template.format(*operands), frozenset[str]().union(*reads))


@dataclass(frozen=True)
class Definition:
    """A constant of a C++ type."""

    type: str
    name: str
    value: Expression

    def lines(self) -> list[str]:
        """The C++ of the definition."""
        return [f"const {self.type} {self.name} = {self.value};"]


@dataclass(frozen=True)
class Case:
    """A branch of a Choice, taken if its condition holds: statements and a value."""

    condition: Expression
    body: tuple[Statement, ...]
    value: Expression | Index


@dataclass(frozen=True)
class Choice:
    """A variable of a C++ type, from the first case whose condition holds; zero if none does."""

    type: str
    name: str
    cases: tuple[Case, ...]

    def lines(self) -> list[str]:
        """The C++ of the choice."""
        lines = [f"{self.type} {self.name} = 0;"]
        for i, case in enumerate(self.cases):
            body = [*written(case.body), f"{self.name} = {case.value};"]
            lines += [f"{'else ' if i else ''}if ({case.condition}) {{", *inner(body), "}"]
        return lines


# text has no branches and defines no variables that others read
Statement = Definition | Choice | str


def written(statements: Sequence[Statement]) -> list[str]:
    """The C++ lines of statements."""
    return [line for s in statements for line in ([s] if isinstance(s, str) else s.lines())]


def inner(lines: Sequence[str]) -> list[str]:
    """Lines of C++, one level further in."""
    return [f"    {line}" if line else "" for line in lines]


def indented(lines: Sequence[str], levels: int = 1) -> str:
    """Lines of C++, put inside so many braces, as text."""
    return indented(inner(lines), levels - 1) if levels else "\n".join(lines)


def hoisted(body: Sequence[Statement], *variables: str) -> tuple[list[Statement], list[Statement]]:
    """Definitions that depend on no loop variable, directly or indirectly, and the other
    statements; branches stay in the loop.
    """
    changing, before, rest = {*variables}, list[Statement](), list[Statement]()
    for s in body:
        if isinstance(s, Definition) and changing.isdisjoint(s.value.reads):
            before.append(s)
        else:
            changing |= set() if isinstance(s, str) else {s.name}
            rest.append(s)
    return before, rest


def branches(body: Sequence[Statement]) -> bool:
    """Whether statements contain branches, which keep a loop from becoming vector code."""
    return any(isinstance(s, Choice) for s in body)
