"""The CUDA C++ of a grouped_gemm segment: the segment's own code around the kernels in kernels/."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from ...arch import Arch
from ...errors import UnsupportedError
from ...ir import AnySize, Op, Value, elements, exact_div, made_again, plain, value
from ...layouts import ceil_to
from ..cxx import (
    Elements,
    Epilogue,
    Index,
    ProductPlan,
    Variable,
    base_of,
    inner,
    is_made_first,
    scale_class,
    size,
    stored,
)
from ..inexpressible import naming
from . import added
from .columns import Columns, columns
from .heuristics import AUTO, Chosen, SizeClass, blocks, choose_kernels
from .readers import reader, tile_bytes
from .routing import made_first, problem
from .source import NO_ENDS, Array, KernelSource, Sizes, Source
from .variants import M8, Matrices, Variant
from .vectors import Store, VectorElements

ACTIVATIONS = "activations"  # the array that the prologue makes
UNQUANTIZED = "unquantized"  # that of rows which a kernel after the product quantizes
PARTIAL_SUMS = "partial_sums"
IDS = Array("ids", "const void", 0)  # of experts, if the product before has routed by them
GIVEN = Array("unrounded", "const void", 0)  # of activations that the product quantizes itself
LARGE_M_COLUMNS = 64  # columns of a warpgroup of kernels/large_m.cuh, which sums them separately
_I, _J, _M = map(Variable, "ijm")
_COLUMNS_PER_THREAD = 16  # columns that a thread reads
_USUAL_ROWS = 40  # rows of a group for which kernels that can get any number are chosen
# roles of operations that a tile computes from the group it is of, not from ends
_BY_GROUP = ("view", "per_group")
_MAX_IDS = 32  # up to this many, each warp sorts ids itself instead of waiting for `route`
_UNBOUNDED = 2**31 - 1  # rows, as kernels/ragged.cuh has it
# the most for which registers and shared memory suffice, if all blocks know where groups begin
_MAX_GROUPS = 2048


def need_groups(groups: int) -> None:
    """UnsupportedError for more groups than kernels can have."""
    if groups > _MAX_GROUPS:
        raise UnsupportedError(
            f"{groups} groups have no kernel here", expected=f"at most {_MAX_GROUPS}"
        )


def computed(
    source: Source, name: str, v: Value, array: Array, without: Sequence[Value], place: str = "i"
) -> KernelSource:
    """The kernel that computes the elements of a matrix into an array, element i at a place.
    without: values that are not in memory yet.
    """
    made, columns = source.elements(without=without), size(v.type.shape[1])
    element = made.of(v, [_I // columns, _I % columns])
    store = f"{array.name}[{place}] = narrow<{array.type}>({element});"
    return source.for_all(name, elements(v.type.shape), [*made.lines, store])


class PlannedSource(Source):
    """The source of a planned fprop or dgrad. parts: what the struct calls those of the weight, if
    not by their values' names.
    """

    def __init__(self, plan: ProductPlan, parts: Sequence[str]):
        names = dict(zip(plan.weight, parts, strict=False))
        if not plan.of_one_group:
            names[plan.ends] = "ends"
        super().__init__(plan.fusion, plan.memory, names)
        need_groups(plan.groups)
        self.plan = plan
        self.transposed = plan.weight[0] if plan.transposed else None

    @property
    def rows(self) -> AnySize:
        """M."""
        return plain(self.plan.a.type.shape[0])

    # Rows of several lengths, and sums over them --------------------------------------------------

    def make_stores(self) -> Sequence[Index]:
        """Makes the function that stores results; returns the columns of the product from which
        column j of a result is made.
        """
        plan, store = self.plan, Store(self.plan.width)
        epilogue = Epilogue(self, plan, {added.accumulated(plan): "p[{}][v]"})
        result = epilogue.elements()
        parts = {v: plan.parts(v) for v in plan.rows}
        for v, places in parts.items():
            for place in places or ():
                self._add(store, epilogue, result, v, place)
        for i, op in enumerate(plan.sums):
            store.add_term(i, self._term(epilogue, result, op.values[0]))
        for v in (v for v, places in parts.items() if places is None):
            for place in epilogue.every_column():
                self._add(store, epilogue, result, v, place)
        self.stores = store.function(result.statements, len(plan.sums))
        return epilogue.columns or [_J]

    def sums(self, parts: int) -> list[KernelSource]:
        """The kernels that add, in order, the `parts` partial sums of each row."""
        return [self._sums(i, v, parts) for i, v in enumerate(self.plan.summed)]

    def _sums(self, i: int, v: Value, parts: int) -> KernelSource:
        count = len(self.plan.sums)
        body = [
            "float total = 0;",
            f"for (i64 n = 0; n < {parts}; ++n) total += partial_sums[(n * {count} + {i}) * "
            "rows() + i];",
            f"{self.names[v]}[i] = stored<{stored(v)}>(total);",
        ]
        return self.for_all(f"row_sums_{i}", self.rows, body)

    def partial_sums(self, parts: int) -> Array:
        """The memory of the sums of so many parts of each row."""
        return Array(PARTIAL_SUMS, "float", elements((self.rows, parts * len(self.plan.sums))))

    def _add(
        self, store: Store, epilogue: Epilogue, made: Elements, v: Value, place: Index
    ) -> None:
        store.add(
            v, self.names[v], made.kept(v, epilogue.at(v, place)), self.plan.width_of(v), place
        )

    def _term(self, epilogue: Epilogue, made: Elements, v: Value) -> object:
        if self.plan.width_of(v) != self.plan.width:
            raise UnsupportedError(
                f"a sum of {v.type} over its columns has no kernel here",
                expected=f"{self.plan.width} columns",
            )
        return made.of(v, epilogue.at(v))

    def sums_of_tokens(self) -> list[KernelSource]:
        """The kernel that sums the rows of each token, if the plan has a combine."""
        if self.plan.combine is None:
            return []
        with naming(self.plan.combine):
            return [self.sum_of_slots(self.plan.combine, self.plan.tokens, (), self.plan)]


class ByVariants(PlannedSource):
    """A planned product by the kernels of variants.py, for weights in any encoding."""

    def __init__(self, plan: ProductPlan):
        self.reader = reader(plan.encoding.name, plan.layout, plan.activations)
        super().__init__(plan, self._part_names(plan))
        self.dtype = plan.activations
        if plan.quantized:
            self.names[plan.rows[0]] = UNQUANTIZED
        if plan.k % _COLUMNS_PER_THREAD:
            raise UnsupportedError(
                f"matrices of {plan.k} columns have no kernel here",
                expected=f"a multiple of {_COLUMNS_PER_THREAD}",
            )
        made = self.elements()
        found: tuple[Value | None, Index] = self.rows_in_memory(made) or (None, _M)
        # the matrix in memory whose rows are the activations, and which of its rows row m is
        self.matrix, self._matrix_row = found
        self._row_lines = made.lines
        shape = (self.matrix or plan.a).type.shape
        self.activations = Array(ACTIVATIONS, self.dtype, elements(shape))
        self.scratch += [self.activations, *(() if self._maker_of_ends else (IDS,))]
        epilogue = Epilogue(self, plan, {added.accumulated(plan): "p[{}]"})
        self.stores = list[str]()
        self._results = self._make_results(epilogue)
        if plan.sums:
            self.scratch.append(self.partial_sums(self._parts_of_sums))
        self.columns: Columns = columns(
            epilogue.columns or [_J], plan.width, aligned=self.reader.tiled
        )
        self._functions = self._make_functions()

    def _part_names(self, plan: ProductPlan) -> list[str]:
        """What the struct calls the parts of the weight."""
        return self.reader.names(plan.encoding)

    def rows_in_memory(self, made: Elements) -> tuple[Value, Index] | None:
        """The matrix in memory whose rows are the activations, and the number of row m's."""
        return made.row_in_memory(self.plan.a, _M, self.plan.k)

    @cached_property
    def matrices(self) -> Matrices:
        """What the choice of kernels depends on, except rows."""
        return Matrices(
            self.plan.groups,
            self.plan.k,
            self.tiles,
            self.columns.tiles,
            tile_bytes(self.plan.encoding),
            self.reader.tiled,
            self.plan.kind,
            self.plan.scale_runs if self.plan.kind == "dgrad" else 1,
            self.plan.row_order,
            self._reads_in_place(M8[0]),
        )

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns of the product."""
        return -(-self.plan.width // self.columns.block) * self.columns.tiles

    def functions(self) -> list[str]:
        """See kernels/small_m.cuh."""
        return self._functions

    def choose(self, sizes: Sizes | None, arch: Arch, variant: str = AUTO) -> Chosen:
        """The kernels of the product, for rows and a result that are row-major in memory; for any
        sizes those between few rows and many.
        """
        rows = _USUAL_ROWS * self.plan.groups if sizes is None else value(self.rows, sizes)
        return Chosen(choose_kernels(rows, self.matrices, arch, variant))

    @property
    def in_any_order(self) -> tuple[Value, int] | None:
        """The first result, if its rows are stored as they are."""
        plan = self.plan
        stored = plan.rows and plan.one_width and not plan.combine
        return (plan.rows[0], plan.width) if stored else None

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """The kernels of a grouped product in the order of their launches: routing; the prologue,
        where activations are computed or stored in fragment order; the product by its chosen
        variants; sums of its rows.
        """
        without = self._routing if chosen.few_ids else self._problem
        first = made_first(self, sizes, chosen.any_size, without)
        prologue = (
            []
            if chosen.rows_given
            else self.once(self._prologue, self._reader(chosen), bool(first))
        )
        products = self.products(
            chosen, sizes, arch, reads_before_wait=self._is_ready or bool(prologue)
        )
        sums = self.sums(self._parts_of_sums)
        return [*first, *prologue, *products, *sums, *self.once(self.sums_of_tokens)]

    @property
    def _parts_of_sums(self) -> int:
        return -(-self.plan.width // LARGE_M_COLUMNS)

    def products(
        self, chosen: Chosen, sizes: Sizes, arch: Arch, *, reads_before_wait: bool = False
    ) -> list[KernelSource]:
        """The kernels of the product. reads_before_wait: whether ends are available before the
        previous kernel has ended.
        """
        size_classes = chosen.size_classes
        first, last = size_classes[0], size_classes[-1]
        order = chosen.rows_given, chosen.writes_fragment_order
        return [
            self._product(
                self.once(
                    self._of_variant, s.variant, arch, self._reader(chosen, s), *order, chosen.ids
                ),
                s,
                value(self.rows, sizes),
                reads_before_wait or s is not first,
                s is not first,
                s is not last,
                s.variant.persistent and not last.variant.persistent,
                chosen,
            )
            for s in size_classes
        ]

    def _of_variant(
        self,
        variant: Variant,
        arch: Arch,
        reader: Variant,
        reads: bool,
        writes: bool,
        ids: tuple[str, int] | None,
    ) -> KernelSource:
        """The kernel of a variant, the same for all launches. reader: the variant that determines
        the order of activations; reads, writes: whether activations, or results, are in fragment
        order in memory; ids: as in `Chosen`.
        """
        fragment_order = reads or (
            self._takes_fragment_order(reader) and not self._reads_in_place(reader)
        )
        large_m = [
            f"using Columns = {'FragmentOrder' if writes else 'RowMajor'};",
            f"static constexpr bool FRAGMENT_ORDER = {str(fragment_order).lower()};  // whether "
            "activations are",
            f"static constexpr i32 GROUPS_READ_PER_TWO_TILES = {arch.groups_read_per_two_tiles};",
            f"static constexpr int MAX_SHARED_BYTES = {variant.shared(arch)};",
        ]
        return self.calling(
            variant.call(arch),
            variant.name,
            [
                *self._row(reader, reads),
                *(large_m if variant.persistent else self._find(ids)),
            ],
            0,
            headers=(self.reader.header, variant.header),
            threads=variant.threads,
            shared=self.shared(variant, arch, reads and self.plan.a.type.quantized),
            min_blocks=variant.per_sm,
            max_resident=variant.per_sm if variant.persistent else 0,
            size_class=(),
            cluster=variant.cluster,
        )

    def shared(self, variant: Variant, arch: Arch, rounds: bool) -> int:
        """Bytes of dynamic shared memory of a block. rounds: whether it has rows there."""
        row = 2 * ceil_to(self.plan.k, 128) + 16  # as kernels/small_m.cuh has it
        return variant.shared(arch) + rounds * variant.tile_m * row

    def _product(
        self,
        kernel: KernelSource,
        size_class: SizeClass,
        rows: int,
        reads_before_wait: bool,
        concurrent_with_previous: bool,
        concurrent_with_next: bool,
        with_small_m: bool,
        chosen: Chosen,
    ) -> KernelSource:
        """One launch of a variant's kernel.

        concurrent_with_previous, concurrent_with_next: whether the kernel before or after it
        belongs to the same product; with_small_m: whether one of these is a small-M kernel.
        Its parameter size_class carries what differs between launches.
        """
        variant = size_class.variant
        ids = (
            not chosen.any_size
            and not variant.persistent
            and self._knows_ids
            and rows <= _MAX_IDS
            and size_class.max_rows is None
        )
        routes = chosen.few_ids and self._routing is not None
        reads_before_wait = (reads_before_wait or ids) and not routes
        unbounded = _UNBOUNDED - chosen.without_rest
        most = unbounded if size_class.max_rows is None else size_class.max_rows
        bounds = size_class.above_rows, most
        flags = reads_before_wait, concurrent_with_previous, concurrent_with_next, with_small_m
        by_slot = chosen.one_token and rows <= self.plan.groups  # else blocks are fewer
        by_ids = chosen.few_ids or ids, by_slot, routes
        # beside another kernel the driver keeps that one's; several blocks may not get enough
        carveout = variant.per_sm > 1 if variant.persistent else concurrent_with_previous
        return replace(
            kernel,
            blocks=blocks(size_class, rows, self.matrices)
            + (routes or self._checks_apart(variant)),
            reads_before_wait=reads_before_wait,
            carveout_blocks=variant.per_sm if carveout else 0,
            title=f"{size_class} with route" if routes else str(size_class),
            size_class=(*bounds, *map(int, (*flags, *by_ids))),
        )

    def uses(self, array: Array, chosen: Chosen) -> bool:
        """Whether a call with these kernels needs an array of scratch memory. It does without the
        array of activations where the product reads them where they are.
        """
        return array.name != ACTIVATIONS or not self._reads_in_place(
            self._reader(chosen), chosen.rows_given
        )

    # The rows of activations ----------------------------------------------------------------------

    def _prologue(self, variant: Variant, after_routing: bool) -> list[KernelSource]:
        """Makes the activations, unless they are in memory as the product reads them."""
        if self.matrix is None:
            place = "fragment_place(i)" if self._takes_fragment_order(variant) else "i"
            return [computed(self, "prologue", self.plan.a, self.activations, (), place)]
        if self._reads_in_place(variant):
            return []
        pieces = exact_div(elements(self.matrix.type.shape), 8)
        assert pieces is not None
        store = f"store_vector<8>({ACTIVATIONS} + 8 * i, {self._piece(variant)});"
        # routing has waited for the kernel that made the matrix
        before_wait, body = ([store], []) if after_routing else ([], [store])
        reorder = self.for_all(
            "reorder_activations", pieces, body, before_wait=before_wait, headers=self.piece_headers
        )
        return [replace(reorder, writes_before_wait=after_routing)]

    piece_headers: tuple[str, ...] = ("routing.cuh",)  # that _piece needs

    def _piece(self, variant: Variant) -> str:
        """The i-th eight numbers of the activations, in the order in which the product reads."""
        assert self.matrix is not None
        return f"fragment_piece({self.names[self.matrix]}, i)"

    def _row(self, variant: Variant, given: bool) -> list[str]:
        """The types of both operands, and where the product reads a row of activations; in C++,
        routed: whether its kernel has sorted ids.
        """
        matrix = self.matrix if self._reads_in_place(variant, given) else None
        name = self.names[matrix] if matrix else ACTIVATIONS
        rounds = given and self.plan.a.type.quantized
        types = [
            f"using Activation = {self.dtype};",
            *self.reader.constants(self.plan.encoding),
            f"using Weights = {self.reader.of(self.dtype)};",
            f"static constexpr bool ROUNDS = {str(rounds).lower()};",
        ]
        if rounds:
            name = f"static_cast<const {self.dtype}*>({GIVEN.name})"
            types.append(f"using RowScale = {scale_class(self.plan.a.type.encoding)};")
        lines = [*self._row_lines, f"return {name} + {self._matrix_row} * K;"]
        if op := self.routing_of_few:
            rows = self.names[op.outputs[1]]
            lines.insert(0, f"const i32* {rows} = routed ? sorted_tokens() : this->{rows};")
        body = inner(lines)
        row = [
            f"__device__ const {self.dtype}* row(i64 m, bool routed = false) const {{",
            *body,
            "}",
        ]
        return ["", *types, *row, *(["", *self.stores] if self.stores else [])]

    def _reader(self, chosen: Chosen, of: SizeClass | None = None) -> Variant:
        """The variant that determines the order in which a kernel reads rows; None: for which the
        prologue orders them. In row order each reads in its own, so that all add up alike.
        """
        own = max(
            (s.variant for s in ([of] if of else chosen.size_classes)),
            key=lambda v: v.reads_fragment_order,
        )
        return own if self.plan.row_order else chosen.activation_reader

    def _reads_in_place(self, variant: Variant, given: bool = False) -> bool:
        """Whether the product reads the matrix in memory directly, not the prologue's result."""
        return self.matrix is not None and (given or not self.needs_reordering(variant))

    def needs_reordering(self, variant: Variant) -> bool:
        """Whether a kernel before the product writes rows in fragment order. If not, rows are in
        natural order.
        """
        in_place = self.matrix is not None and self._matrix_row == _M
        natural = in_place and variant.prefers_natural_order and not self.plan.row_order
        return self._takes_fragment_order(variant) and not natural

    def _takes_fragment_order(self, variant: Variant) -> bool:
        """Whether the product can read fragment order. A dgrad transposes weights to fragments, so
        that the order does not matter.
        """
        return variant.reads_fragment_order and self.plan.kind == "fprop"

    @property
    def _routing(self) -> Op | None:
        """The routing that makes the ends, if it is in this segment."""
        made = self._maker_of_ends
        return made if made and made.kind.name == "route" else None

    @property
    def _is_ready(self) -> bool:
        """Whether weights and ends are there before this segment's kernels."""
        return self._maker_of_ends is None or self._problem is not None

    @property
    def _maker_of_ends(self) -> Op | None:
        """The operation that makes the ends, if it is in this segment."""
        return self.fusion.producer(self.plan.ends)

    @cached_property
    def _problem(self) -> Op | None:
        """The operation that makes the ends of the form that nvFuser has, if the product's kernels
        read that form: no other kernel of this segment needs ends.
        """
        made = self._maker_of_ends
        alone = self.matrix is not None and self.plan.combine is None
        return made if alone and made and made.kind.name == "problem_ends" else None

    @property
    def _knows_ids(self) -> bool:
        """Whether this segment makes the ends from ids that are available before it, one a row."""
        op = self._routing
        return op is not None and (
            op.values[0] not in self.plan.memory and plain(op.outputs[1].type.shape[0]) == self.rows
        )

    @cached_property
    def routing_of_few(self) -> Op | None:
        """The routing that its kernel can do for few ids, if the kernel reads of it only the rows
        of activations, and is the only one of its segment beside routing.
        """
        op, plan = self._routing, self.plan
        alone = op and [o for o in self.fusion.ops if is_made_first(o)] == [op]
        if not (alone and op and self._knows_ids and self.matrix) or plan.combine or plan.sums:
            return None
        before = self._read_by(made_again(self.fusion.ops, [plan.a]))
        after = self._read_by(made_again(self.fusion.ops, plan.stored, plan.made))
        return op if (before - {op.outputs[1]} | after).isdisjoint(op.outputs) else None

    def _read_by(self, ops: Iterable[Op]) -> set[Value]:
        """What operations read, but for what a tile knows of its group."""
        read = (v for op in ops if op.kind.role not in _BY_GROUP for v in op.values)
        return {base_of(self.fusion, v) for v in read}

    def takes_few_ids(self, chosen: Chosen, sizes: Sizes) -> bool:
        """As in `Source`."""
        few = value(self.rows, sizes) <= _MAX_IDS and not chosen.any_size
        in_place = self._reads_in_place(self._reader(chosen), chosen.rows_given)
        return few and in_place and chosen.small_m is not None

    def _checks_apart(self, variant: Variant) -> bool:
        """Whether one more block checks the groups, which takes it longer than ends would."""
        return self._problem is not None and not variant.persistent

    def _find(self, ids: tuple[str, int] | None) -> list[str]:
        """How a small-M kernel finds its tile: in ends, or in ids if it can."""
        op, given, of_ids, route = self._routing, "", "", list[str]()
        if ids:
            of, first = ids
            given = f"static_cast<const {of}*>({IDS.name}), {first}, i32(rows())"
        elif op and self._knows_ids:
            of_ids = self.array(op.values[0], self.made_later)
            given = f"{of_ids}, {op.attrs.get('first_expert') or 0}, i32(rows())"
        if op and self.routing_of_few:
            arrays = ", ".join(self.array(v) for v in op.outputs)
            slots = size(op.values[0].type.shape[1])
            local = str(op.attrs.get("first_expert") is not None).lower()
            to = f"i32(rows()), i32({slots}), {arrays}, error"
            route = [f"if (size_class.routes) sorted.template route<{local}>({of_ids}, {to});"]
        by_ids = [
            "if (size_class.by_ids) {",
            *inner(
                [
                    "const i32 blocks = i32(gridDim.x) - size_class.routes;",
                    "if (size_class.by_slot && number < blocks) {",
                    *(
                        ["    sorted_tokens()[threadIdx.x % 32] = 0;", "    __syncwarp();"]
                        if route
                        else []
                    ),
                    f"    return find_tile_by_slot<GROUPS, N_TILES, WAVE>({given}, number, "
                    "blocks);",
                    "}",
                    f"FewIds<GROUPS> sorted({given});",
                    *route,
                    "return sorted.template find<TILE_M, N_TILES, WAVE>(i32(rows()), number);",
                ]
            ),
            "}",
        ]
        block = "gridDim.x - 1" if self._problem else "0"  # the former has no tile
        report = f"blockIdx.x == {block} && threadIdx.x < 32 ? error : nullptr"
        report = "nullptr" if op else report
        return [
            "template <int TILE_M, int N_TILES, int WAVE>",
            "__device__ __forceinline__ TilePlace find(i32 number, const SizeClass& "
            "size_class) const {",
            *inner(
                [
                    *(by_ids if given else ()),
                    "return find_tile_by_ends<GROUPS, TILE_M, N_TILES, WAVE>(partition(), "
                    f"i32(rows()), size_class, number, {report});",
                ]
            ),
            "}",
        ]

    # The struct -----------------------------------------------------------------------------------

    def _make_functions(self) -> list[str]:
        plan, cols = self.plan, self.columns
        return [
            f"static constexpr i32 GROUPS = {plan.groups}, N = {plan.n}, K = {plan.k};",
            f"static constexpr i32 WIDTH = {plan.width}, COLUMNS_PER_RESULT = {len(cols.read)};",
            f"static constexpr i32 BLOCK = {cols.block}, BLOCK_TILES = {cols.tiles}, SCALE_RUNS = "
            f"{plan.scale_runs};",
            f"static constexpr bool DGRAD = {str(plan.kind == 'dgrad').lower()};  // whether "
            "matrices are [K, N]",
            "",
            f"__device__ i64 rows() const {{ return {size(self.rows)}; }}",
            *([NO_ENDS] if plan.of_one_group else []),
            self._partition(),
            *cols.functions(),
            "",
            *added.functions(self, plan),
            *self._results,
        ]

    def _partition(self) -> str:
        """How kernels find groups: ends, or what they are computed from."""
        form, given = "const i32*", "ends"
        if op := self._problem:
            form, given = "Problem", problem(self, op)
        return f"__device__ __forceinline__ {form} partition() const {{ return {given}; }}"

    # Results for rows of groups -------------------------------------------------------------------

    def _make_results(self, epilogue: Epilogue) -> list[str]:
        """The functions `result` and `array`; for rows of several lengths, and sums over them,
        `store` is instead: see kernels/epilogue_transpose.cuh.
        """
        plan = self.plan
        if not plan.one_width:
            self.ELEMENTS = VectorElements
            self.make_stores()
            return [
                f"static constexpr i32 RESULTS = 0, SUMS = {len(plan.sums)};",
                f"using Element = {self.dtype};",
            ]
        bodies, arrays = list[str](), list[str]()
        for i, v in enumerate(plan.rows):
            made = epilogue.elements()
            kept = made.kept(v, epilogue.at(v))
            bodies += [f"if constexpr (I == {i}) {{", *inner([*made.lines, f"return {kept};"]), "}"]
            arrays += [f"if constexpr (I == {i}) return {self.names[v]};"]
        return [
            f"static constexpr i32 RESULTS = {len(plan.rows)};",
            f"using Element = {stored(plan.rows[0])};  // of the first",
            "",
            "// Element j of row m, of group g, of result I, from the row's columns(j) of the "
            "product; where the result lies.",
            "template <int I>",
            "__device__ __forceinline__ auto result(i64 m, i64 g, i64 j, const float "
            "(&p)[COLUMNS_PER_RESULT]) const {",
            *inner(bodies),
            "}",
            "template <int I>",
            "__device__ __forceinline__ auto array() const {",
            *inner(arrays),
            "}",
        ]
