"""A product that is added to the accumulators of another, as an adapter's B (A x) to W x: see
kernels/added.cuh.
"""

from __future__ import annotations

from ...ir import Value
from ..cxx import ProductPlan, Variable, known
from ..inexpressible import Inexpressible
from .source import Source

_LANE = 4  # features that a lane multiplies
_M = Variable("m")


def accumulated(plan: ProductPlan) -> Value:
    """The value in a tile's accumulators: the product, or its sum with the added one. Inexpressible
    if they are not simply added.
    """
    if not plan.added:
        return plan.product.outputs[0]
    readers = {op for v in plan.made for op in plan.fusion.readers.get(v, ())}
    total = next(iter(readers), None)
    if (
        len(readers) != 1
        or total is None
        or total.kind.name != "add"
        or {*total.values} != {*plan.made}
        or {*plan.made} & {*plan.stored}
    ):
        raise _refusal(
            plan,
            "products whose results are not just added have no kernel here",
            "their sum, and nothing else of them",
        )
    return total.outputs[0]


def functions(source: Source, plan: ProductPlan) -> list[str]:
    """Its C++: ADDED, the number of contracted features; the rows; and a group's matrix, [N, ADDED]
    or, for a dgrad, [ADDED, N].
    """
    if not plan.added:
        return ["static constexpr i32 ADDED = 0;"]
    product, dtype = plan.added[0], plan.a.type.dtype
    features = known(product.size(product.contracted))
    row = source.elements().row_in_memory(product.a, _M, features)
    if (
        len(plan.added) > 1
        or {product.a.type.dtype, product.b.type.dtype} != {dtype}
        or features % _LANE
        or row is None
        or row[1] != _M
    ):
        types = " and ".join(f"{p.a.type} by {p.b.type}" for p in plan.added)
        raise _refusal(
            plan,
            f"no kernel adds {types} to another product",
            f"one product of {dtype} rows in memory, of a multiple of {_LANE} features",
        )
    return [
        f"static constexpr i32 ADDED = {features};  // that the added product contracts",
        f"static constexpr bool ADDED_TRANSPOSED = {str(product.kind == 'dgrad').lower()};  // "
        "whether its matrices are [ADDED, N]",
        f"__device__ const {dtype}* added_rows() const {{ return {source.names[row[0]]}; }}",
        f"__device__ const {dtype}* added_matrix(i64 g) const {{ return {source.names[product.b]} "
        f"+ g * (i64(N) * ADDED); }}",
    ]


def _refusal(plan: ProductPlan, text: str, expected: str) -> Inexpressible:
    """The error that keeps the products apart: the piece is divided at the later one."""
    later = max((plan.product, *(p.op for p in plan.added)), key=plan.fusion.ops.index)
    return Inexpressible(later, text, expected=expected)
