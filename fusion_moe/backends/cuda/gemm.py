"""The CUDA C++ of grouped products whose operands both go through shared memory
(kernels/product.cuh): fprop, dgrad and wgrad of 16-bit matrices stored as in torch, and dgrad with
quantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...arch import Arch
from ...errors import UnsupportedError
from ...ir import Value, elements, plain, value
from ...ir.types import DTYPES as TORCH_DTYPES
from ...layouts import bound
from ..cxx import (
    Call,
    Expression,
    Index,
    ProductPlan,
    Variable,
    WgradPlan,
    follow,
    inner,
    reshaped,
    size,
    stored,
)
from . import added, readers
from .columns import column_function, need_whole
from .grouped_mm import LARGE_M_COLUMNS, PlannedSource, computed, need_groups
from .heuristics import Chosen
from .mma_tile import MMA_NEEDS, MMA_THREADS, mma_tile, warp_columns
from .routing import made_first
from .source import NO_ENDS, Array, Boxes, KernelSource, Sizes, Source
from .vectors import VECTOR, Store, VectorElements

NEEDS = ("wgmma", "setmaxnreg", "TMA")  # of the kernels in product_wgmma.cuh
DTYPES = ("bf16", "f16")
READERS = [(dtype, "linear") for dtype in DTYPES]  # encodings and layouts of weights
# what kernels of products are made of, and where that is: with wgmma, and without
POLICIES = {
    "gemm": (("GroupedGemm", "product_wgmma.cuh"), ("GroupedGemmMma", "product_mma.cuh")),
    "wgrad": (("GroupedWgrad", "product_wgmma.cuh"), ("GroupedWgradMma", "product_mma.cuh")),
    "fp8_gemm": (("Fp8Gemm", "fp8.cuh"), ("Fp8GemmMma", "fp8_mma.cuh")),
    "fp8_wgrad": (("Fp8Wgrad", "fp8_wgrad.cuh"), ("Fp8Wgrad", "fp8_wgrad.cuh")),
}
_MMA_HEADERS = ("product_mma.cuh", "fp8_mma.cuh")
_TILES_M = (128, 64)  # rows
_K_BLOCK, _THREADS = 64, 384
_BOX_BYTES, _ALIGNED = 128, 16  # of a row
# with two producer warpgroups, if the consumers' accumulators leave them registers
_MORE_THREADS = 512
_WARPGROUPS_N = 128  # columns that all threads dequantize at a time, without wgmma
# average rows per group up to which tiles of 64 rows are faster for quantized weights
_FEW_ROWS = 64
_RUN_OF_ROWS = 16  # of a quantized weight: the rows that a warp has share one outer scale
_BOX_ROWS = (128, 64, 32, 16, 8)  # of K-major matrices
_TILES_N = (256, 128)  # columns of the product
_FEW_COLUMNS = 64  # of a wgrad's operand: as many as fit in a row of a piece of shared memory
TILE_COUNTER = Array("tile_counter", "i32", 1)
_J, _M = map(Variable, "jm")


class Gemm(PlannedSource):
    """A planned fprop or dgrad, both operands of which go through shared memory. A dgrad may have a
    quantized weight.
    """

    ELEMENTS = VectorElements
    needs = MMA_NEEDS

    def __init__(self, plan: ProductPlan):
        self.packed = plan.encoding.name not in DTYPES
        super().__init__(plan, self._reader(plan).names(plan.encoding) if self.packed else ())
        _check(plan.a, *(() if self.packed else plan.weight))
        self.dtype = plan.a.type.dtype
        self.operand = Operand(self, plan.a, plan.k, "a")
        self.scratch += [TILE_COUNTER, *self.operand.scratch]
        self._functions = self._make_functions()
        if plan.sums:
            # large-M kernels and those without wgmma sum each 64 columns separately
            most_parts = self._tiles(self._tile_n) * self._tile_n // LARGE_M_COLUMNS
            self.scratch.append(self.partial_sums(most_parts))

    def functions(self) -> list[str]:
        """The functions that all kernels of the segment use."""
        return [
            f"__device__ i64 rows() const {{ return {size(self.rows)}; }}",
            *([NO_ENDS] if self.plan.of_one_group else []),
        ]

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """Routing; computed activations; the product; sums over its tiles and rows."""
        return [
            reset_tile_counter(self),
            *made_first(self, sizes, chosen.any_size),
            *self.operand.made(),
            self._product(sizes, arch, chosen.without_rest),
            *self.sums(self._parts(sizes, arch)),
            *self.sums_of_tokens(),
        ]

    @staticmethod
    def _reader(plan: ProductPlan) -> readers.Reader:
        return readers.reader(plan.encoding.name, plan.layout, plan.a.type.dtype)

    def _product(self, sizes: Sizes, arch: Arch, without_rest: bool) -> KernelSource:
        rows, (m, n) = value(self.rows, sizes), self._tile(sizes, arch)
        tiles = bound(rows, min(self.plan.groups, rows) + 1, m) // m * self._tiles(n)
        boxes = {
            "a": self.operand.boxes(m, sizes) if self.operand.in_boxes else None,
            "b": self._weight_boxes(),
        }
        header = self._reader(self.plan).header if self.packed else None
        threads = _THREADS if m == _TILES_M[0] else _MORE_THREADS
        functions = [*self._functions, size_class(without_rest)]
        return product_kernel(self, "gemm", (m, n), functions, tiles, arch, boxes, header, threads)

    def _weight_boxes(self) -> Boxes | None:
        """Boxes of the matrices, if the columns that a tile's columns read are adjacent."""
        plan = self.plan
        if self.packed:
            return None
        inner_size, outer = (plan.n, plan.k) if plan.kind == "dgrad" else (plan.k, plan.n)
        if not self._box_rows or inner_size % VECTOR:
            return None
        box = (_K_BLOCK, _K_BLOCK if plan.kind == "dgrad" else self._box_rows, 1)
        return Boxes(
            self.array_number(plan.weight[0]), self.dtype, (inner_size, outer, plan.groups), box
        )

    def _tile_m(self, sizes: Sizes) -> int:
        """Rows of a tile. Quantized weights are dequantized for each tile: low tiles are faster if
        most rows of a high one are empty, and add up each row in two parts.
        """
        few = value(self.rows, sizes) <= _FEW_ROWS * self.plan.groups
        return _TILES_M[self.packed and few and not self.plan.row_order]

    def _tile(self, sizes: Sizes, arch: Arch) -> tuple[int, int]:
        """Rows and columns of a tile of the product."""
        tile, narrowest = (self._tile_m(sizes), self._tile_n), _WARPGROUPS_N if self.packed else 0
        if by_wgmma(arch):
            return tile
        return mma_tile(*tile, self.plan.groups, arch, self._columns_read, narrowest)

    def _parts(self, sizes: Sizes, arch: Arch) -> int:
        """How many parts of a row are summed separately: one for each tile; with tiles of 64 rows,
        each consumer warpgroup has half of a row; without wgmma, each warp has a part.
        """
        m, n = self._tile(sizes, arch)
        of_tile = _TILES_M[0] // m if by_wgmma(arch) else n // warp_columns(self._columns_read)
        return self._tiles(n) * of_tile

    @property
    def _tile_n(self) -> int:
        """Columns of an N tile: few columns would leave half of a wide tile idle."""
        return _TILES_N[0] if self.plan.width * self._columns_read > _TILES_N[1] else _TILES_N[1]

    def _tiles(self, tile_n: int) -> int:
        """The number of N tiles."""
        return -(-self.plan.width // (tile_n // self._columns_read))

    # The struct -----------------------------------------------------------------------------------

    def _make_functions(self) -> list[str]:
        """See kernels/product_wgmma.cuh."""
        plan, columns = self.plan, self.make_stores()
        self._columns_read = len(columns)
        self._check_columns(columns)
        self._box_rows = self._rows_of_boxes(columns)
        return [
            f"static constexpr i32 GROUPS = {plan.groups}, N = {plan.n}, K = {plan.k};",
            f"static constexpr i32 WIDTH = {plan.width}, COLUMNS_PER_RESULT = {len(columns)}, "
            f"SUMS = {len(plan.sums)};",
            f"static constexpr bool B_MN = {str(plan.kind == 'dgrad').lower()};  // whether "
            "matrices are [k, n]",
            f"static constexpr bool A_BOXES = {str(self.operand.in_boxes).lower()};",
            f"static constexpr bool B_BOXES = {str(self._weight_boxes() is not None).lower()};",
            f"static constexpr int BOX_ROWS = {self._box_rows or 1};",
            f"static constexpr bool B_PACKED = {str(self.packed).lower()};",
            f"using Activation = {self.dtype};",
            "",
            *added.functions(self, plan),
            column_function(columns),
            *self.operand.functions(),
            *self._weight(),
            *self.stores,
        ]

    def _check_columns(self, columns: Sequence[Index]) -> None:
        """UnsupportedError unless tiles contain the columns of the product from which a result is
        made.
        """
        plan = self.plan
        need_whole(columns)
        if plan.kind == "dgrad" and not all(follow(c, VECTOR, VECTOR) for c in columns):
            raise UnsupportedError(
                "a result of columns that do not follow each other has no kernel here",
                expected="aligned runs of 8",
            )
        if self.packed and (len(columns) > 1 or plan.width != plan.n):
            raise UnsupportedError(
                "a result that reads other columns than its own has no kernel with a weight in "
                "few bits here",
                expected=f"its own columns, or a weight of {' or '.join(DTYPES)}",
            )

    def _weight(self) -> list[str]:
        """The matrices, or the reader of their encoding."""
        plan = self.plan
        if not self.packed:
            return [
                f"__device__ const {self.dtype}* b_matrix(i64 g) const {{ return "
                f"{self.names[plan.weight[0]]} + g * (i64(N) * K); }}"
            ]
        runs = plan.scale_runs
        if runs > 2 or plan.k % (runs * _RUN_OF_ROWS):
            raise UnsupportedError(
                f"a weight of {plan.k} rows in {runs} runs with a scale each has no kernel here",
                expected=f"one or two runs of a multiple of {_RUN_OF_ROWS} rows",
            )
        reads = self._reader(plan)
        return [
            f"static constexpr i32 SCALE_RUNS = {runs};",
            *reads.constants(plan.encoding),
            f"using Weights = {reads.of(self.dtype)};",
        ]

    def _rows_of_boxes(self, columns: Sequence[Index]) -> int:
        """The rows of a matrix in a box, which are adjacent columns of a tile; for a matrix [k, n],
        a box has 64 columns. 0: no boxes.
        """
        counts = (
            (_K_BLOCK,)
            if self.plan.kind == "dgrad"
            else [n for n in _BOX_ROWS if self._tile_n // self._columns_read % n == 0]
        )
        return next((n for n in counts if all(follow(c, n, VECTOR) for c in columns)), 0)


class Wgrad(Source):
    """The source of a planned wgrad."""

    ELEMENTS = VectorElements
    needs: tuple[str, ...] = MMA_NEEDS

    def __init__(self, plan: WgradPlan):
        super().__init__(plan.fusion, plan.memory, dict.fromkeys([plan.ends], "ends"))
        need_groups(plan.groups)
        self.plan = plan
        self._find_operands()
        self._functions = self._make_functions()

    def _find_operands(self) -> None:
        plan = self.plan
        _check(plan.product.a, plan.product.b)
        self.dtype = plan.product.a.type.dtype
        self.operands = (
            Operand(self, plan.product.a, plan.n, "a"),
            Operand(self, plan.product.b, plan.k, "b"),
        )
        of_operands = (array for operand in self.operands for array in operand.scratch)
        self.scratch += [TILE_COUNTER, *of_operands]

    def _make_functions(self) -> list[str]:
        """See kernels/product_wgmma.cuh."""
        plan = self.plan
        boxes = ", ".join(
            f"{o.name.upper()}_BOXES = {str(o.in_boxes).lower()}" for o in self.operands
        )
        return [
            f"static constexpr i32 GROUPS = {plan.groups}, N = {plan.n}, K = {plan.k};",
            "static constexpr i32 WIDTH = K, COLUMNS_PER_RESULT = 1;",
            f"static constexpr bool {boxes};",
            f"using Activation = {self.dtype};",
            "",
            f"__device__ i64 rows() const {{ return "
            f"{size(plain(plan.product.a.type.shape[0]))}; }}",
            *(line for operand in self.operands for line in operand.functions()),
            *self._make_store(),
        ]

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """Routing; computed operands; the product."""
        m, n = self._tile if by_wgmma(arch) else mma_tile(*self._tile, self.plan.groups, arch)
        tiles = self.plan.groups * -(-self.plan.n // m) * -(-self.plan.k // n)
        results = [kernel for operand in self.operands for kernel in operand.made()]
        boxes = {o.name: o.boxes(_K_BLOCK, sizes) if o.in_boxes else None for o in self.operands}
        product = product_kernel(self, "wgrad", (m, n), self._functions, tiles, arch, boxes)
        return [
            reset_tile_counter(self),
            *made_first(self, sizes, chosen.any_size),
            *results,
            product,
        ]

    @property
    def _tile(self) -> tuple[int, int]:
        """A tile's rows and columns of the result. Threads gather at most one of the operands: the
        one with fewer columns in a tile.

        If an operand has few columns, a tile has no more of them, which leaves registers and shared
        memory for more columns of the other operand.
        """
        wide, narrow = _TILES_N
        n, k = self.operands
        if n.columns <= _FEW_COLUMNS:
            return _FEW_COLUMNS, wide
        if k.columns <= _FEW_COLUMNS:
            return wide, _FEW_COLUMNS
        if n.in_boxes and not k.in_boxes:
            return wide if n.columns > narrow else narrow, narrow
        return narrow, wide if k.columns > narrow else narrow

    def _make_store(self) -> list[str]:
        plan, store = self.plan, Store(self.plan.k)
        result = self.elements(
            {plan.product.result: self._element}, without=plan.results, below={_J.name: plan.k}
        )
        for v in plan.results:
            store.add(
                v,
                self.names[v],
                result.kept(v, reshaped([_M, _J], (plan.groups * plan.n, plan.k), v.type.shape)),
                plan.k,
                _J,
            )
        return store.function(result.statements, 0)

    def _element(self, at: Sequence[Index]) -> Expression:
        if list(at) != reshaped(
            [_M, _J],
            (self.plan.groups * self.plan.n, self.plan.k),
            self.plan.product.result.type.shape,
        ):
            raise UnsupportedError("a result reads other elements of the product than its own")
        return Expression("p[0][v]", frozenset("j"))


class Operand:
    """Rows that a kernel copies: of a matrix in memory, gathered by an index or not, or computed
    before. name: prefix of its functions.
    """

    def __init__(self, owner: Source, v: Value, columns: int, name: str):
        self.owner, self.value, self.columns, self.name = owner, v, columns, name
        result = owner.elements(without=owner.made_later)
        row = result.row_in_memory(v, _M, columns)
        self.lines = result.lines  # that `row` needs
        self.scratch = (
            [] if row else [Array(f"{name}_computed", v.type.dtype, elements(v.type.shape))]
        )
        self._matrix: Value | Array = row[0] if row else self.scratch[0]
        self.row = row[1] if row else _M
        self._itemsize = TORCH_DTYPES[v.type.dtype].itemsize
        self.in_boxes = self.row == _M and columns * self._itemsize % _ALIGNED == 0

    def boxes(self, rows: int, sizes: Sizes) -> Boxes:
        """Boxes of rows, if these are the matrix's own rows."""
        count = value(elements(self.value.type.shape), sizes) // self.columns
        box = (_BOX_BYTES // self._itemsize, rows)
        return Boxes(
            self.owner.array_number(self._matrix), stored(self.value), (self.columns, count), box
        )

    def made(self) -> list[KernelSource]:
        """The kernel that computes the operand's rows into scratch memory before the product; an
        empty list if they are in memory already.
        """
        owner, name = self.owner, f"prologue_{self.name}"
        return [computed(owner, name, self.value, a, owner.made_later) for a in self.scratch]

    @property
    def matrix(self) -> str:
        """The name of the matrix."""
        held = self._matrix
        return held.name if isinstance(held, Array) else self.owner.names[held]

    def functions(self) -> list[str]:
        """The matrix, the gather of row m, and which of the matrix's rows it is."""
        dtype = stored(self.value)
        picked, checked = _unchecked(self.row)
        picks = [op for op in self.owner.fusion.ops if op.kind.name == "index_select"]
        index = "i32" if all(op.values[1].type.dtype == "i32" for op in picks) else "i64"
        return [
            f"using {self.name.upper()}Index = {index};  // what {self.name}_index fits in",
            f"__device__ const {dtype}* {self.name}_matrix() const {{ return {self.matrix}; }}",
            f"__device__ __forceinline__ i64 {self.name}_index(i64 m) const {{",
            *inner([*self.lines, f"return {picked};"]),
            "}",
            f"__device__ __forceinline__ i64 {self.name}_row_of(i64 index) const {{ return "
            f"{checked}; }}",
        ]


def _unchecked(row: Index) -> tuple[Index, Index]:
    """A row, or the index of which it is the safe form, and the row as a function of `index`."""
    match row:
        case Call(function, (index, *others)) if function == "clamp_index":
            return index, Call(function, (Variable("index"), *others))
    return row, Variable("index")


def reset_tile_counter(source: Source) -> KernelSource:
    """The kernel that sets to 0 the counter from which the blocks of a product draw work tiles; it
    runs before the product (kernels/tile_queue.cuh).
    """
    return source.for_all("reset_tile_counter", 1, [f"{TILE_COUNTER.name}[i] = 0;"])


def size_class(without_rest: bool) -> str:
    """That of a kernel of all groups: see kernels/ragged.cuh. without_rest: not of other rows."""
    return f"static constexpr SizeClass SIZE_CLASS = {{0, UNBOUNDED{' - 1' * without_rest}}};"


def by_wgmma(arch: Arch) -> bool:
    """Whether products are those of kernels/product_wgmma.cuh, not of kernels/product_mma.cuh."""
    return not arch.why_not(NEEDS)


def product_kernel(
    source: Source,
    name: str,
    tile: Sequence[int],
    functions: Sequence[str],
    tiles: int,
    arch: Arch,
    boxes: Mapping[str, Boxes | None],
    reader: str | None = None,
    threads: int = _THREADS,
    cluster: int = 1,
) -> KernelSource:
    """A persistent kernel of a product: that of `POLICIES` for a GPU, with numbers for its tile.

    boxes: those of operands a and b that it copies in boxes, and threads, by wgmma; reader: the
    header that dequantizes b; cluster: blocks that share tiles.
    """
    policies, header = POLICIES[name][not by_wgmma(arch)]
    if header in _MMA_HEADERS:
        name, boxes, threads = f"{name}_mma", {}, MMA_THREADS
    inputs = {operand: result for operand, result in boxes.items() if result}
    maps = {operand: f"&map{i}" for i, operand in enumerate(inputs)}
    return source.calling(
        f"run<{policies}<{', '.join(['Segment', *map(str, tile)])}>>(s, "
        f"{maps.get('a', 'nullptr')}, {maps.get('b', 'nullptr')});",
        "_".join([name, *(["x".join(map(str, tile))] if len(tile) > 1 else [])]),
        [*functions, f"static constexpr int MAX_SHARED_BYTES = {arch.shared_per_block};"],
        tiles,
        headers=(reader, header) if reader else (header,),
        threads=threads,
        shared=arch.shared_per_block,
        max_resident=1,
        boxes=tuple(inputs.values()),
        cluster=cluster,
    )


def _check(*operands: Value) -> None:
    if len({v.type.dtype for v in operands}) > 1 or operands[0].type.dtype not in DTYPES:
        types = " and ".join(str(v.type) for v in operands)
        raise UnsupportedError(
            f"a product of {types} has no kernel here", expected=f"two of {' or '.join(DTYPES)}"
        )
