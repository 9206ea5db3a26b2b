"""The CUDA C++ of a grouped_gemm segment: the segment's own part, around the kernels in kernels/."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UnsupportedError
from ...ir.core import Op
from ...ir.kinds.shape import elements
from ...ir.sizes import AnySize, exact_div, value
from ...ir.types import plain
from ..cxx.elements import inner, stored
from ..cxx.indices import Index, is_index, reshaped, size
from ..cxx.plan import Plan, known
from . import variants
from .columns import Columns, columns
from .readers import reader
from .source import Array, Launched, Sizes, Source
from .variants import TILE, Matrices, Share

ACTIVATIONS = "activations"  # what the prologue makes
_M, _J, _K, _T = Index("m"), Index("j"), Index("k"), Index("t")
_AT_ONCE = 16  # columns that a thread reads
_MOST_IDS = 32  # that each warp sorts by itself, and does not wait for `route`
_MOST_GROUPS = 2048  # that registers and shared memory last for, where all blocks know where groups begin


class Product(Source):
    """The source of a planned segment."""

    def __init__(self, plan: Plan):
        self.reader = reader(plan.encoding.name, plan.layout, plan.a.type.dtype)
        names = (*(part.name for part in plan.encoding.parts), "ends")
        super().__init__(plan.fusion, plan.memory, dict(zip((*plan.weight, plan.ends), names, strict=True)))
        self.plan, self.dtype = plan, plan.a.type.dtype
        self._previous: Product | None = None
        self._next: Product | None = None
        self.transposed = plan.weight[0] if plan.transposed else None
        if plan.k % _AT_ONCE:
            raise UnsupportedError(f"matrices of {plan.k} columns have no kernel here", expected=f"a multiple of {_AT_ONCE}")
        if self.groups > _MOST_GROUPS:
            raise UnsupportedError(f"{self.groups} groups have no kernel here", expected=f"at most {_MOST_GROUPS}")
        found = self.elements().row_in_memory(plan.a, _M, plan.k)
        self.matrix = found[0] if found else None  # in memory, whose rows are the activations
        self._in_turn = found is not None and found[1] == _M  # whether its row m is row m of activations
        self.scratch.append(Array(ACTIVATIONS, self.dtype, elements((self.matrix or plan.a).type.shape)))
        self._results, texts = self._make_results()
        self.columns: Columns = columns(texts, plan.width, aligned=self.reader.tiled)
        self._functions = self._make_functions()

    @property
    def groups(self) -> int:
        """How many matrices there are."""
        return known(self.plan.weight[0].type.shape[0])

    @property
    def matrices(self) -> Matrices:
        """What the choice of kernels looks at, but for rows."""
        tile_bytes = int(TILE * self.plan.encoding.weight_bits) // 8
        return Matrices(self.groups, self.plan.k, self.tiles, self.columns.tiles, tile_bytes, self.reader.tiled)

    @property
    def rows(self) -> AnySize:
        """M."""
        return plain(self.plan.a.type.shape[0])

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product."""
        return -(-self.plan.width // self.columns.block) * self.columns.tiles

    def functions(self) -> list[str]:
        """See kernels/few_rows.cuh."""
        return self._functions

    def launches(self, sizes: Sizes, arch: str) -> list[Launched]:
        """Routing; activations that are computed, or wanted in another order; the product; what is summed of its rows."""
        shares, given = self.shares(sizes, arch), self._is_given_ordered(sizes, arch)
        first = self.made_first(sizes)
        prologue = [] if given else self._prologue(reading(shares), sizes, after_routing=bool(first))
        early = self._routing is None or bool(prologue)
        products = self.products(shares, sizes, given_ordered=given, gives_ordered=self.gives_ordered(sizes, arch), early=early)
        found = [*first, *prologue, *products]
        return [*found, self._combine(sizes)] if self.plan.combine else found

    def shares(self, sizes: Sizes, arch: str) -> tuple[Share, ...]:
        """The kernels of the product that are chosen."""
        return variants.choose(value(self.rows, sizes), self.matrices, arch)

    def variant(self, sizes: Sizes, arch: str) -> variants.Variant:
        """The one of them in whose order all read rows."""
        return reading(self.shares(sizes, arch))

    def products(
        self, shares: Sequence[Share], sizes: Sizes, *, given_ordered: bool = False, gives_ordered: bool = False, early: bool = False
    ) -> list[Launched]:  # fmt: skip
        """The kernels of the product. given_ordered, gives_ordered: whether the matrix in memory is ordered, and the result will be.

        early: whether ends are there before the kernel before these has ended.
        """
        first, last, variant = shares[0], shares[-1], reading(shares)
        in_order = given_ordered or (variant.ordered and not self._reads_the_matrix(variant))
        row = self._row(variant, given_ordered)
        many = [
            f"using At = {'Ordered' if gives_ordered else 'InTurn'};",
            f"static constexpr bool ORDERED = {str(in_order).lower()};  // whether activations are",
            f"static constexpr bool BESIDE_FEW = {str(not last.variant.persistent).lower()};",
        ]
        return [self._product(s, sizes, row, many, early or s is not first, s is not first, s is not last) for s in shares]

    def _product(
        self, share: Share, sizes: Sizes, row: Sequence[str], many: Sequence[str], early: bool, beside_previous: bool, beside_next: bool
    ) -> Launched:  # fmt: skip
        """One of them. many: what kernels of many rows know; beside_previous, beside_next: whether the kernel before, or after, is."""
        variant, rows = share.variant, value(self.rows, sizes)
        ids = not variant.persistent and self._routing is not None and rows <= _MOST_IDS and share.most is None
        early = early or ids
        functions = [
            *row,
            f"static constexpr bool EARLY = {str(early).lower()};",
            f"static constexpr bool BESIDE_PREVIOUS = {str(beside_previous).lower()}, BESIDE_NEXT = {str(beside_next).lower()};",
            f"static constexpr i32 ABOVE = {share.above}, MOST = {'ANY_SIZE' if share.most is None else share.most};",
            *(many if variant.persistent else self._find(ids)),
        ]
        blocks = variants.blocks(share, rows, self.matrices)
        return self.calling(
            variant.call(blocks), variant.name, functions, blocks,
            headers=(self.reader.header, variant.header), threads=variant.threads, shared=variant.shared,
            least_blocks=variant.per_sm, persistent=variant.persistent, early=early, caches=beside_previous and not variant.persistent,
            title=str(share),
        )  # fmt: skip

    def count(self, array: Array, sizes: Sizes, arch: str) -> int:
        """No activations where the product reads a matrix as it is."""
        if array.name == ACTIVATIONS and self._reads_the_matrix(self.variant(sizes, arch), self._is_given_ordered(sizes, arch)):
            return 0
        return super().count(array, sizes, arch)

    # Two products, one after the other --------------------------------------------------------------------------------

    def follow(self, previous: Product) -> None:
        """Reads the result of another product, which nothing else does: it comes in order, where both are kernels of many rows."""
        if len(previous.plan.rows) == 1 and not previous.plan.combine and previous.plan.width == self.plan.k:
            self._previous, previous._next = previous, self

    def gives_ordered(self, sizes: Sizes, arch: str) -> bool:
        """Whether its result is in the order in which the next product reads it."""
        return self._next is not None and all(p.variant(sizes, arch).ordered for p in (self, self._next))

    def _is_given_ordered(self, sizes: Sizes, arch: str) -> bool:
        return self._previous is not None and self._previous.gives_ordered(sizes, arch)

    # The rows of activations ------------------------------------------------------------------------------------------

    def _prologue(self, variant: variants.Variant, sizes: Sizes, after_routing: bool) -> list[Launched]:
        """Makes the activations, if they are not in memory as the product reads them."""
        k = self.plan.k
        if self.matrix is None:
            count, made = elements(self.plan.a.type.shape), self.elements()
            element = made.of(self.plan.a, [Index(f"(i / {k})"), Index(f"(i % {k})")])
            place = "ordered(i)" if variant.ordered else "i"
            return [self.for_all("prologue", count, [*made.lines, f"{ACTIVATIONS}[{place}] = narrow<{self.dtype}>({element});"], sizes)]
        if self._reads_the_matrix(variant):
            return []
        pieces = exact_div(elements(self.matrix.type.shape), 8)
        assert pieces is not None
        store = f"store_vector<8>({ACTIVATIONS} + 8 * i, ordered_piece({self.names[self.matrix]}, i));"
        early, body = ([store], []) if after_routing else ([], [store])  # routing has waited for what made the matrix
        return [self.for_all("prologue_ordered", pieces, body, sizes, early=early)]

    def _row(self, variant: variants.Variant, given_ordered: bool) -> list[str]:
        """The types of both operands, and where the product reads a row of activations."""
        made = self.elements()
        matrix, row = made.row_in_memory(self.plan.a, _M, self.plan.k) or (None, _M)
        name = self.names[matrix] if matrix is not None and self._reads_the_matrix(variant, given_ordered) else ACTIVATIONS
        types = [f"using Activation = {self.dtype};", f"using Weights = {self.reader.of(self.dtype)};"]
        body = inner([*made.lines, f"return {name} + {row} * K;"])
        return ["", *types, f"__device__ const {self.dtype}* row(i64 m) const {{", *body, "}"]

    def _reads_the_matrix(self, variant: variants.Variant, given_ordered: bool = False) -> bool:
        """Whether the product reads the matrix in memory as it is, and not what the prologue makes of it."""
        return self.matrix is not None and (given_ordered or not self.orders(variant))

    def orders(self, variant: variants.Variant) -> bool:
        """Whether a kernel before the product puts rows in order. Rows that are read in turn are as many as are put in order."""
        return variant.ordered and not (self._in_turn and variant.in_turn)

    @property
    def _routing(self) -> Op | None:
        """What makes the ends, if this segment does."""
        return next((op for op in self.fusion.ops if op.kind.name == "route" and op.outputs[0] is self.plan.ends), None)

    def _find(self, ids: bool) -> list[str]:
        """How a kernel finds a tile: in ids, or in ends."""
        if ids:
            assert self._routing is not None
            routed = self.array(self._routing.values[0], self.made_later)
            made = f"find_tile_of_ids<G, HEIGHT, ACROSS, AT_ONCE>({routed}, i32(rows()), number)"
        else:
            told = "nullptr" if self._routing else "blockIdx.x == 0 && threadIdx.x < 32 ? error : nullptr"
            made = f"find_tile<G, HEIGHT, ACROSS, AT_ONCE, MOST>(ends, i32(rows()), number, {told})"
        return [
            "template <int HEIGHT, int ACROSS, int AT_ONCE>",
            f"__device__ __forceinline__ Place find(i32 number) const {{ return {made}; }}",
        ]

    # The struct -------------------------------------------------------------------------------------------------------

    def _make_functions(self) -> list[str]:
        plan, cols = self.plan, self.columns
        runs = next((known(v.type.shape[1]) for v in plan.weight if len(v.type.shape) == 2), 1)
        return [
            f"static constexpr i32 G = {self.groups}, N = {plan.n}, K = {plan.k}, W = {plan.width}, F = {len(cols.texts)}, RUNS = {runs};",
            f"static constexpr i32 B = {cols.block}, TILES = {cols.tiles};",
            "",
            f"__device__ i64 rows() const {{ return {size(self.rows)}; }}",
            *cols.functions(),
            "",
            *self._results,
        ]

    # What is stored for rows of groups --------------------------------------------------------------------------------

    def _make_results(self) -> tuple[list[str], list[str]]:
        """The functions `result` and `array`, and the columns of the product that results are made of, as functions of j."""
        plan, rows, texts = self.plan, self.plan.a.type.shape[0], list[str]()

        def column(at: Sequence[Index]) -> str:
            text = str(at[1])
            if not is_index(at[0], _M, rows):
                raise UnsupportedError("a result reads other rows of the product than its own")
            if text not in texts:
                texts.append(text)
            return f"p[{texts.index(text)}]"

        def group(row: Index) -> str:
            if not is_index(row, _M, rows):
                raise UnsupportedError("a result adds the bias of other rows than its own")
            return "g"

        bodies, arrays = list[str](), list[str]()
        for i, v in enumerate(plan.rows):
            made = self.elements({plan.product.outputs[0]: column}, {plan.ends: group}, (*plan.rows, *plan.tokens))
            kept = made.kept(v, reshaped([_M, _J], (rows, plan.width), v.type.shape))
            bodies += [f"if constexpr (I == {i}) {{", *inner([*made.lines, f"return {kept};"]), "}"]
            arrays += [f"if constexpr (I == {i}) return {self.names[v]};"]
        return [
            f"static constexpr i32 RESULTS = {len(plan.rows)};",
            f"using Element = {stored(plan.rows[0])};  // of the first",
            "",
            "// Element j of row m, of group g, of result I, from the row's columns(j) of the product; where the result lies.",
            "template <int I>",
            "__device__ __forceinline__ auto result(i64 m, i64 g, i64 j, const float (&p)[F]) const {",
            *inner(bodies),
            "}",
            "template <int I>",
            "__device__ __forceinline__ auto array() const {",
            *inner(arrays),
            "}",
        ], texts

    # What is stored for tokens ----------------------------------------------------------------------------------------

    def _combine(self, sizes: Sizes) -> Launched:
        assert self.plan.combine is not None
        return self.sum_of_slots(self.plan.combine, self.plan.tokens, (), sizes, early=True)


def reading(shares: Sequence[Share]) -> variants.Variant:
    """The variant in whose order kernels beside each other read rows: the first one, or one that can read them in their own order alone."""
    return next((share.variant for share in shares if not share.variant.ordered), shares[0].variant)
