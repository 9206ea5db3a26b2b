"""The C++ of a grouped_gemm segment: the segment's own part, around the kernels in kernels/."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from ...errors import UnsupportedError
from ...ir.core import Op, Value
from ...ir.kinds.shape import elements
from ...ir.types import Dim, plain
from ..cxx.elements import STORED, Elements
from ..cxx.indices import Index, flat, number, reshaped, size
from ..cxx.plan import Plan, row_width, source

_ACTIVATION = {"f32": "OF_F32", "bf16": "OF_BF16", "f16": "OF_F16"}
_MOST_COLUMNS = 8  # of the product that one column of a result is made of
_M, _J, _K, _T, _G = Index("m"), Index("j"), Index("k"), Index("t"), "g"

_UNIT = Template("""\
#include "product.h"
#include "rows.h"

namespace {

struct Segment {
    static constexpr i64 K = $k, W = $width, F = $columns, G = $groups;
    using A = $a;

$members

    // Column j of the result is made of these of the product.
    struct Columns {
        i32 of[F][W];
        Columns() : of() {
            for (i64 j = 0; j < W; ++j) {
$cases
            }
        }
    };

    // What runs before the product: checks, routing. False if the reference would raise.
    bool first() const {
$first
        return true;
    }

    const A* row(i64 m, A* scratch) const {
$row
    }

    void store(i64 m, i64 g, i64 j0, i64 count, const float* p) const {
$store
    }

    void finish(i64 t) const {
$finish
    }

    int run(Product product, int threads) const {
        if (!first()) return BAD;
        Problem problem{};
        problem.codes = $codes, problem.scales = $scales, problem.decode = $decode, problem.ends = $ends;
        problem.G = G, problem.N = $n, problem.K = K, problem.runs = $runs, problem.rows = $rows, problem.W = W, problem.F = F;
        static const Columns columns;
        problem.columns = columns.of[0], problem.activation = $activation, problem.segment = this;
        problem.row = [](const void* segment, i64 m, void* scratch) -> const void* {
            return static_cast<const Segment*>(segment)->row(m, static_cast<A*>(scratch));
        };
        problem.store = [](const void* segment, i64 m, i64 rows, i64 g, i64 j, i64 count, const float* p, i64 stride) {
            for (i64 r = 0; r < rows; ++r) static_cast<const Segment*>(segment)->store(m + r, g, j, count, p + r * stride);
        };
        product(&problem, threads);
        for_rows($tokens, 1, threads, [&](i64 t) { finish(t); });
        return GOOD;
    }
};

}  // namespace

extern "C" int run(void* const* p, const long long* n, void* product, int threads) {
    const Segment segment{$arguments};
    return segment.run(reinterpret_cast<Product>(product), threads);
}
""")


def text(plan: Plan) -> str:
    """The source of a planned segment. UnsupportedError with the sentence why there is none."""
    return _Writer(plan).unit()


class _Writer:
    def __init__(self, plan: Plan):
        self.plan, self.fusion = plan, plan.fusion
        self.memory = {v: v.name for v in (*plan.fusion.inputs, *plan.memory)}
        self.columns: list[str] = []  # C++ of the columns of the product that are read, as functions of j
        self.ends = self.array(plan.ends)

    def unit(self) -> str:
        plan = self.plan
        store = self.store()  # finds the columns
        codes, scales, decode = (self.memory[v] for v in plan.weight)
        runs = plan.weight[2].type.shape[1:] or (1,)
        return _UNIT.substitute(
            k=plan.k, n=plan.n, width=plan.width, columns=len(self.columns),
            groups=plan.weight[0].type.shape[0], a=STORED[plan.a.type.dtype], members=_indented(self.members(), 4),
            cases=_indented([f"of[{f}][j] = i32({column});" for f, column in enumerate(self.columns)], 16),
            first=_indented(self.first(), 8), row=_indented(self.row(), 8), store=_indented(store, 8), finish=_indented(self.finish(), 8),
            codes=codes, scales=scales, decode=decode, runs=runs[0], ends=self.ends, rows=self.rows(),
            activation=_ACTIVATION[plan.a.type.dtype],
            tokens=size(plan.combine.outputs[0].type.shape[0]) if plan.combine else 0, arguments=self.arguments(),
        )  # fmt: skip

    # What is passed ---------------------------------------------------------------------------------------------------

    def members(self) -> list[str]:
        sizes = [f"i64 n_{s};" for s in self.fusion.symbols]
        inputs = [f"const {_stored(v)}* {v.name};  // {v.type}" for v in self.fusion.inputs]
        return sizes + inputs + [f"{_stored(v)}* {v.name};  // {v.type}" for v in self.plan.memory]

    def arguments(self) -> str:
        values = [(v, "const ") for v in self.fusion.inputs] + [(v, "") for v in self.plan.memory]
        pointers = [f"static_cast<{const}{_stored(v)}*>(p[{i}])" for i, (v, const) in enumerate(values)]
        return ", ".join([f"n[{i}]" for i in range(len(self.fusion.symbols))] + pointers)

    def rows(self) -> Index:
        return size(self.plan.a.type.shape[0])

    def array(self, v: Value) -> str:
        """The name of the array that holds a value, views and reshapes looked through."""
        found = source(self.fusion, v)
        if found not in self.memory:
            raise UnsupportedError(f"{v.name} {v.type} is not in memory before the product")
        return self.memory[found]

    # Before the product -----------------------------------------------------------------------------------------------

    def first(self) -> list[str]:
        given = [v for v in self.fusion.inputs if v.type.ends]
        lines = [f"if (!good_ends({v.name}, {size(v.type.shape[0])}, {self.rows()})) return false;" for v in given]
        for op in self.fusion.ops:
            write = getattr(self, f"_first_{op.kind.name}", None)
            lines += write(op) if write else []
        return lines

    def _first_ends(self, op: Op) -> list[str]:
        (offs,) = op.values
        return [f"if (!good_ends({self.array(offs)}, {size(offs.type.shape[0])}, {size(op.attrs['rows'])})) return false;"]

    def _first_route(self, op: Op) -> list[str]:
        (ids,), (t, slots) = op.values, op.values[0].type.shape
        made = ", ".join(self.memory[v] for v in op.outputs)
        return [f"if (!route({self.array(ids)}, {size(t)}, {size(slots)}, {size(op.attrs['groups'].count)}, {made})) return false;"]

    def _first_invert(self, op: Op) -> list[str]:
        (slot_of,), count = op.values, size(op.attrs["rows"])
        array = self.array(slot_of)
        made = f"for (i64 i = 0; i < {count}; ++i) {self.memory[op.outputs[0]]}[{array}[i]] = i32(i);"
        return [*self._checked(slot_of, op.attrs["rows"]), made]

    def _first_index_select(self, op: Op) -> list[str]:
        return self._checked(op.values[1], op.values[0].type.shape[op.attrs["dim"]])

    def _first_combine(self, op: Op) -> list[str]:
        return self._checked(op.values[1], op.values[0].type.shape[0])

    def _checked(self, index: Value, limit: Dim) -> list[str]:
        """The check that all of an index lies below a limit, unless what made it says so."""
        if self._below(index) == plain(limit):
            return []
        count = size(elements(index.type.shape))
        return [f"if (!all_below({self.array(index)}, {count}, {size(limit)})) return false;"]

    def _below(self, index: Value) -> object:
        made = source(self.fusion, index)
        op = self.fusion.producers.get(made)
        if op is None or op.kind.name not in ("route", "invert"):
            return None
        shape = op.values[0].type.shape
        return plain(shape[0]) if op.kind.name == "route" and made is op.outputs[1] else elements(shape)

    # The rows of activations ------------------------------------------------------------------------------------------

    def row(self) -> list[str]:
        elements = Elements(self.fusion, self.memory)
        where = self._row_in_memory(elements, self.plan.a, _M)
        if where is not None:
            return [*elements.lines, "(void)scratch;", f"return {where};"]
        elements = Elements(self.fusion, self.memory)
        made = elements.of(self.plan.a, [_M, _K])
        a = STORED[self.plan.a.type.dtype]
        return ["for (i64 k = 0; k < K; ++k) {", *_inner(elements.lines), f"    scratch[k] = narrow<{a}>({made});", "}", "return scratch;"]

    def _row_in_memory(self, elements: Elements, v: Value, m: Index) -> str | None:
        """Where row m of a value lies, if it is a row of something in memory."""
        op = self.fusion.producers.get(v)
        if v in self.memory:
            return f"{self.memory[v]} + {m} * K"
        if op is None or plain(op.values[0].type.shape[-1]) != self.plan.k:
            return None
        if op.kind.name in ("cut", "reshape"):
            return self._row_in_memory(elements, op.values[0], m)
        if op.kind.name == "index_select" and op.attrs["dim"] == 0 and len(v.type.shape) == 2:
            return self._row_in_memory(elements, op.values[0], Index(elements.of(op.values[1], [m])))
        return None

    # What is stored for rows of groups --------------------------------------------------------------------------------

    def store(self) -> list[str]:
        plan, rows = self.plan, self.plan.a.type.shape[0]
        elements = Elements(self.fusion, self.memory_before(), {plan.product.outputs[0]: self._column}, _G)
        lanes, after = [], []
        for i, v in enumerate(plan.rows):
            made = elements.of(v, reshaped([_M, _J], (rows, plan.width), v.type.shape))
            lanes.append(f"r{i}[i] = {made};")
            after.append(f"store_lanes({v.name} + m * W + j0, r{i}, count);")
        arrays = [f"{'float' if v.type.dtype in ('f32', 'bf16', 'f16') else _stored(v)} r{i}[LANES];" for i, v in enumerate(plan.rows)]
        column = "j0 + i" if plan.width % 16 == 0 else "std::min<i64>(j0 + i, W - 1)"
        body = [f"const i64 j = {column};", *elements.lines, *lanes]
        loop = ["#pragma omp simd", "for (int i = 0; i < LANES; ++i) {", *_inner(body), "}"]
        return ["(void)g;", *arrays, *loop, *after]

    def memory_before(self) -> dict[Value, str]:
        """What is in memory while tiles are stored."""
        return {v: name for v, name in self.memory.items() if v not in self.plan.rows and v not in self.plan.tokens}

    def _column(self, at: Sequence[Index]) -> str:
        row, column = map(str, at)
        if row != str(_M):
            raise UnsupportedError("a result reads other rows of the product than its own")
        if column not in self.columns:
            self.columns.append(column)
        if len(self.columns) > _MOST_COLUMNS:
            raise UnsupportedError(f"a result reads more than {_MOST_COLUMNS} columns of the product")
        return f"p[{self.columns.index(column)} * LANES + i]"

    # What is stored for tokens ----------------------------------------------------------------------------------------

    def finish(self) -> list[str]:
        if self.plan.combine is None:
            return ["(void)t;"]
        y, slot_of, w = self.plan.combine.values
        (total,) = self.plan.combine.outputs
        n, slots = size(y.type.shape[1]), size(slot_of.type.shape[1])
        elements = Elements(self.fusion, self.memory_before())
        slot, weight = (elements.of(v, [_T, Index("s")]) for v in (slot_of, w))
        lines = [
            f"float total[{n}] = {{}};",
            f"for (i64 s = 0; s < {slots}; ++s) {{",
            *_inner(elements.lines),
            f"    const {_stored(y)}* y = {y.name} + {slot} * {n};",
            "#pragma omp simd",
            f"    for (i64 j = 0; j < {n}; ++j) total[j] += widen(y[j]) * {weight};",
            "}",
        ]
        for v in self.plan.tokens:
            width = row_width(v, total.type.shape[0])
            elements = Elements(self.fusion, self.memory_before(), {total: lambda at: f"total[{at[1]}]"})
            made = elements.of(v, reshaped([_T, _J], (total.type.shape[0], width), v.type.shape))
            store = f"{v.name}[{flat([_T, _J], (total.type.shape[0], width))}] = stored<{_stored(v)}>({made});"
            lines += ["#pragma omp simd", f"for (i64 j = 0; j < {number(width)}; ++j) {{", *_inner([*elements.lines, store]), "}"]
        return lines


def _stored(v: Value) -> str:
    """The C++ type that a value's elements have in memory."""
    if v.type.dtype == "f8e4m3":
        return "u8"
    if v.type.dtype not in STORED:
        raise UnsupportedError(f"{v.type} has no kernel here")
    return STORED[v.type.dtype]


def _inner(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)
