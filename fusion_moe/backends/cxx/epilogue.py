"""The epilogue of a grouped product on any target: elements of results, from the accumulators of
the same row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ...errors import UnsupportedError
from ...ir import Value
from .elements import Elements, Known
from .indices import Index, Variable, is_index, reshaped
from .product_plan import ProductPlan
from .statements import Expression
from .writer import Writer

_G, _J, _M = map(Variable, "gjm")


class Epilogue:
    """Element j of results, in row m of group g. accumulators: for values as large as the product,
    C++ templates of the n-th column that they read.

    columns: the product's columns that were read so far, as functions of j.
    """

    def __init__(self, writer: Writer, plan: ProductPlan, accumulators: Mapping[Value, str]):
        self.columns: list[Index] = []
        self._writer, self._plan, self._accumulators = writer, plan, accumulators
        self._rows = plan.a.type.shape[0]

    def elements(self) -> Elements:
        """A writer of elements, for neither rows nor tokens yet."""
        plan = self._plan
        known: dict[Value, Known] = {
            v: partial(self._column, accumulator) for v, accumulator in self._accumulators.items()
        }
        return self._writer.elements(
            known, {plan.ends: self._group}, plan.stored, {_J.name: plan.width}
        )

    def at(self, v: Value, place: Index = _J) -> list[Index]:
        """The indices of a result's element, at a position in its row."""
        return reshaped([_M, place], (self._rows, self._plan.width_of(v)), v.type.shape)

    def every_column(self) -> tuple[Index, ...]:
        """The columns that were read so far, if these are all columns of the product, each once.
        UnsupportedError otherwise.
        """
        read = [n for column in self.columns for n in self._values(column)]
        if sorted(read) != list(range(self._plan.n)):
            raise UnsupportedError(
                "a product is stored beside results that do not read each of its columns once"
            )
        return tuple(self.columns)

    def _column(self, accumulator: str, at: Sequence[Index]) -> Expression:
        row, column = at
        if not is_index(row, _M, self._rows):
            raise UnsupportedError("a result reads other rows of the product than its own")
        if not column.reads <= {"j"}:
            raise UnsupportedError(
                f"a result reads the column {column} of the product",
                expected="columns known when compiling",
            )
        read = column if column in self.columns else self._alike(column)
        if read is None:
            self.columns.append(column)
        return Expression(accumulator.format(self.columns.index(read or column)), frozenset("j"))

    def _alike(self, column: Index) -> Index | None:
        """A column that was read already, in another form."""
        values = self._values(column)
        return next((c for c in self.columns if self._values(c) == values), None)

    def _values(self, column: Index) -> list[int]:
        return [column.evaluate({_J.name: j}) for j in range(self._plan.width)]

    def _group(self, row: Index) -> Index:
        if not is_index(row, _M, self._rows):
            raise UnsupportedError("a result adds the bias of other rows than its own")
        return _G
