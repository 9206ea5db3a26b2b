"""Store of results, eight columns at a time: what a kernel stores for columns of a tile, and the
vectors that it reads for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...ir import Op, Value, plain
from ..cxx import (
    Expression,
    Index,
    Number,
    Statement,
    Variable,
    flat,
    follow,
    formula,
    hoisted,
    inner,
    stored,
    written,
)
from ..cxx.statements import Choice, Definition
from .source import SafeElements

VECTOR = 8
FIRST, _J = Variable("j0"), Variable("j")


class VectorElements(SafeElements):
    """Elements of columns j0 .. j0 + 7 in a loop over j: if the rows are in memory, all eight are
    loaded at once before the loop.

    Memory guarded by a condition may not exist, such as the bias of a row that belongs to no group:
    it is loaded under the condition.
    """

    def _load(self, v: Value, at: Sequence[Index]) -> Expression:
        if (
            v.type.layout != "linear"
            or v.type.dtype not in ("f32", "bf16", "f16")
            or not self._in_vectors(v, at)
        ):
            return super()._load(v, at)
        return formula("widen({})", self._of_eight(v, at))

    def _load_guarded(self, v: Value, at: Sequence[Index]) -> Expression:
        return super()._load(v, at)

    def _byte(self, v: Value, at: Sequence[Index]) -> Expression:
        return self._of_eight(v, at) if self._in_vectors(v, at) else super()._byte(v, at)

    def _index_select(self, op: Op, at: Sequence[Index]) -> Variable:
        """The gathered row is made safe in a separate statement: once for all columns."""
        dim = op.attrs["dim"]
        picked = self._define("i64", formula("{}", self._picked(op, at[dim])))
        return self.of(op.values[0], [*at[:dim], picked, *at[dim + 1 :]])

    def _of_eight(self, v: Value, at: Sequence[Index]) -> Expression:
        place = flat([*at[:-1], at[-1].replaced(_J.name, FIRST)], v.type.shape)
        eight = self._define("auto", formula("load_eight({} + {})", self._array(v), place))
        return Expression(f"{eight}.at[v]", frozenset([*eight.reads, _J.name]))

    def _in_vectors(self, v: Value, at: Sequence[Index]) -> bool:
        width, below = plain(v.type.shape[-1]) if at else None, self._below.get(_J.name, 1)
        return (
            isinstance(width, int)
            and width % VECTOR == below % VECTOR == 0
            and at[-1].reads == {_J.name}
            and follow(at[-1], VECTOR, VECTOR)
            and not any(_J.name in i.reads for i in at[:-1])
        )


class WholeEights(VectorElements):
    """Eight columns of a `cat` are of one of its values, if these have whole eights: there is one
    branch for them.
    """

    def _before(self, i: Index, end: Index) -> Expression:
        if (
            isinstance(end, Number)
            and end.value % VECTOR == 0
            and i.reads == {_J.name}
            and follow(i, VECTOR, VECTOR)
        ):
            i = i.replaced(_J.name, FIRST)
        return super()._before(i, end)


@dataclass
class Store:
    """The function `store`: all results of one row and eight columns. width: the number of a tile's
    columns.
    """

    width: int
    kept: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)

    def add(self, v: Value, array: str, element: str, stride: int, place: Index) -> None:
        """Adds a result: an element for column j; place is its position in a row of an array."""
        name = f"result{len(self.arrays)}"
        self.arrays.append(f"Eight<{stored(v)}> {name};")
        self.kept.append(f"{name}.at[v] = {element};")
        if self.width % VECTOR == 0 and stride % VECTOR == 0 and follow(place, VECTOR, VECTOR):
            self.stores.append(
                f"store_eight({array} + m * {stride} + {place.replaced(_J.name, FIRST)}, {name});"
            )
        else:
            each = (
                f"if (j0 + v < WIDTH) {array}[m * {stride} + "
                f"{place.replaced(_J.name, Variable('(j0 + v)'))}] = {name}.at[v];"
            )
            self.stores += ["#pragma unroll", f"for (int v = 0; v < {VECTOR}; ++v) {each}"]

    def add_term(self, i: int, term: object) -> None:
        """Adds a column's term to sum i of the row."""
        self.kept.append(
            f"total[{i}] += {term};"
            if self.width % VECTOR == 0
            else f"if (j0 + v < WIDTH) total[{i}] += {term};"
        )

    def body(self, statements: Sequence[Statement]) -> list[str]:
        """The code that stores them. statements: those that make the elements."""
        column = "j0 + v" if self.width % VECTOR == 0 else "min(j0 + v, i64(WIDTH - 1))"
        return [*of_eight(statements, self.kept, column, self.arrays), *self.stores]

    def function(self, statements: Sequence[Statement], sums: int) -> list[str]:
        """The store as a C++ function."""
        return [
            "// Columns j0 .. j0 + 7 of a tile, of row m of group g; `total` takes what they add "
            "to sums over the row.",
            "__device__ __forceinline__ void store(i64 m, i64 g, i64 j0, const float "
            f"(&p)[COLUMNS_PER_RESULT][{VECTOR}],",
            f"                                      float (&total)[{max(1, sums)}]) const {{",
            "    if (j0 >= WIDTH) return;",
            *inner(self.body(statements)),
            "}",
        ]


def of_eight(
    statements: Sequence[Statement],
    kept: Sequence[str],
    column: str = "j0 + v",
    before: Sequence[str] = (),
) -> list[str]:
    """C++ of an unrolled loop over eight adjacent columns: the statements compute the elements of
    each, and the variables in `kept` are stored in arrays of eight.

    column: the expression of a column's number; before: lines to write before the loop.
    """
    once, each = hoisted(statements, _J.name)
    branches, each = _branches(each, column)
    return [
        *written(once),
        *before,
        *branches,
        "#pragma unroll",
        f"for (int v = 0; v < {VECTOR}; ++v) {{",
        f"    const i64 j = {column};",
        *inner([*written(each), *kept]),
        "}",
    ]


def _branches(body: Sequence[Statement], column: str) -> tuple[list[str], list[Statement]]:
    """The code of branches that all columns take together, each with a loop of its own; and the
    body of the loop after them, with their values in place of them.
    """
    changing = {_J.name, *(s.name for s in body if not isinstance(s, str))}
    lines, rest = list[str](), list[Statement]()
    for s in body:
        if (
            not isinstance(s, Choice)
            or _reads(s) & changing != {_J.name}
            or any(_J.name in case.condition.reads for case in s.cases)
        ):
            rest.append(s)
            continue
        lines.append(f"{s.type} {s.name}_of[{VECTOR}] = {{}};")
        for i, case in enumerate(s.cases):
            eight = of_eight(case.body, [f"{s.name}_of[v] = {case.value};"], column)
            head = f"{'else ' if i else ''}if ({case.condition}) {{"
            lines += [head, *inner(eight), "}"]
        rest.append(Definition(s.type, s.name, Expression(f"{s.name}_of[v]")))
    return lines, rest


def _reads(s: Statement) -> set[str]:
    """The variables that a statement reads, without those that it defines inside."""
    if isinstance(s, str):
        return set()
    if isinstance(s, Definition):
        return {*s.value.reads}
    results = set[str]()
    for case in s.cases:
        own = {inside.name for inside in case.body if not isinstance(inside, str)}
        read = set[str]().union(*map(_reads, case.body), case.value.reads)
        results |= {*case.condition.reads} | (read - own)
    return results
