"""The segments of a call and their relations, as data: who reads what, and which arrays a call has,
and for how long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from ...ir import Value, dependent, needed
from .grouped_mm import GIVEN, IDS
from .heuristics import AUTO
from .product import Product
from .source import Array, Source

# what an array of a call is known by: a value of the call, or the part to which it belongs alone
Key = Value | tuple[int, Value | Array]


@dataclass(frozen=True)
class Part:
    """A segment of a call. inputs, outputs: the call's values for those of the source's fusion."""

    source: Source
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def input_of(self, own: object) -> Value | None:
        """The call's value for one of the fusion's, if that is an input of it."""
        inputs = zip(self.inputs, self.source.fusion.inputs, strict=True)
        return next((v for v, other in inputs if other is own), None)

    @property
    def transposed(self) -> Value | None:
        """The input that is passed with its last two dimensions swapped, if there is one."""
        return self.input_of(self.source.transposed)

    @property
    def grouped(self) -> Value | None:
        """The value of which it reads no rows of no group, if it is an input."""
        return self.input_of(self.source.grouped)

    @property
    def matrix(self) -> Value | None:
        """The value whose rows are the activations of the part's product, if it is an input."""
        return self.input_of(self.source.matrix) if isinstance(self.source, Product) else None


@dataclass(frozen=True)
class Inner:
    """An array of a call that is neither input nor output, as a source defines it. first, last: the
    numbers of the parts that need it.
    """

    source: Source
    array: Value | Array
    first: int
    last: int


@dataclass(frozen=True)
class CallArrays:
    """The arrays of a call by number: inputs, outputs that are made, inner arrays.

    places: for each part, the numbers of its struct's arrays; inner: the arrays after inputs and
    outputs; numbers: by key.
    """

    places: tuple[tuple[int, ...], ...]
    inner: tuple[Inner, ...]
    numbers: Mapping[Key, int]


@dataclass(frozen=True)
class Parts:
    """Parts in order, which are launched in one call. variant: the option cuda_variant.

    A value that is passed transposed is an input that no other part reads.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parts: tuple[Part, ...]
    variant: str = AUTO

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes that are passed to a call."""
        return tuple(dict.fromkeys(s for part in self.parts for s in part.source.fusion.symbols))

    @property
    def made(self) -> tuple[Value, ...]:
        """The outputs that are separate memory."""
        return tuple(v for v in self.outputs if v not in self.inputs)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """(i, j) if only the product of part j reads the result of part i: in any order of columns,
        if both agree.
        """
        return tuple(
            (i, j)
            for i, j, v in self._read_once([part.matrix for part in self.parts])
            if _linked(self.parts[i], v, self.parts[j].source)
        )

    @cached_property
    def routed(self) -> dict[int, tuple[Value, int]]:
        """The parts whose product may route for the next part's product, too: the ids, and the one
        of group 0.
        """
        found = dict[int, tuple[Value, int]]()
        for i, (part, after) in enumerate(pairwise(self.parts)):
            source, reader = part.source, after.source
            if not (isinstance(source, Product) and isinstance(reader, Product)):
                continue
            if (op := source.routing_of_few) and (ids := part.input_of(op.values[0])):
                made = dict(zip(source.fusion.outputs, part.outputs, strict=True))
                ends = after.input_of(reader.plan.ends)
                if ends and ends is made.get(op.outputs[0]) and reader.rows == source.rows:
                    found[i] = ids, op.attrs.get("first_expert") or 0
        return found

    @cached_property
    def unquantized(self) -> dict[int, Key]:
        """The parts that quantize rows for the next part's product alone, which may do it itself:
        where `arrays` has these rows. It reads their codes and their scales as activations alone.
        """
        found = dict[int, Key]()
        for i, (part, after) in enumerate(pairwise(self.parts)):
            others = chain(self.outputs, *(p.inputs for p in self.parts[i + 2 :]))
            rows, own, reader = part.source.unquantized, part.source.fusion, after.source
            if not (rows and isinstance(reader, Product) and set(part.outputs).isdisjoint(others)):
                continue
            made = dict[Value | None, Value](zip(part.outputs, own.outputs, strict=True))
            if unpack := own.producer(made.get(after.matrix), "unpack"):
                inputs = zip(after.inputs, reader.fusion.inputs, strict=True)
                read = {v for given, v in inputs if made.get(given) in unpack.outputs}
                if len(read) == len(unpack.outputs) and _only_activations(reader, read):
                    found[i] = part.input_of(rows) or (i, rows)
        return found

    @cached_property
    def without_rest(self) -> frozenset[int]:
        """The products of which nothing reads rows of no group: what reads their rows leaves these
        out, or is such a product.
        """
        results = set[int]()
        for i, part in reversed([*enumerate(self.parts)]):
            if _leaves_rest(part.source) and all(self._of_groups(v, results) for v in _rows(part)):
                results.add(i)
        return frozenset(results)

    def _of_groups(self, v: Value, products: Collection[int]) -> bool:
        """Whether of v only rows of groups are read. products: parts that read no others."""
        return v not in self.outputs and all(
            part.grouped is v or (i in products and _in_place(part, v))
            for i, part in enumerate(self.parts)
            if v in part.inputs
        )

    def _read_once(self, read: Sequence[Value | None]) -> list[tuple[int, int, Value]]:
        """(i, j, v) for the value v that is `read` by part j, if part i makes it, and no other part
        reads it.
        """
        makers = {v: i for i, part in enumerate(self.parts) for v in part.outputs}
        readers = Counter([*self.outputs, *(v for part in self.parts for v in set(part.inputs))])
        return [(makers[v], j, v) for j, v in enumerate(read) if v in makers and readers[v] == 1]

    @cached_property
    def arrays(self) -> CallArrays:
        """The arrays of the call, numbered."""
        numbers: dict[Key, int] = {v: i for i, v in enumerate((*self.inputs, *self.made))}
        argument, places = len(numbers), list[tuple[int, ...]]()
        created = list[tuple[Source, Value | Array, int]]()
        for i, part in enumerate(self.parts):
            own = part.source.fusion.outputs
            given: dict[Value | Array, Key] = dict(zip(own, part.outputs, strict=True))
            if routed := self.routed.get(i - 1):
                given[IDS] = routed[0]
            if rows := self.unquantized.get(i - 1):
                given[GIVEN] = rows
            results = [numbers[v] for v in part.inputs]
            arrays: list[Value | Array] = [*part.source.memory, *part.source.scratch]
            for array in arrays:
                key = given.get(array, (i, array))
                if key not in numbers:
                    numbers[key] = len(numbers)
                    created.append((part.source, array, i))
                results.append(numbers[key])
            places.append(tuple(results))
        last = {n: i for i, of_part in enumerate(places) for n in of_part}
        end = len(self.parts) - 1  # who records a run reads the ends of groups after it
        inner = tuple(
            Inner(source, array, first, end if _is_ends(array) else last[n])
            for n, (source, array, first) in enumerate(created, argument)
        )
        return CallArrays(tuple(places), inner, numbers)


def _is_ends(array: Value | Array) -> bool:
    """Whether an array is the ends of groups."""
    return isinstance(array, Value) and bool(array.type.ends)


def _linked(maker: Part, v: Value, after: Source) -> bool:
    """Whether v is made in any order, in rows of the next product's width, which reads them only as
    activations.
    """
    own = dict(zip(maker.outputs, maker.source.fusion.outputs, strict=True))
    return (
        isinstance(after, Product)
        and after.plan.kind != "dgrad"
        and maker.source.in_any_order == (own[v], after.plan.k)
        and _only_activations(after, {after.matrix})
    )


def _leaves_rest(source: Source) -> bool:
    """Whether a source is a product that itself reads no results for rows of no group."""
    return (
        isinstance(source, Product)
        and not source.plan.sums
        and (source.plan.combine is None or source.plan.sums_groups)
    )


def _rows(part: Part) -> list[Value]:
    """The results of a part's product for rows."""
    if not isinstance(part.source, Product):
        return []
    rows = part.source.plan.quantized or part.source.plan.rows
    return [
        v for v, own in zip(part.outputs, part.source.fusion.outputs, strict=True) if own in rows
    ]


def _in_place(part: Part, v: Value) -> bool:
    """Whether v has the rows of a part's product, which reads for each of them no others."""
    source, own = part.source, part.source.fusion.inputs[part.inputs.index(v)]
    assert isinstance(source, Product)
    if own.type.shape[0] != source.plan.a.type.shape[0]:
        return False
    reached = dependent(source.fusion.ops, [own])
    return not any(op.kind.role == "gather" and op.values[0] in reached for op in source.fusion.ops)


def _only_activations(product: Product, read: Collection[Value | None]) -> bool:
    """Whether these values are read only on the way to the activations, not in the epilogue."""
    of_activations, read = needed(product.fusion.ops, [product.plan.a]), {*read}
    for op in product.fusion.ops:
        if op is not product.plan.product and read & set(op.values):
            if not of_activations & set(op.outputs):
                return False
            read |= set(op.outputs)
    return True


def one_part(source: Source, variant: str = AUTO) -> Parts:
    """The parts of a call that launches one segment by itself: its fusion's inputs and outputs are
    the call's. variant: the option cuda_variant.
    """
    inputs, outputs = tuple(source.fusion.inputs), tuple(source.fusion.outputs)
    return Parts(inputs, outputs, (Part(source, inputs, outputs),), variant)


def parts_of(
    inputs: Sequence[Value], outputs: Sequence[Value], parts: Sequence[Part], variant: str
) -> Parts | None:
    """The parts of one call; None if an output is not separate memory, or if others also read a
    value that is passed transposed.
    """
    results = {v for part in parts for v in part.outputs}
    read = Counter(v for part in parts for v in part.inputs)
    whole = set(outputs) <= results and len(set(outputs)) == len(outputs)
    transposed = (part.transposed for part in parts)
    transposable = all(v is None or (v in inputs and read[v] == 1) for v in transposed)
    return (
        Parts(tuple(inputs), tuple(outputs), tuple(parts), variant)
        if whole and transposable
        else None
    )
