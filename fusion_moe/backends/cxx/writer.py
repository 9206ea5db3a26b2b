"""Base of the writers of a segment's C++ for any target: a struct with the arrays that it reads and
writes, and elements in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ...ir import Dim, Fusion, Value
from .elements import Elements, Known, array, array_name, stored
from .indices import Index, flat, reshaped


class Writer:
    """Writes the struct of a segment. UnsupportedError with the reason if there is none.

    memory: the values that are allocated for a call, including results. names: those of the arrays
    of inputs and of these values.
    """

    ELEMENTS: type[Elements] = Elements

    def __init__(
        self, fusion: Fusion, memory: Sequence[Value], names: Mapping[Value, str] | None = None
    ):
        self.fusion, self.memory = fusion, tuple(memory)
        self.names = {v: array_name(v) for v in (*fusion.inputs, *memory)} | dict(names or {})

    def functions(self) -> list[str]:
        """The struct's own constants, types and functions."""
        return []

    def members(self) -> list[str]:
        """Sizes, and the arrays of inputs and of allocated values."""
        sizes = [f"i64 n_{s};" for s in self.fusion.symbols]
        inputs = [f"const {stored(v)}* {self.names[v]};  // {v.type}" for v in self.fusion.inputs]
        return [
            *sizes,
            *inputs,
            *(f"{stored(v)}* {self.names[v]};  // {v.type}" for v in self.memory),
        ]

    def in_memory(self, without: Collection[Value] = ()) -> dict[Value, str]:
        """The C++ arrays of the function that is written, by the values that they hold. without:
        values that it has not computed at this point.
        """
        return {v: name for v, name in self.names.items() if v not in without}

    def array(self, v: Value, without: Collection[Value] = ()) -> str:
        """The name of the array that holds a value, possibly through views and reshapes. without:
        as above.
        """
        return array(self.fusion, self.in_memory(without), v)

    def elements(
        self,
        known: Mapping[Value, Known] | None = None,
        group: Mapping[Value, Callable[[Index], Index]] | None = None,
        without: Collection[Value] = (),
        below: Mapping[str, int] | None = None,
    ) -> Elements:
        """A writer of elements of values, from the values in memory except those in `without`.
        below: see Elements.
        """
        return self.ELEMENTS(self.fusion, self.in_memory(without), known, group, below)

    # What is stored -------------------------------------------------------------------------------

    def put(
        self, elements: Elements, v: Value, shape: Sequence[Dim], row: Index, column: Index
    ) -> str:
        """Stores element (row, column) of a value, viewed as a matrix of a shape with as many
        elements.
        """
        return self.store(
            v,
            flat([row, column], shape),
            elements.of(v, reshaped([row, column], shape, v.type.shape)),
        )

    def store(self, v: Value, at: Index, element: object) -> str:
        """Stores an element of a value at a position in its array."""
        return f"{self.names[v]}[{at}] = stored<{stored(v)}>({element});"
