"""What a grouped_gemm segment needs from its kernel: what is in memory before the product, its
columns, and what is stored after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ... import options
from ...encodings import Encoding
from ...errors import UnsupportedError
from ...ir import Dim, Fusion, Op, Value, dependent, elements, exact_div, needed, plain
from ...schedule.product import (
    GroupedProduct,
    cat_before,
    main_and_added,
    products,
    quantized_result,
)
from ..inexpressible import Inexpressible, naming
from .indices import Index, Number, Variable, flat, unflat

ACTIVATIONS = ("bf16", "f16", "f32")
_MOST_COLUMNS = 2**20  # of a product's results: writing its kernel takes time for each
# what leaves rows of zeros zeros, if its first operand has them; "add": if all have; "group_add":
# of the same groups
_OF_ZEROS = ("add", "cast", "group_add", "group_mul", "partition", "reshape")
_MADE_FIRST = ("topk_ids", "topk_weights", "place", "route", "invert", "problem_ends")


def is_made_first(op: Op) -> bool:
    """Whether an operation runs before everything else, with each result in memory."""
    return op.kind.name in _MADE_FIRST or bool(op.kind.sources)


@dataclass(frozen=True)
class ProductPlan:
    """One grouped product that makes rows: fprop, or dgrad, which is the same with matrices stored
    [G, k, n].

    weight: the parts of its encoding, in order; layout: their layout; transposed: as in `pack`, of
    the elements. first: operations on rows that run before the product. rows: the values stored for
    each row of groups. width: the columns that a tile's columns j stand for: a row of a value is as
    long, or several times as long (see `parts`). sums: sums over the columns of a row, after `rows`
    in order; combine: the sum of a token's rows, of a value in `rows`; tokens: the values stored
    after it. added: products with float weights whose tiles are made beside its own. row_order:
    whether no row may change the bits of another one's results: the option order. quantized: the
    parts that are stored in place of the only value in `rows`.
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
    kind: str
    sums: tuple[Op, ...]
    added: tuple[GroupedProduct, ...]
    row_order: bool
    quantized: tuple[Value, ...]

    @property
    def made(self) -> tuple[Value, ...]:
        """The results of all products, its own first."""
        return (self.product.outputs[0], *(p.result for p in self.added))

    @property
    def a(self) -> Value:
        """The activations, [M/g, K]."""
        return self.product.values[0]

    @property
    def activations(self) -> str:
        """The dtype in which kernels of 16 bits multiply the activations; it holds all numbers of
        encoded ones.
        """
        return "bf16" if self.a.type.quantized else self.a.type.dtype

    @property
    def ends(self) -> Value:
        """The ends of the groups, if they are in memory: an input, or made by `route`. See
        `of_one_group`.
        """
        return base_of(self.fusion, self.product.values[2])

    @property
    def of_one_group(self) -> bool:
        """Whether the fusion itself says that all rows are in one group: then the ends are not in
        memory.
        """
        return are_all_rows(self.fusion, self.product.values[2], self.a.type.shape[0])

    @property
    def k(self) -> int:
        """The size of the contracted axis."""
        return known(self.product.values[0].type.shape[1])

    @property
    def n(self) -> int:
        """Columns of the product."""
        return known(self.product.outputs[0].type.shape[1])

    @property
    def one_width(self) -> bool:
        """Whether rows of all stored values are as long as a tile is wide, and there are no sums
        over rows.
        """
        return not self.sums and all(self.width_of(v) == self.width for v in self.rows)

    @property
    def groups(self) -> int:
        """The number of matrices."""
        return known(self.weight[0].type.shape[0])

    @property
    def scale_runs(self) -> int:
        """How many equal runs the rows of a matrix form, each with its own scale."""
        parts = zip(self.encoding.parts, self.weight, strict=True)
        return next((known(n) for part, v in parts if part.of_matrix for n in v.type.shape[1:]), 1)

    @property
    def stored(self) -> tuple[Value, ...]:
        """The values that the kernel writes: rows of the product after its epilogue, sums of
        groups, sums of a token's rows.
        """
        return (*self.rows, *self.summed, *self.tokens)

    @property
    def summed(self) -> tuple[Value, ...]:
        """The values that hold `sums` as they are stored."""
        return tuple(
            next(v for v in self.fusion.outputs if base_of(self.fusion, v) is op.outputs[0])
            for op in self.sums
        )

    @property
    def sums_groups(self) -> bool:
        """Whether `combine` leaves out rows of no group: they are zeros, as products make them."""
        return (
            self.combine is not None
            and self.groups > 0
            and not self.of_one_group
            and plain(self.combine.values[0].type.shape[0]) == plain(self.a.type.shape[0])
            and _has_zeros(self, self.combine.values[0])
        )

    def width_of(self, v: Value) -> int:
        """The number of a value's elements for each row."""
        return row_width(v, self.product.outputs[0].type.shape[0])

    def parts(self, v: Value) -> tuple[Index, ...] | None:
        """Where the elements that a tile's column j makes of a value lie in its row: one position,
        or one in each tensor of a `cat`. None for a value with as many columns as the product, if a
        tile's column j reads several of these.
        """
        joined = cat_before(self.fusion, v)
        if self.width_of(v) == self.width:
            return (Variable("j"),)
        return None if joined is None else tuple(_places(joined))

    @property
    def memory(self) -> tuple[Value, ...]:
        """What the kernel allocates: results, and its own intermediate values."""
        results = [v for op in self.first for v in op.outputs]
        return tuple(dict.fromkeys((*results, *(self.quantized or self.stored))))


Readers = Collection[tuple[str, str]]  # (encoding, layout) of the weights that a backend reads


def plan_product(
    fusion: Fusion,
    readers: Readers,
    dgrad: Readers,
    of_added: Readers,
    of_rows: Collection[str] = ACTIVATIONS,
) -> ProductPlan:
    """The plan of a segment; UnsupportedError with the reason if a backend with such readers, and
    others for dgrad, has no kernel.

    of_added: the readers for added products. of_rows: the dtypes and encodings of activations that
    the backend has kernels for.
    """
    result, added = main_and_added(fusion)
    op = result.op
    if result.kind == "wgrad":
        raise UnsupportedError(f"{op.kind.name} has no kernel here yet")
    weight, transposed = _weight(fusion, op, dgrad if result.kind == "dgrad" else readers)
    w = op.values[1].type
    _check_activations(op, of_rows)
    for other in added:
        with naming(other.op):
            _weight(fusion, other.op, of_added)
            _check_activations(other.op, ACTIVATIONS)
    after = dependent(fusion.ops, [op.outputs[0], *(p.result for p in added)])
    first = tuple(filter(is_made_first, fusion.ops))
    sums = tuple(o for o in fusion.ops if o.kind.name == "sum" and o.outputs[0] in after)
    of_sums = dependent(fusion.ops, [v for o in sums for v in o.outputs])
    combine = next((o for o in fusion.ops if o.kind.name == "combine"), None)
    summed = dependent(fusion.ops, combine.outputs) if combine else set()
    results = {v for o in first for v in o.outputs}
    for product in (result, *added):
        _need_inside(fusion, product.op, results)
    if not are_all_rows(fusion, result.ends, result.a.type.shape[0]):
        _need_ends(fusion, result, results)
    rows = [v for v in fusion.outputs if v not in results and v not in summed and v not in of_sums]
    _check_sums(fusion, sums, of_sums)
    if combine and combine.values[0] not in rows:
        rows.append(combine.values[0])
    unpack = quantized_result(fusion)
    if unpack is not None:
        rows = list(fusion.producers[unpack.values[0]].values)
    tokens = tuple(v for v in fusion.outputs if v in summed)
    of_product = [v for v in (*rows, *(o.values[0] for o in sums)) if v in after]
    width = _width(fusion, op, of_product)
    _need_width(fusion, width, op, [v for v in rows if v not in after])
    return ProductPlan(
        fusion=fusion,
        product=op,
        weight=weight,
        encoding=w.encoding,
        layout=w.layout,
        transposed=transposed,
        first=first,
        rows=tuple(rows),
        width=width,
        combine=combine,
        tokens=tokens,
        kind=result.kind,
        sums=sums,
        added=added,
        row_order=options.current().row_order,
        quantized=() if unpack is None else unpack.outputs,
    )


def need_one_width(product_plan: ProductPlan) -> ProductPlan:
    """The plan itself. Inexpressible if it stores rows of several lengths or sums over them, which
    not all kernels can.
    """
    if product_plan.sums:
        raise Inexpressible(product_plan.sums[0], "a sum over a row's columns has no kernel here")
    if not product_plan.one_width:
        after = dependent(product_plan.fusion.ops, product_plan.product.outputs)
        widths = {v: product_plan.width_of(v) for v in product_plan.rows}
        changing = (
            o
            for o in product_plan.fusion.ops
            if o.kind.name in ("slice", "cat") and o.values[0] in after
        )
        raise Inexpressible(
            next(changing),
            f"results of {' and '.join(map(str, sorted(set(widths.values()))))} columns are "
            "stored: a kernel's tiles have one width",
        )
    return product_plan


@dataclass(frozen=True)
class WgradPlan:
    """A product that contracts the rows of each group: a matrix [n, k] for each group.

    first: operations on rows that run before it; results: the values that are stored, elementwise.
    """

    fusion: Fusion
    product: GroupedProduct
    first: tuple[Op, ...]
    results: tuple[Value, ...]

    @property
    def memory(self) -> tuple[Value, ...]:
        """What the kernel allocates: results, and its own intermediate values."""
        return tuple(dict.fromkeys((*(v for op in self.first for v in op.outputs), *self.results)))

    @property
    def ends(self) -> Value:
        """The ends of the groups, in memory."""
        return base_of(self.fusion, self.product.ends)

    @property
    def n(self) -> int:
        """Columns of `a`: rows of a matrix."""
        return known(self.product.a.type.shape[1])

    @property
    def k(self) -> int:
        """Columns of `b`: of a matrix."""
        return known(self.product.b.type.shape[1])

    @property
    def groups(self) -> int:
        """The number of matrices."""
        return known(self.product.result.type.shape[0])


def plan_wgrad(fusion: Fusion, dtypes: Collection[str], alike: bool = True) -> WgradPlan:
    """The plan of a segment with a wgrad, or UnsupportedError. dtypes: of operands for which a
    backend has kernels; alike: both equal.
    """
    (actual,) = products(fusion)
    of = {actual.a.type.dtype, actual.b.type.dtype}
    if not of.issubset(dtypes) or (alike and len(of) > 1):
        raise UnsupportedError(
            f"a product of {actual.a.type} and {actual.b.type} over rows has no kernel here",
            expected=f"two of {' or '.join(dtypes)}",
        )
    _need_inside(fusion, actual.op, ())
    first = tuple(filter(is_made_first, fusion.ops))
    _need_ends(fusion, actual, {v for o in first for v in o.outputs})
    for v in fusion.outputs:
        if elements(v.type.shape) != elements(actual.result.type.shape):
            raise UnsupportedError(
                f"{v.name} {v.type} is not as large as the product {actual.result.type}"
            )
    wgrad_plan = WgradPlan(fusion, actual, first, fusion.outputs)
    for d in (wgrad_plan.n, wgrad_plan.k, wgrad_plan.groups):
        known(d)
    return wgrad_plan


def _need_inside(fusion: Fusion, product: Op, in_memory: Collection[Value]) -> None:
    """Inexpressible if a value from which the product's operands are computed is read outside,
    except values `in_memory`.
    """
    inside = needed(fusion.ops, product.values)
    if others := [v for v in fusion.outputs if v in inside and v not in in_memory]:
        v = others[0]
        raise Inexpressible(
            fusion.producers[v],
            f"{v.name} {v.type} is computed in the prologue, and also read outside it",
        )


def are_all_rows(fusion: Fusion, ends: Value, rows: Dim) -> bool:
    """Whether ends partition all `rows` into one group by a constant of the program: a `full` of
    one element with their number.
    """
    producer = fusion.producer(base_of(fusion, ends), "full")
    return (
        producer is not None
        and producer.attrs["shape"] == (1,)
        and producer.attrs["fill_value"] == plain(rows)
    )


def _need_ends(fusion: Fusion, product: GroupedProduct, in_memory: Collection[Value]) -> None:
    """Inexpressible unless the ends of groups are in memory before the product: they are needed to
    find rows.
    """
    ends = base_of(fusion, product.ends)
    if ends not in fusion.inputs and ends not in in_memory:
        raise Inexpressible(
            fusion.producers[ends],
            f"{ends.name} {ends.type}, where groups end, is computed in the prologue",
        )


def _check_activations(op: Op, rows: Collection[str]) -> None:
    if op.values[0].type.dtype not in rows:
        raise UnsupportedError(
            f"activations {op.values[0].type} have no kernel here",
            expected=f"one of {', '.join(rows)}",
        )


def _check_sums(fusion: Fusion, sums: Sequence[Op], of_sums: Collection[Value]) -> None:
    """UnsupportedError unless sums over a row's columns are stored directly."""
    for op in sums:
        shape = op.values[0].type.shape
        if len(shape) != 2 or tuple(op.attrs["dims"]) != (1,):
            raise Inexpressible(
                op,
                f"a sum over dimensions {list(op.attrs['dims'])} of "
                f"{op.values[0].type} has no kernel here",
            )
    outputs = [v for v in fusion.outputs if v in of_sums]
    if len(outputs) != len(sums) or {base_of(fusion, v) for v in outputs} != {
        v for op in sums for v in op.outputs
    }:
        raise Inexpressible(
            sums[0], "something is computed from the sum of a row in the same segment"
        )


def _width(fusion: Fusion, product: Op, values: Sequence[Value]) -> int:
    """The columns that a tile's columns stand for: the fewest that any value of the epilogue
    has.
    """
    rows = product.outputs[0].type.shape[0]
    if not values:
        raise UnsupportedError(f"nothing of {product.kind.name} is stored")
    joined = [cat_before(fusion, v) for v in values]
    widths = {
        row_width(v if op is None else op.values[0], rows)
        for v, op in zip(values, joined, strict=True)
    }
    width = min(widths)
    if width > _MOST_COLUMNS:
        raise UnsupportedError(
            f"results of {width} columns have no kernel here", expected=f"at most {_MOST_COLUMNS}"
        )
    for v, op in zip(values, joined, strict=True):
        result = row_width(v, rows)
        of_parts = {row_width(x, rows) for x in op.values} if op else {result}
        if op is not None and (of_parts != {width} or result != len(op.values) * width):
            raise Inexpressible(
                op, f"a cat of parts that are not of {width} columns has no kernel here"
            )
        if op is None and result not in (width, known(product.outputs[0].type.shape[1])):
            raise UnsupportedError(
                f"results of {' and '.join(map(str, sorted(widths)))} columns are stored",
                expected="one width",
            )
    return width


def _need_width(fusion: Fusion, width: int, product: Op, beside: Sequence[Value]) -> None:
    """Inexpressible unless values computed next to a product have rows of a tile's width."""
    for v in beside:
        if row_width(v, product.outputs[0].type.shape[0]) != width:
            raise Inexpressible(
                fusion.producers[v],
                f"{v.name} {v.type} beside a product, whose tiles are "
                f"{width} wide, has no kernel here",
            )


def _places(joined: Op) -> Iterator[Index]:
    """The position of column j of each tensor of a `cat` in a row of the result."""
    shape, dim = joined.outputs[0].type.shape[1:], joined.attrs["dim"] - 1
    start = 0
    for x in joined.values:
        at = unflat(Variable("j"), x.type.shape[1:])
        yield flat([i + Number(start) if d == dim else i for d, i in enumerate(at)], shape)
        start += known(x.type.shape[joined.attrs["dim"]])


def base_of(fusion: Fusion, v: Value) -> Value:
    """The value whose memory v is, element for element in the same order: v itself, or what it was
    before reshapes, partitions, `ends` and casts to the same dtype.
    """
    op = fusion.producer(v, "ends", "partition", "reshape", "cast")
    if op is None or op.values[0].type.dtype != v.type.dtype:
        return v
    return base_of(fusion, op.values[0])


def made_by_route(fusion: Fusion, v: Value) -> str:
    """ "ends", "row_of" or "slot_of" for a result of a `route` of the fusion; "" for anything
    else.
    """
    base = base_of(fusion, v)
    op = fusion.producer(base, "route")
    return "" if op is None else ("ends", "row_of", "slot_of")[op.outputs.index(base)]


def below(fusion: Fusion, index: Value) -> object:
    """A size below which all elements of an index are, by the operation that made it; None if
    unknown.
    """
    op = fusion.producer(base_of(fusion, index), "topk_ids", "route", "invert")
    routed = made_by_route(fusion, index)
    if op is None or routed == "ends":
        return None
    shape = op.values[0].type.shape
    if op.kind.name == "topk_ids":
        return shape[1]
    return plain(shape[0]) if routed == "row_of" else elements(shape)


def _has_zeros(plan: ProductPlan, v: Value) -> bool:
    """Whether rows of no group are zeros in v, as they are in what products made."""
    op = plan.fusion.producer(v, *_OF_ZEROS)
    if v in plan.made or op is None:
        return v in plan.made
    if op.kind.name == "group_add" and v.type.shape[0] != plan.a.type.shape[0]:
        return False  # of other groups
    read = op.inputs if op.kind.name == "add" else op.inputs[:1]
    return all(isinstance(x, Value) and _has_zeros(plan, x) for x in read)


def _weight(fusion: Fusion, op: Op, readers: Readers) -> tuple[tuple[Value, ...], bool]:
    """The parts of the weight, which come from outside the segment, and whether its elements are
    transposed.
    """
    w = op.values[1]
    pack = fusion.producer(w, "pack")
    layouts = [layout for encoding, layout in readers if encoding == w.type.dtype]
    if not layouts or (w.type.quantized and pack is None):
        raise UnsupportedError(
            f"a weight {w.type} has no kernel here",
            expected=" or ".join(dict.fromkeys(e for e, _ in readers)),
        )
    if w.type.layout not in layouts:
        raise UnsupportedError(
            f"weights in the layout {w.type.layout} have no kernel here",
            expected=" or ".join(layouts),
        )
    parts = (w,) if pack is None else pack.values
    if missing := [v for v in parts if v not in fusion.inputs]:
        raise Inexpressible(
            fusion.producers[missing[0]],
            f"{missing[0].name} of the weight is computed in the same segment",
        )
    for d in w.type.shape:
        known(d)
    return parts, pack is not None and pack.attrs.get("transposed", False)


def row_width(v: Value, rows: Dim) -> int:
    """The number of elements that a value has for each of `rows`, whatever its shape: reshapes move
    nothing.
    """
    count = elements(v.type.shape)
    # any number of elements a row makes none: the last dimension's, as of a matrix
    if plain(rows) == 0 == count:
        return known(plain(v.type.shape[-1])) if len(v.type.shape) > 1 else 1
    width = exact_div(count, plain(rows))
    if not isinstance(width, int):
        raise UnsupportedError(f"{v.name} {v.type} is not a matrix of {rows} rows")
    return width


def known(d: object) -> int:
    """A size of a matrix as an int. UnsupportedError if only a call determines it (a symbol):
    kernels of products are compiled for the sizes of their weights.
    """
    if not isinstance(d, int):
        raise UnsupportedError(
            f"a matrix with a size {d} has no kernel here", expected="numbers known when compiling"
        )
    return d
