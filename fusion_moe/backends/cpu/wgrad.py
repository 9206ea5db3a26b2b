"""The C++ of a segment with a wgrad: rows of both operands, and storing a matrix's elements."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UnsupportedError
from ..cxx import Expression, Index, Variable, WgradPlan, inner, is_index, reshaped, size, stored
from .activations import ACTIVATION, row_function, row_pointer
from .segment import SegmentWriter, Source

_G, _J, _M = map(Variable, "gjm")  # element (m, j) of matrix g


def source(plan: WgradPlan) -> Source:
    """The C++ of a segment whose product is a gradient of weights. UnsupportedError, with the
    reason, for a piece that no kernel computes.
    """
    return Source(plan.fusion, _Writer(plan).text(), plan.memory, product=("", "wgrad", "linear"))


class _Writer(SegmentWriter):
    def __init__(self, plan: WgradPlan):
        super().__init__(plan.fusion, plan.memory)
        self.plan = plan

    def functions(self) -> list[str]:
        plan, product = self.plan, self.plan.product
        return [
            f"static constexpr i64 G = {plan.groups}, N = {plan.n}, K = {plan.k};",
            "",
            *row_function(self, "row", product.a, plan.n),
            "",
            *row_function(self, "other_row", product.b, plan.k),
            "",
            "void store(i64 g, i64 m, i64 j0, i64 count, const float* p) const {",
            *inner(self.store_run()),
            "}",
        ]

    def body(self) -> list[str]:
        plan, product = self.plan, self.plan.product
        self.ready(plan.memory)
        return [
            "Problem problem{};",
            f"problem.ends = {self.array(plan.ends)};",
            "problem.G = G, problem.N = N, problem.K = K, problem.rows = "
            f"{size(product.a.type.shape[0])};",
            f"problem.activation = {ACTIVATION[product.a.type.dtype]}, problem.other_activation = "
            f"{ACTIVATION[product.b.type.dtype]};",
            "problem.segment = this;",
            *row_pointer(product.a, "problem.row", "row"),
            *row_pointer(product.b, "problem.other_row", "other_row"),
            "problem.store = [](const void* segment, i64 m, i64 rows, i64 g, i64 j, i64 count, "
            "const float* p, i64 stride) {",
            "    for (i64 r = 0; r < rows; ++r) static_cast<const Segment*>(segment)->store(g, m "
            "+ r, j, count, p + r * stride);",
            "};",
            "product(&problem, &pool);",
        ]

    def store_run(self) -> list[str]:
        shape = self.plan.product.result.type.shape
        elements = self.elements(
            {self.plan.product.result: self._accumulator}, without=self.plan.results
        )
        stores = [
            f"{self.names[v]}[(g * N + m) * K + j] = stored<{stored(v)}>("
            f"{elements.of(v, reshaped([_G, _M, _J], shape, v.type.shape))});"
            for v in self.plan.results
        ]
        return [
            "#pragma omp simd",
            "for (i64 i = 0; i < count; ++i) {",
            "    const i64 j = j0 + i;",
            *inner([*elements.lines, *stores]),
            "}",
        ]

    def _accumulator(self, at: Sequence[Index]) -> Expression:
        shape = self.plan.product.result.type.shape
        if not all(is_index(i, own, d) for i, own, d in zip(at, (_G, _M, _J), shape, strict=True)):
            raise UnsupportedError("a result reads other elements of the product than its own")
        return Expression("p[i]", frozenset("j"))
