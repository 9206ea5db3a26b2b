"""The C++ of a segment with an fprop or dgrad, which makes rows: the segment's own code around the
kernels in kernels/.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...errors import UnsupportedError
from ...ir import Value
from ..cxx import (
    Elements,
    Epilogue,
    Expression,
    Index,
    ProductPlan,
    Variable,
    follow,
    formula,
    inner,
    is_index,
    known,
    size,
    stored,
)
from ..cxx.product_plan import row_width
from .activations import ACTIVATION, row_function, row_pointer
from .readers import PARTS
from .segment import SegmentWriter, Source

_MAX_COLUMNS = 8  # of the product, from which one column of a result is made
_J, _S, _T = map(Variable, "jst")


def source(plan: ProductPlan) -> Source:
    """The source of a planned segment. UnsupportedError with the reason if there is none."""
    if len(plan.weight) > PARTS:
        raise UnsupportedError(
            f"weights of {len(plan.weight)} parts have no kernel here", expected=f"at most {PARTS}"
        )
    transposed = plan.weight[0] if plan.transposed else None
    headers = ("added.h",) if plan.added else ()
    kind = plan.product.attrs.get("operands") or plan.kind
    return Source(
        plan.fusion,
        _Writer(plan).text(),
        plan.memory,
        transposed,
        (plan.encoding.name, kind, plan.layout),
        headers,
    )


class _Writer(SegmentWriter):
    def __init__(self, plan: ProductPlan):
        super().__init__(plan.fusion, plan.memory)
        self.plan = plan
        # tiles of the product, and of the products beside it
        self.tiles = ["p", *(f"p{i}" for i, _ in enumerate(plan.added, 1))]
        self.epilogue = Epilogue(
            self,
            plan,
            {v: f"{tile}[{{}} * LANES + i]" for v, tile in zip(plan.made, self.tiles, strict=True)},
        )
        self.partials = [f"partial_{i}" for i in range(len(plan.sums))]

    def functions(self) -> list[str]:
        store = self.store_lanes()  # this collects the columns
        columns = self.epilogue.columns
        tiles = ", ".join(f"const float* {tile}" for tile in self.tiles)
        return [
            f"static constexpr i64 W = {self.plan.width}, F = {len(columns)}, G = "
            f"{self.plan.groups}, BLOCKS = (W + LANES - 1) / LANES;",
            *(
                f"mutable float* {partial} = nullptr;  // of the sum of each row, for each "
                "LANES columns"
                for partial in self.partials
            ),
            "",
            "// Column j of the result is made of these of the product.",
            "struct Columns {",
            "    i32 of[F][W];",
            "    Columns() : of() {",
            "        for (i64 j = 0; j < W; ++j) {",
            *(f"            of[{f}][j] = i32({column});" for f, column in enumerate(columns)),
            "        }",
            "    }",
            "};",
            "",
            *row_function(self, "row", self.plan.a, self.plan.k),
            *self.added_functions(),
            "",
            f"void store(i64 m, i64 g, i64 j0, i64 count, {tiles}) const {{",
            *inner(store),
            "}",
            "",
            f"void store_run(i64 m, i64 g, i64 j0, i64 count, {tiles}) const {{",
            *inner(self.store_run()),
            "}",
            "",
            "void finish(i64 t, i64 j0, i64 j1) const {",
            *inner(self.finish()),
            "}",
            "",
            "void finish_row(i64 m) const {",
            *inner(self.finish_row()),
            "}",
        ]

    def body(self) -> list[str]:
        plan, rows = self.plan, size(self.plan.a.type.shape[0])
        n, k = plan.product.values[1].type.shape[1:]
        return [
            "Problem problem{};",
            *(f"problem.parts[{i}] = {self.names[v]};" for i, v in enumerate(plan.weight)),
            *([f"const i32 last[] = {{i32({rows})}};"] if plan.of_one_group else []),
            f"problem.ends = {'last' if plan.of_one_group else self.array(plan.ends)};",
            f"problem.G = G, problem.N = {n}, problem.K = {k}, problem.runs = {plan.scale_runs}, "
            f"problem.rows = {self._end if self._leaves_rest else rows};",
            "static const Columns columns;",
            "problem.W = W, problem.F = F, problem.columns = columns.of[0];",
            f"problem.activation = {ACTIVATION[plan.a.type.dtype]}, problem.segment = this;",
            *(["problem.row_order = true;"] if plan.row_order else []),
            *row_pointer(plan.a, "problem.row", "row"),
            "problem.store = [](const void* segment, i64 m, i64 rows, i64 g, i64 j, i64 count, "
            "const float* p, i64 stride) {",
            *inner(self.store_tile()),
            "};",
            *self.added_problems(),
            *(
                f"std::vector<float> of_{p}({rows} * BLOCKS); {p} = of_{p}.data();"
                for p in self.partials
            ),
            "product(&problem, &pool);",
            *(
                [f"for_rows({rows}, 16, pool, [&](i64 m) {{ finish_row(m); }});"]
                if self.partials
                else []
            ),
            *self.finish_tokens(),
        ]

    @property
    def _end(self) -> str:
        """The row after the last group's."""
        return f"{self.array(self.plan.ends)}[G - 1]"

    @property
    def _leaves_rest(self) -> bool:
        """Whether rows of no group stay unwritten: only sums read rows, which leave these out."""
        plan = self.plan
        return plan.sums_groups and not plan.sums and {*plan.fusion.outputs}.isdisjoint(plan.rows)

    # Results for rows of groups -------------------------------------------------------------------

    def store_lanes(self) -> list[str]:
        """Stores sixteen columns of all results, and their sums."""
        plan, elements = self.plan, self.epilogue.elements()
        values = [*plan.rows, *(op.values[0] for op in plan.sums)]
        arrays, lanes, results = list[str](), list[str](), dict[Value, list[tuple[str, Index]]]()
        # this one reads the columns that the others have read
        for v in sorted(dict.fromkeys(values), key=lambda v: plan.parts(v) is None):
            results[v] = [
                (f"r{len(arrays) + i}", place)
                for i, place in enumerate(plan.parts(v) or self.epilogue.every_column())
            ]
            for name, place in results[v]:
                arrays.append(
                    f"{'float' if v.type.dtype in ACTIVATION else stored(v)} {name}[LANES];"
                )
                lanes.append(f"{name}[i] = {elements.of(v, self.epilogue.at(v, place))};")
        if len(self.epilogue.columns) > _MAX_COLUMNS:
            raise UnsupportedError(
                f"a result reads more than {_MAX_COLUMNS} columns of the product"
            )
        column = "j0 + i" if plan.width % 16 == 0 else "std::min<i64>(j0 + i, W - 1)"
        loop = [
            "#pragma omp simd",
            "for (int i = 0; i < LANES; ++i) {",
            f"    const i64 j = {column};",
            *inner([*elements.lines, *lanes]),
            "}",
        ]
        stores = [
            line
            for v in plan.rows
            for name, place in results[v]
            for line in self._stored(v, name, place)
        ]
        sums = []
        for partial, op in zip(self.partials, plan.sums, strict=True):
            terms = " + ".join(f"sum_lanes({name}, count)" for name, _ in results[op.values[0]])
            sums.append(f"{partial}[m * BLOCKS + j0 / LANES] = {terms};")
        return ["(void)g;", *arrays, *loop, *stores, *sums]

    def _stored(self, v: Value, name: str, place: Index) -> list[str]:
        """Stores sixteen columns of a value, contiguous or not."""
        row = f"{self.names[v]} + m * {self.plan.width_of(v)}"
        if follow(place, 16, 1):
            return [
                "{",
                "    const i64 j = j0;",
                f"    store_lanes({row} + {place}, {name}, count);",
                "}",
            ]
        each = [
            "    const i64 j = j0 + i;",
            f"    ({row})[{place}] = held<{stored(v)}>({name}[i]);",
        ]
        return ["for (i64 i = 0; i < count; ++i) {", *each, "}"]

    def store_run(self) -> list[str]:
        """Stores sixteen columns after sixteen columns, while the memory of the next ones is
        prefetched.
        """
        ahead = [
            f"fetch_row({self.names[v]} + m * W + j0, W, count);"
            for v in self.plan.rows
            if self.plan.width_of(v) == self.plan.width
        ]
        step = ", ".join(f"{tile} += F * LANES" for tile in self.tiles)
        store = f"store(m, g, j0 + i, std::min<i64>(LANES, count - i), {', '.join(self.tiles)});"
        return [*ahead, f"for (i64 i = 0; i < count; i += LANES, {step}) {store}"]

    # Products beside it ---------------------------------------------------------------------------

    def added_functions(self) -> list[str]:
        """The rows of added products, and the objects that multiply them while `run` runs."""
        lines = list[str]()
        for product, tile in zip(self.plan.added, self.tiles[1:], strict=True):
            vectors = f"Added{product.kind.title()}<{stored(product.b)}>"
            width = known(product.size(product.contracted))
            lines += [
                "",
                *row_function(self, f"row_{tile}", product.a, width),
                f"using Of_{tile} = Added<{self.tiles.index(tile)}, {vectors}, "
                f"{stored(product.a)}>;",
                f"mutable const Of_{tile}* of_{tile} = nullptr;",
            ]
        return lines

    def added_problems(self) -> list[str]:
        """Problems like the product's own, except for rows and weight."""
        lines = list[str]()
        for product, tile in zip(self.plan.added, self.tiles[1:], strict=True):
            n, k = product.b.type.shape[1:]
            lines += [
                f"Problem problem_{tile} = problem;",
                f"problem_{tile}.parts[0] = {self.names[product.b]}, problem_{tile}.N = "
                f"{n}, problem_{tile}.K = {k};",
                *row_pointer(product.a, f"problem_{tile}.row", f"row_{tile}"),
                f"const Of_{tile} made_{tile}(problem_{tile});",
                f"of_{tile} = &made_{tile};",
            ]
        return lines

    def store_tile(self) -> list[str]:
        """Stores rows of a tile together with those of the added products."""
        added = self.tiles[1:]
        if not added:
            return [
                "for (i64 r = 0; r < rows; ++r) static_cast<const "
                "Segment*>(segment)->store_run(m + r, g, j, count, p + r * stride);"
            ]
        rows = ", ".join(f"{tile} + r * of_row" for tile in added)
        return [
            "const Segment& s = *static_cast<const Segment*>(segment);",
            "const i64 of_row = (count + LANES - 1) / LANES * F * LANES;",
            *(f"const float* {tile} = s.of_{tile}->tile(m, rows, g, j, count);" for tile in added),
            "for (i64 r = 0; r < rows; ++r) s.store_run(m + r, g, j, count, p + r * stride, "
            f"{rows});",
        ]

    def finish_row(self) -> list[str]:
        """The sum of a row, from the sums of its columns in order."""
        lines = [
            f"{self.names[v]}[m] = stored<{stored(v)}>(float(std::accumulate("
            f"{partial} + m * BLOCKS, {partial} + (m + 1) * BLOCKS, 0.)));"
            for partial, v in zip(self.partials, self.plan.summed, strict=True)
        ]
        return lines or ["(void)m;"]

    # Results for tokens ---------------------------------------------------------------------------

    def finish_tokens(self) -> list[str]:
        if self.plan.combine is None:
            return []
        tokens, width = map(size, self.plan.combine.outputs[0].type.shape)
        if self._by_columns:
            each = "[&](i64 t, i64 j0, i64 j1) { finish(t, j0, j1); }"
            return [f"for_tiles({tokens}, {width}, pool, {each});"]
        return [f"for_rows({tokens}, 1, pool, [&](i64 t) {{ finish(t, 0, {width}); }});"]

    @cached_property
    def _by_columns(self) -> bool:
        """Whether each column that is stored for a token reads only the same column of the sum."""
        assert self.plan.combine is not None
        (total,), read = self.plan.combine.outputs, list[Index]()
        for v in self.plan.tokens:
            self._put_token(self.elements({total: lambda at: self._total(at, read)}), v, total)
        return all(
            row_width(v, total.type.shape[0]) == total.type.shape[1] for v in self.plan.tokens
        ) and all(j == _J for j in read)

    def finish(self) -> list[str]:
        """Columns j0 .. j1 - 1 of the sum of a token's rows, and the results that are computed from
        it.
        """
        if self.plan.combine is None:
            return ["(void)t, (void)j0, (void)j1;"]
        y, slot_of, w = self.plan.combine.values
        (total,) = self.plan.combine.outputs
        n, slots = size(y.type.shape[1]), size(slot_of.type.shape[1])
        elements = self.elements()
        slot, weight = (elements.of(v, [_T, _S]) for v in (slot_of, w))
        lines = [
            f"float total[{'COLUMNS' if self._by_columns else n}] = {{}};",
            f"for (i64 s = 0; s < {slots}; ++s) {{",
            *inner(elements.lines),
            *([f"    if ({slot} >= {self._end}) continue;"] if self.plan.sums_groups else []),
            f"    add_row(total, {self.names[y]} + {slot} * {n} + j0, {weight}, j1 - j0);",
            "}",
        ]
        for v in self.plan.tokens:
            columns = (
                "i64 j = j0; j < j1"
                if self._by_columns
                else (f"i64 j = 0; j < {row_width(v, total.type.shape[0])}")
            )
            elements = self.elements({total: self._total})
            store = self._put_token(elements, v, total)
            lines += [
                "#pragma omp simd",
                f"for ({columns}; ++j) {{",
                *inner([*elements.lines, store]),
                "}",
            ]
        return lines

    def _put_token(self, elements: Elements, v: Value, total: Value) -> str:
        return self.put(
            elements, v, (total.type.shape[0], row_width(v, total.type.shape[0])), _T, _J
        )

    def _total(self, at: Sequence[Index], read: list[Index] | None = None) -> Expression:
        assert self.plan.combine is not None
        if not is_index(at[0], _T, self.plan.combine.outputs[0].type.shape[0]):
            raise UnsupportedError("a result reads the sums of other tokens than its own")
        if read is not None:
            read.append(at[1])
        return formula("total[{} - j0]", at[1])
