"""What a grouped_gemm segment asks of its kernel: what is in memory before the product, its columns, what is stored after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...encodings import Encoding
from ...errors import UnsupportedError
from ...ir.core import Fusion, Op, Value
from ...ir.kinds.shape import elements
from ...ir.sizes import exact_div
from ...ir.types import Dim, plain
from ...schedule.product import products

ACTIVATIONS = ("bf16", "f16", "f32")
MADE_FIRST = ("route", "invert", "problem_ends")  # before all else, each value in memory


@dataclass(frozen=True)
class Plan:
    """One grouped product.

    weight: the parts of its encoding, in order; layout: how they are stored; transposed: how `pack` has the elements. first:
    operations on rows that run before it.
    rows: what is stored for each row of groups, W columns each. combine: the sum of a token's rows, of a value in `rows`; tokens: what
    is stored after it.
    """

    fusion: Fusion
    product: Op
    weight: tuple[Value, ...]
    encoding: Encoding
    layout: str
    transposed: bool
    first: tuple[Op, ...]
    rows: tuple[Value, ...]
    width: int
    combine: Op | None
    tokens: tuple[Value, ...]

    @property
    def a(self) -> Value:
        """The activations, [M/g, K]."""
        return self.product.values[0]

    @property
    def ends(self) -> Value:
        """The ends of the groups, where they are in memory: an input, or made by `route`."""
        return source(self.fusion, self.product.values[2])

    @property
    def k(self) -> int:
        """In-features."""
        return known(self.product.values[1].type.shape[2])

    @property
    def n(self) -> int:
        """Rows of each matrix."""
        return known(self.product.values[1].type.shape[1])

    @property
    def stored(self) -> tuple[Value, ...]:
        """What is stored once the product is there."""
        return (*self.rows, *self.tokens)

    @property
    def memory(self) -> tuple[Value, ...]:
        """What the kernel allocates: results, and what it makes for itself."""
        made = [v for op in self.first for v in op.outputs]
        return tuple(dict.fromkeys((*made, *self.stored)))


Readers = Collection[tuple[str, str]]  # the encodings of weights that a backend reads, and the layouts that it reads each in


def plan(fusion: Fusion, readers: Readers) -> Plan:
    """The plan of a segment, or UnsupportedError with the sentence why a backend with such readers has no kernel for it."""
    (found,) = products(fusion)
    op = found.op
    if found.kind != "fprop":
        raise UnsupportedError(f"{op.kind.name} has no kernel here yet")
    weight, transposed = _weight(fusion, op, readers)
    w = op.values[1].type
    if op.values[0].type.dtype not in ACTIVATIONS:
        raise UnsupportedError(f"activations {op.values[0].type} have no kernel here", expected=f"one of {', '.join(ACTIVATIONS)}")
    after = dependent(fusion, op.outputs)
    first = tuple(o for o in fusion.ops if o.kind.name in MADE_FIRST)
    combine = next((o for o in fusion.ops if o.kind.name == "combine"), None)
    summed = dependent(fusion, combine.outputs) if combine else set()
    made = {v for o in first for v in o.outputs}
    others = [v for v in fusion.outputs if v not in after and v not in made]
    if others:
        raise UnsupportedError(f"{others[0].name} {others[0].type} is computed in the prologue, and also read outside it")
    rows = [v for v in fusion.outputs if v in after and v not in summed]
    if combine and combine.values[0] not in rows:
        rows.append(combine.values[0])
    tokens = tuple(v for v in fusion.outputs if v in summed)
    widths = {row_width(v, op.outputs[0].type.shape[0]) for v in rows}
    if len(widths) != 1:
        raise UnsupportedError(f"results of {' and '.join(map(str, sorted(widths)))} columns are stored", expected="one width")
    return Plan(fusion, op, weight, w.encoding, w.layout, transposed, first, tuple(rows), widths.pop(), combine, tokens)


def dependent(fusion: Fusion, values: Sequence[Value]) -> set[Value]:
    """These values and all that is computed from them."""
    found = set(values)
    for op in fusion.ops:
        if any(v in found for v in op.values):
            found |= set(op.outputs)
    return found


def source(fusion: Fusion, v: Value) -> Value:
    """The value whose memory, in order, is that of v: what views and reshapes are of, and casts that change no dtype."""
    op = fusion.producers.get(v)
    if op is None or op.kind.name not in ("ends", "partition", "reshape", "cast") or op.values[0].type.dtype != v.type.dtype:
        return v
    return source(fusion, op.values[0])


def made_by_route(fusion: Fusion, v: Value) -> str:
    """ "ends", "row_of" or "slot_of" for what a `route` of the fusion made; "" for anything else."""
    made = source(fusion, v)
    op = fusion.producers.get(made)
    return ("ends", "row_of", "slot_of")[op.outputs.index(made)] if op is not None and op.kind.name == "route" else ""


def below(fusion: Fusion, index: Value) -> object:
    """The size below which all of an index lies, by what made it; None if nothing says so."""
    op, routed = fusion.producers.get(source(fusion, index)), made_by_route(fusion, index)
    if op is None or not (routed in ("row_of", "slot_of") or op.kind.name == "invert"):
        return None
    shape = op.values[0].type.shape
    return plain(shape[0]) if routed == "row_of" else elements(shape)


def _weight(fusion: Fusion, op: Op, readers: Readers) -> tuple[tuple[Value, ...], bool]:
    """The parts of the weight, from outside of the segment, and whether its elements are transposed."""
    w = op.values[1]
    pack = fusion.producers.get(w)
    packed = pack is not None and pack.kind.name == "pack"
    layouts = [layout for encoding, layout in readers if encoding == w.type.dtype]
    if not layouts or (w.type.quantized and not packed):
        raise UnsupportedError(f"a weight {w.type} has no kernel here", expected=" or ".join(dict.fromkeys(e for e, _ in readers)))
    if w.type.layout not in layouts:
        raise UnsupportedError(f"weights in the layout {w.type.layout} have no kernel here", expected=" or ".join(layouts))
    parts = pack.values if pack is not None and packed else (w,)
    if missing := [v for v in parts if v not in fusion.inputs]:
        raise UnsupportedError(f"{missing[0].name} of the weight is computed in the same segment")
    for d in w.type.shape:
        known(d)
    return tuple(parts), bool(packed and pack.attrs.get("transposed", False))  # type: ignore[union-attr]


def row_width(v: Value, rows: Dim) -> int:
    """How many elements of a value each of `rows` has, whatever its shape: reshapes move nothing."""
    width = exact_div(elements(v.type.shape), plain(rows))
    if not isinstance(width, int):
        raise UnsupportedError(f"{v.name} {v.type} is not a matrix of {rows} rows")
    return width


def known(d: object) -> int:
    """A size that is a number. UnsupportedError for one known only at launch."""
    if not isinstance(d, int):
        raise UnsupportedError(f"a matrix with a size {d} has no kernel here", expected="numbers known when compiling")
    return d
