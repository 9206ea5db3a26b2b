"""The source of a planned product: the ways to compute it, as data, and which one is taken for how
many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...arch import Arch
from ...errors import UnsupportedError
from ...ir import Fusion, Op, Value, value
from ...runtime import cuda
from ...schedule.product import products
from ..cxx import ACTIVATIONS, ProductPlan, need_one_width, plan_product, plan_wgrad
from ..inexpressible import Inexpressible
from . import fp8, gemm, reordering
from .fp8 import ByCodes, CodesWgrad, DecodedRows
from .gemm import Gemm, Wgrad
from .grouped_mm import UNQUANTIZED, ByVariants, PlannedSource
from .heuristics import AUTO, Chosen
from .readers import readable
from .reordering import Reordered
from .source import Array, KernelSource, Sizes, Source
from .table import table_of


@dataclass(frozen=True)
class Way:
    """A way to compute a product. change: of a table's changes, the one from whose number of rows
    on it is taken before others, and with any number under the option order="row"; "": one that
    fits any number.
    """

    source: PlannedSource
    change: str = ""


class Product(PlannedSource):
    """The source of a planned fprop or dgrad: the first of its ways that takes a call. Each has a
    struct of its own, with its own scratch arrays.
    """

    def __init__(self, plan: ProductPlan, *ways: Way):
        super().__init__(plan, ())
        self.ways = ways
        self.scratch = [*dict.fromkeys(a for way in ways for a in way.source.scratch)]
        rows = (a for a in self.scratch if a.name == UNQUANTIZED and a.type == "bf16")
        self.unquantized = next(rows, None)
        of_any_rows = (way.source for way in ways if not way.change)
        self.by_variants = next((way for way in of_any_rows if isinstance(way, ByVariants)), None)

    @property
    def matrix(self) -> Value | None:
        """The value [M, K] in memory whose rows are the product's activations; None if there is
        none, or none that kernels of variants may read where it is.
        """
        return self.by_variants.matrix if self.by_variants else None

    @property
    def in_any_order(self) -> tuple[Value, int] | None:
        """As in `Source`: by kernels of variants."""
        return self.by_variants.in_any_order if self.by_variants else None

    @property
    def routing_of_few(self) -> Op | None:
        """As in `ByVariants`."""
        return self.by_variants.routing_of_few if self.by_variants else None

    def takes_few_ids(self, chosen: Chosen, sizes: Sizes) -> bool:
        """As in `Source`: by kernels of variants."""
        way = self.ways[chosen.way].source
        return way is self.by_variants and way.takes_few_ids(chosen, sizes)

    def rounds(self, chosen: Chosen, arch: Arch) -> bool:
        """As in `Source`: by the chosen way."""
        return self.ways[chosen.way].source.rounds(chosen, arch)

    def choose(self, sizes: Sizes | None, arch: Arch, variant: str = AUTO) -> Chosen:
        """The choice of the first way that takes the sizes. A variant that is asked for is looked
        for in those of any number of rows alone.
        """
        why = UnsupportedError("no kernel")
        for i, way in enumerate(self.ways):
            if way.change and not (variant == AUTO and self._many(way.change, sizes, arch)):
                continue
            try:
                return replace(way.source.choose(sizes, arch, variant), way=i)
            except UnsupportedError as error:
                why = error
        raise why

    def _many(self, change: str, sizes: Sizes | None, arch: Arch) -> bool:
        """Whether the rows are so many; in row order all numbers of them are one kernel's."""
        if self.plan.row_order or sizes is None:
            return self.plan.row_order
        assert self.by_variants  # which no way with a change is without
        rows, matrices = value(self.rows, sizes), self.by_variants.matrices
        return table_of(arch).many(change, rows, matrices)

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """Those of the chosen way."""
        return self.ways[chosen.way].source.kernels(chosen, sizes, arch)

    def arrays_of(self, chosen: Chosen) -> list[int]:
        """As in `Source`: those of the chosen way."""
        own: list[Value | Array] = [*self.memory, *self.ways[chosen.way].source.scratch]
        return [self.array_number(a) for a in (*self.fusion.inputs, *own)]

    def uses(self, array: Array, chosen: Chosen) -> bool:
        """As in `Source`."""
        way = self.ways[chosen.way].source
        return array in way.scratch and way.uses(array, chosen)


def source_of(fusion: Fusion) -> Source:
    """The source of a segment with a product. UnsupportedError with the reason if there is none."""
    if products(fusion)[0].kind == "wgrad":
        outer = plan_wgrad(fusion, (*gemm.DTYPES, *fp8.COLUMNS))
        return _made(CodesWgrad if outer.product.a.type.quantized else Wgrad, outer)
    read = readable()
    transposed = [*gemm.READERS, *(r for r in read if r[0] not in gemm.DTYPES)]
    plan = plan_product(
        fusion, read, transposed, of_added=gemm.READERS, of_rows=(*ACTIVATIONS, *fp8.ROWS)
    )
    if plan.quantized and not plan.a.type.quantized:
        quantize = fusion.producers[fusion.producers[plan.quantized[0]].values[0]]
        raise Inexpressible(quantize, "the kernels of this product do not quantize its result")
    return Product(plan, *_ways(plan))


def _ways(plan: ProductPlan) -> list[Way]:
    """In the order in which they are tried."""
    as_in_torch = (plan.encoding.name, plan.layout) in gemm.READERS
    fprop, codes = plan.kind == "fprop", plan.a.type.quantized
    if codes or (fprop and not as_in_torch):
        need_one_width(plan)
    if codes:
        return [*_if_taken("codes", ByCodes, plan), Way(DecodedRows(plan))]
    if fprop and not as_in_torch:
        stored = Way(ByVariants(plan))
        if not reordering.takes(plan):
            return [stored]
        tiles = Reordered(plan)
        return [Way(tiles, "reordered"), stored, Way(tiles)]  # some variants read tiles alone
    both = Way(_made(Gemm, plan))
    if as_in_torch and not (fprop and plan.one_width):
        return [both]
    variants = _if_taken("", ByVariants, plan)
    return [replace(both, change="gemm"), *variants] if fprop and variants else [*variants, both]


def _if_taken(
    change: str, way: Callable[[ProductPlan], PlannedSource], plan: ProductPlan
) -> list[Way]:
    with suppress(UnsupportedError):
        return [Way(way(plan), change)]
    return []


def _made(of: type[Source], plan: Any) -> Any:
    """UnsupportedError on GPUs that do not have what the kernels need."""
    if missing := cuda.facts().why_not(of.needs):
        raise UnsupportedError(f"its kernels do not run here: {missing}")
    return of(plan)  # type: ignore[call-arg]  # each takes a plan alone
