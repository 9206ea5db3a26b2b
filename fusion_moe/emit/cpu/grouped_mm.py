"""The C++ of a grouped_gemm segment: the segment's own part, around the kernels in kernels/."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UnsupportedError
from ..cxx.elements import STORED, stored
from ..cxx.epilogue import Epilogue
from ..cxx.indices import Index, Variable, is_index, size
from ..cxx.plan import Plan, row_width
from ..cxx.statements import Expression, formula, inner
from .readers import PARTS
from .segment import SegmentWriter, Source

_ACTIVATION = {"f32": "OF_F32", "bf16": "OF_BF16", "f16": "OF_F16"}
_MAX_COLUMNS = 8  # of the product that one column of a result is made of
_J, _K, _M, _S, _T = map(Variable, "jkmst")


def source(plan: Plan) -> Source:
    """The source of a planned segment. UnsupportedError with the sentence why there is none."""
    if len(plan.weight) > PARTS:
        raise UnsupportedError(f"weights of {len(plan.weight)} parts have no kernel here", expected=f"at most {PARTS}")
    return Source(plan.fusion, _Writer(plan).text(), plan.memory, plan.weight[0] if plan.transposed else None, plan.encoding.name)


class _Writer(SegmentWriter):
    def __init__(self, plan: Plan):
        super().__init__(plan.fusion, plan.memory)
        self.plan = plan
        self.epilogue = Epilogue(self, plan, "p[{} * LANES + i]")

    def functions(self) -> list[str]:
        a, store = STORED[self.plan.a.type.dtype], self.store_lanes()  # which finds the columns
        columns = self.epilogue.columns
        return [
            f"static constexpr i64 K = {self.plan.k}, W = {self.plan.width}, F = {len(columns)}, G = {self.groups};",
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
            f"const {a}* row(i64 m, {a}* scratch) const {{",
            *inner(self.row()),
            "}",
            "",
            "void store(i64 m, i64 g, i64 j0, i64 count, const float* p) const {",
            *inner(store),
            "}",
            "",
            "void store_run(i64 m, i64 g, i64 j0, i64 count, const float* p) const {",
            *inner(self.store_run()),
            "}",
            "",
            "void finish(i64 t) const {",
            *inner(self.finish()),
            "}",
        ]

    def body(self) -> list[str]:
        plan = self.plan
        parts = zip(plan.encoding.parts, plan.weight, strict=True)
        runs = [n for part, v in parts if part.of_matrix for n in v.type.shape[1:]] or [1]
        a, tokens = STORED[plan.a.type.dtype], size(plan.combine.outputs[0].type.shape[0]) if plan.combine else 0
        return [
            "Problem problem{};",
            *(f"problem.parts[{i}] = {self.names[v]};" for i, v in enumerate(plan.weight)),
            f"problem.ends = {self.array(plan.ends)};",
            f"problem.G = G, problem.N = {plan.n}, problem.K = K, problem.runs = {runs[0]}, problem.rows = {size(plan.a.type.shape[0])};",
            "static const Columns columns;",
            "problem.W = W, problem.F = F, problem.columns = columns.of[0];",
            f"problem.activation = {_ACTIVATION[plan.a.type.dtype]}, problem.segment = this;",
            "problem.row = [](const void* segment, i64 m, void* scratch) -> const void* {",
            f"    return static_cast<const Segment*>(segment)->row(m, static_cast<{a}*>(scratch));",
            "};",
            "problem.store = [](const void* segment, i64 m, i64 rows, i64 g, i64 j, i64 count, const float* p, i64 stride) {",
            "    for (i64 r = 0; r < rows; ++r) static_cast<const Segment*>(segment)->store_run(m + r, g, j, count, p + r * stride);",
            "};",
            "product(&problem, threads);",
            f"for_rows({tokens}, 1, threads, [&](i64 t) {{ finish(t); }});",
        ]

    @property
    def groups(self) -> object:
        """How many matrices there are."""
        return self.plan.weight[0].type.shape[0]

    # The rows of activations ------------------------------------------------------------------------------------------

    def row(self) -> list[str]:
        elements = self.elements()
        found = elements.row_in_memory(self.plan.a, _M, self.plan.k)
        if found is not None:
            matrix, row = found
            return [*elements.lines, "(void)scratch;", f"return {self.names[matrix]} + {row} * K;"]
        elements = self.elements()
        made = elements.of(self.plan.a, [_M, _K])
        a = STORED[self.plan.a.type.dtype]
        return ["for (i64 k = 0; k < K; ++k) {", *inner(elements.lines), f"    scratch[k] = narrow<{a}>({made});", "}", "return scratch;"]

    # What is stored for rows of groups --------------------------------------------------------------------------------

    def store_lanes(self) -> list[str]:
        plan, elements = self.plan, self.epilogue.elements()
        lanes, after = [], []
        for i, v in enumerate(plan.rows):
            made = elements.of(v, self.epilogue.at(v))
            lanes.append(f"r{i}[i] = {made};")
            after.append(f"store_lanes({self.names[v]} + m * W + j0, r{i}, count);")
        if len(self.epilogue.columns) > _MAX_COLUMNS:
            raise UnsupportedError(f"a result reads more than {_MAX_COLUMNS} columns of the product")
        arrays = [f"{'float' if v.type.dtype in ('f32', 'bf16', 'f16') else stored(v)} r{i}[LANES];" for i, v in enumerate(plan.rows)]
        column = "j0 + i" if plan.width % 16 == 0 else "std::min<i64>(j0 + i, W - 1)"
        body = [f"const i64 j = {column};", *elements.lines, *lanes]
        loop = ["#pragma omp simd", "for (int i = 0; i < LANES; ++i) {", *inner(body), "}"]
        return ["(void)g;", *arrays, *loop, *after]

    def store_run(self) -> list[str]:
        """Sixteen columns after the other, while what is written next comes nearer."""
        ahead = [f"fetch_row({self.names[v]} + m * W + j0, W, count);" for v in self.plan.rows]
        return [*ahead, "for (i64 i = 0; i < count; i += LANES, p += F * LANES) store(m, g, j0 + i, std::min<i64>(LANES, count - i), p);"]

    # What is stored for tokens ----------------------------------------------------------------------------------------

    def finish(self) -> list[str]:
        if self.plan.combine is None:
            return ["(void)t;"]
        y, slot_of, w = self.plan.combine.values
        (total,) = self.plan.combine.outputs
        n, slots = size(y.type.shape[1]), size(slot_of.type.shape[1])
        elements = self.elements()
        slot, weight = (elements.of(v, [_T, _S]) for v in (slot_of, w))
        lines = [
            f"float total[{n}] = {{}};",
            f"for (i64 s = 0; s < {slots}; ++s) {{",
            *inner(elements.lines),
            f"    const {stored(y)}* y = {self.names[y]} + {slot} * {n};",
            "#pragma omp simd",
            f"    for (i64 j = 0; j < {n}; ++j) total[j] += widen(y[j]) * {weight};",
            "}",
        ]
        for v in self.plan.tokens:
            width = row_width(v, total.type.shape[0])
            elements = self.elements({total: self._total})
            store = self.put(elements, v, (total.type.shape[0], width), _T, _J)
            lines += ["#pragma omp simd", f"for (i64 j = 0; j < {width}; ++j) {{", *inner([*elements.lines, store]), "}"]
        return lines

    def _total(self, at: Sequence[Index]) -> Expression:
        assert self.plan.combine is not None
        if not is_index(at[0], _T, self.plan.combine.outputs[0].type.shape[0]):
            raise UnsupportedError("a result reads the sums of other tokens than its own")
        return formula("total[{}]", at[1])
