"""The common part of every segment's C++: a struct with the arrays that it reads and writes, a
function that runs first, and `run`.

`first` does what needs whole arrays before anything else: checks of ends and indices, routing. If a
check fails, the kernel returns BAD before it touches any memory; the caller then evaluates the
reference, which raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ...ir import Dim, Fusion, Op, Rows, Value, elements, plain
from ..cxx import (
    Index,
    Number,
    Writer,
    below,
    indented,
    is_made_first,
    made_by_route,
    router,
    size,
    stored,
)
from ..cxx.product_plan import are_all_rows
from ..inexpressible import naming

_STRUCT = Template("""\
struct Segment {
$members

    // What runs first: checks, routing. False if the reference would raise.
    bool first([[maybe_unused]] ThreadPool& pool) const {
$first
        return true;
    }

$functions

    int run(Product product, ThreadPool& pool) const {
        if (!first(pool)) return BAD;
$nothing
$body
        return GOOD;
    }
};

int run(void* const* p, const long long* n, Product product, ThreadPool& pool) {
    return Segment{$arguments}.run(product, pool);
}
""")


# Whose second operand are indices: into this dimension of the first operand.
_INDEXED = {"index_put_accumulate": 0, "combine": 0, "topk_weights": 1, "topk_weights_backward": 1}


@dataclass(frozen=True)
class Source:
    """The C++ of a segment: a struct and a function `run`, to be put in a namespace.

    memory: the values that the caller allocates, including results; `run` takes pointers to the
    inputs of the fusion, then to these. transposed: the input, if any, that is passed with its last
    two dimensions swapped. product: the encoding of weights ("" for none), the kind of the
    grouped product that `run` needs, which is the name of a file in kernels/, and the weights'
    layout; None for no product. more_headers: those that only some texts need, in kernels/ or in
    these folders.
    """

    fusion: Fusion
    text: str
    memory: tuple[Value, ...]
    transposed: Value | None = None
    product: tuple[str, str, str] | None = None
    more_headers: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()

    @property
    def headers(self) -> tuple[str, ...]:
        """The headers that the source includes."""
        routes = any(op.kind.name in router.ROUTER for op in self.fusion.ops)
        return (
            "product.h",
            "rows.h",
            *(("router.h",) if routes else ()),
            *self.more_headers,
        )


class SegmentWriter(Writer, ABC):
    """Writes the struct of a segment. later: the values that are not made yet at the current
    position in the text.
    """

    def __init__(self, fusion: Fusion, memory: Sequence[Value]):
        super().__init__(fusion, memory)
        self.later = list(self.memory)

    @abstractmethod
    def body(self) -> list[str]:
        """The part of `run` after `first`."""

    def text(self) -> str:
        """The C++ of the segment: its struct, and the function `run`."""
        first = self._first()
        functions, body = self.functions(), self.body()
        return _STRUCT.substitute(
            members=indented(self.members()),
            first=indented(first, 2),
            nothing=indented(self._nothing(), 2),
            functions=indented(functions),
            body=indented(body, 2),
            arguments=self._arguments(),
        )

    def ready(self, values: Sequence[Value]) -> None:
        """Declares that the following text reads these values from memory."""
        self.later = [v for v in self.later if v not in values]

    def in_memory(self, without: Collection[Value] = ()) -> dict[Value, str]:
        """The names of the arrays that hold values at the current position in the text."""
        return super().in_memory((*self.later, *without))

    def _nothing(self) -> list[str]:
        """Ends the call if all that it makes is empty: its loops could count through the other
        dimensions, of up to 2^63.
        """
        counts = [elements(v.type.shape) for v in self.memory]
        if any(isinstance(n, int) and n > 0 for n in counts):
            return []
        return [
            f"if ({' && '.join(f'{size(n)} == 0' for n in dict.fromkeys(counts))}) return GOOD;"
        ]

    def _arguments(self) -> str:
        values = [(v, "const ") for v in self.fusion.inputs] + [(v, "") for v in self.memory]
        pointers = [
            f"static_cast<{const}{stored(v)}*>(p[{i}])" for i, (v, const) in enumerate(values)
        ]
        return ", ".join([f"n[{i}]" for i in range(len(self.fusion.symbols))] + pointers)

    # What runs first ------------------------------------------------------------------------------

    def _first(self) -> list[str]:
        lines = []
        for v in self.fusion.inputs:
            if v.type.ends:
                apart = "" if v.type.ends.stride is None else f", {size(v.type.ends.stride)}"
                lines.append(
                    f"if (!good_ends({self.names[v]}, {size(v.type.shape[0])}, "
                    f"{self._rows_of(v)}{apart})) return false;"
                )
        for op in self.fusion.ops:
            write = getattr(self, f"_first_{op.kind.name}", None)
            with naming(op):
                dim = (
                    op.attrs["dim"]
                    if op.kind.name == "index_select"
                    else _INDEXED.get(op.kind.name)
                )
                if dim is not None:
                    lines += self._checked(op.values[1], op.values[0].type.shape[dim])
                lines += write(op) if write else []
            if is_made_first(op):
                self.ready(op.outputs)
        return lines

    def _rows_of(self, ends: Value) -> Index:
        """The number of rows in the partition of these ends; the largest possible if no value of
        the segment is partitioned by it.
        """
        rows = [
            d
            for v in self.fusion.values
            for d in v.type.shape
            if isinstance(d, Rows) and d.groups == ends.type.ends
        ]
        return size(rows[0]) if rows else Number(2**31 - 1)

    def _first_ends(self, op: Op) -> list[str]:
        (offs,) = op.values
        if are_all_rows(self.fusion, offs, op.attrs["rows"]):
            return []
        return [
            f"if (!good_ends({self.array(offs)}, {size(offs.type.shape[0])}, "
            f"{size(op.attrs['rows'])})) return false;"
        ]

    def _first_topk_ids(self, op: Op) -> list[str]:
        (ids,), tokens, bias = op.outputs, size(op.values[0].type.shape[0]), router.bias(op)
        arguments = (
            f"{self.array(op.values[0])}, {self.array(bias) if bias else 'nullptr'}, {tokens}"
        )
        return [f"TopK<{router.of_choice(op)}>::run({arguments}, {self.names[ids]}, pool);"]

    def _first_topk_weights(self, op: Op) -> list[str]:
        return [self.of_weights(op)]

    def of_weights(self, op: Op) -> str:
        """The call that computes the router's weights, or their derivative."""
        (tokens, k), experts = map(size, op.values[1].type.shape), size(op.values[0].type.shape[1])
        inputs = [
            *map(self.array, op.values),
            tokens,
            experts,
            k,
            router.factor(op),
            self.names[op.outputs[0]],
            "pool",
        ]
        return f"{op.kind.name}<{router.of_weights(op)}>({', '.join(map(str, inputs))});"

    def _first_place(self, op: Op) -> list[str]:
        (ids, expert_map), (result,) = op.values, op.outputs
        arguments = f"{self.array(ids)}, {size(elements(ids.type.shape))}, {self.array(expert_map)}"
        counts = f"{size(expert_map.type.shape[0])}, {op.attrs['here']}"
        return [f"if (!place({arguments}, {counts}, {self.names[result]})) return false;"]

    def _first_route(self, op: Op) -> list[str]:
        (ids,), (t, slots) = op.values, op.values[0].type.shape
        count, outputs = (
            size(op.attrs["groups"].count),
            ", ".join(self.names[v] for v in op.outputs),
        )
        first = op.attrs.get("first_expert")
        check = (
            f"if (!all_below({self.array(ids)}, {size(elements(ids.type.shape))}, {count}, "
            "-1)) return false;"
        )
        sort = (
            f"route({self.array(ids)}, {size(t)}, {size(slots)}, {first or 0}, {count}, {outputs});"
        )
        return [check, sort] if first is None else [sort]

    def _first_invert(self, op: Op) -> list[str]:
        (slot_of,), count, result = op.values, size(op.attrs["rows"]), self.names[op.outputs[0]]
        fill = f"for (i64 i = 0; i < {count}; ++i) {result}[{self.array(slot_of)}[i]] = i32(i);"
        if made_by_route(self.fusion, slot_of) == "slot_of":
            return [fill]
        # each row was named: -1 means that it was not
        whole = f"if (!all_below({result}, {count}, {count})) return false;"
        return [
            *self._checked(slot_of, op.attrs["rows"]),
            f"std::fill({result}, {result} + {count}, -1);",
            fill,
            whole,
        ]

    def _first_problem_ends(self, op: Op) -> list[str]:
        starts, problem, padded = map(self.array, op.values)
        a, count = op.attrs, size(op.outputs[0].type.shape[0])
        arguments = f"{starts}, {problem}, {padded}, {count}, {size(a['rows'])}, {a['n']}, {a['k']}"
        return [f"if (!problem_ends({arguments}, {self.names[op.outputs[0]]})) return false;"]

    def _checked(self, index: Value, limit: Dim) -> list[str]:
        """The check that a whole index is below a limit, unless the operation that made it
        guarantees that.
        """
        if below(self.fusion, index) == plain(limit):
            return []
        count = size(elements(index.type.shape))
        return [f"if (!all_below({self.array(index)}, {count}, {size(limit)})) return false;"]
