"""The CUDA C++ of products of rows in e4m3 codes: with weights in such codes around
kernels/fp8.cuh, or kernels/fp8_mma.cuh without wgmma, if groups have many rows; else by the kernels
for products in any encoding, which read the numbers that the codes stand for. Products over rows,
around kernels/fp8_wgrad.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...arch import Arch
from ...encodings import FP8, FP8_COLUMNS, FP8_E8M0, FP8_ROWS, FP8_TENSOR
from ...errors import UnsupportedError
from ...ir import Value, elements, plain, value
from ...layouts import bound
from ..cxx import (
    Elements,
    Index,
    ProductPlan,
    Variable,
    base_of,
    follow,
    made_by_route,
    scale_class,
    size,
    stored,
)
from ..inexpressible import Inexpressible
from . import copies, gemm
from .copies import Copy
from .gemm import (
    TILE_COUNTER,
    Operand,
    Wgrad,
    by_wgmma,
    product_kernel,
    reset_tile_counter,
    size_class,
)
from .grouped_mm import GIVEN, UNQUANTIZED, ByVariants
from .heuristics import AUTO, Chosen
from .mma_tile import mma_tile
from .routing import made_first
from .source import Array, Boxes, KernelSource, Sizes
from .variants import Variant
from .vectors import VECTOR, VectorElements

NEEDS = ("mma.e4m3", "cp.async")  # of products of codes: by fp8_mma.cuh, or by fp8.cuh
ROWS = (FP8_ROWS.name,)  # encodings of rows
COLUMNS = (FP8_COLUMNS.name,)  # of both operands of products over rows
# encodings of weights, in the linear layout: of those with a scale for at least 32 x 128
LINEAR_WEIGHTS = (FP8.name, FP8_E8M0.name, FP8_TENSOR.name)
_TILE = 128, 256  # of kernels/fp8.cuh, kernels/fp8_wgrad.cuh
_HALF, _K_BLOCK, _ALIGNED = 128, 128, 16
_RUN = 32  # columns that share a scale
_CLUSTER = 2  # blocks that share codes of a wgrad
# gathered rows, sorted before a product that copies them in boxes: in whole layers that is 2 to 4 %
# faster than gathering in the product
_SORTED_CODES, _SORTED_SCALES = "sorted_codes", "sorted_scales"
_M = Variable("m")


class DecodedRows(ByVariants):
    """A planned product of rows in e4m3 codes with scales of their blocks, by kernels that read the
    numbers that the codes stand for.
    """

    def __init__(self, plan: ProductPlan):
        if len(plan.rows) > 1:  # accumulators leave too few registers
            raise UnsupportedError("several results of a product of codes have no kernel here")
        super().__init__(plan)
        self.scratch.append(GIVEN)
        for v in plan.rows if plan.quantized else ():
            self.scratch.append(Array(UNQUANTIZED, stored(v), elements(v.type.shape)))
        self._box_rows = _box_rows(self.columns.read)
        self._in_codes = plan.encoding.name in LINEAR_WEIGHTS and plan.layout == "linear"
        if self._in_codes and not self._box_rows:  # other kernels for this layout are for few rows
            ops = self.fusion.ops
            cut = next((op for op in ops if op.kind.name == "slice"), ops[-1])
            raise Inexpressible(cut, f"columns of codes in no runs of {_RUN} have no kernel here")

    def rows_in_memory(self, made: Elements) -> tuple[Value, Index] | None:
        """That of the codes, if scales are picked as they are."""
        (codes, k), (scales, blocks) = zip(_parts(self), self._columns, strict=True)
        row, beside = made.row_in_memory(codes, _M, k), made.row_in_memory(scales, _M, blocks)
        if not row or not beside or row[1] != beside[1]:
            return None
        self._scales_matrix = beside[0]
        return row

    @property
    def _columns(self) -> tuple[int, int]:
        """Of codes and scales."""
        return self.plan.k, -(-self.plan.k // _K_BLOCK)

    piece_headers = ("coded_rows.cuh",)

    def _piece(self, variant: Variant) -> str:
        assert self.matrix is not None
        order = str(self._takes_fragment_order(variant)).lower()
        parts = f"{self.names[self.matrix]}, {self.names[self._scales_matrix]}"
        return f"decoded_piece<{self.plan.k}, {order}>({parts}, i)"

    def _reads_in_place(self, variant: Variant, given: bool = False) -> bool:
        return given

    def rounds(self, chosen: Chosen, arch: Arch) -> bool:
        """As in `Source`: a small-M kernel, if its rows have room."""
        small = chosen.small_m
        return small is not None and not arch.why_no_room(
            small.threads, self.shared(small, arch, True) + small.declared, small.per_sm
        )

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """As of all variants; the result is quantized last."""
        return [*super().kernels(chosen, sizes, arch), *self.quantized(chosen)]

    def quantized(self, chosen: Chosen) -> Sequence[KernelSource]:
        """The kernel that quantizes the product's result, if that is to be."""
        quantizes = self.plan.quantized and not chosen.without_codes
        return self.once(self._quantize) if quantizes else ()

    def _quantize(self) -> Sequence[KernelSource]:
        """Quantizes the product's result."""
        makers = self.fusion.producers
        quantize = makers[makers[self.plan.quantized[0]].values[0]]
        return copies.kernels(self, "quantize", [Copy.of(self.fusion, quantize)], ())


class ByCodes(DecodedRows):
    """The same by kernels that multiply both operands as codes. UnsupportedError if they do not
    compute this product.
    """

    def __init__(self, plan: ProductPlan):
        super().__init__(plan)
        self._operand, self._sorted = _operand(self), list[Array]()
        self._codes, self.ELEMENTS = self._make_codes(), VectorElements
        self.make_stores()  # of products without wgmma
        if not self._operand.in_boxes:
            self._sorted = [
                Array(_SORTED_CODES, "u8", self.rows * plan.k),
                Array(_SORTED_SCALES, "float", self.rows * self._columns[1]),
            ]
        unquantized = [array for array in self.scratch if array.name == UNQUANTIZED]
        self.scratch = [TILE_COUNTER, *unquantized, *self._sorted]

    def choose(self, sizes: Sizes | None, arch: Arch, variant: str = AUTO) -> Chosen:
        """UnsupportedError on GPUs that do not multiply codes."""
        if missing := arch.why_not(NEEDS):
            raise UnsupportedError(f"its kernels do not run here: {missing}")
        return Chosen(by_wgmma=by_wgmma(arch))

    def uses(self, array: Array, chosen: Chosen) -> bool:
        """Products by wgmma read sorted rows, and quantize their results themselves."""
        return array == TILE_COUNTER or (array in self._sorted) == chosen.by_wgmma

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """Routing; rows sorted; the product; its rows quantized; sums of them."""
        return [
            reset_tile_counter(self),
            *made_first(self, sizes, chosen.any_size),
            *([self.once(self._sort)] if self._sorted and chosen.by_wgmma else []),
            self._product_of_codes(sizes, arch, chosen.without_rest),
            *(() if chosen.by_wgmma else self.quantized(chosen)),
            *self.once(self.sums_of_tokens),
        ]

    def _sort(self) -> KernelSource:
        """Copies the rows that are gathered, as the product reads them: a token once for all its
        slots, if `route` says which rows these are.
        """
        (k, blocks), operand, slot_of = self._columns, self._operand, self._slot_of
        at_once = next(n for n in (4, 2, 1) if k % (n * _ALIGNED) == 0)
        each = k // (at_once * _ALIGNED)  # threads of a row
        end = size(self.rows) if self.plan.of_one_group else f"ends[{self.plan.groups - 1}]"
        count, slots = (self.rows, 1) if slot_of is None else map(plain, slot_of.type.shape)
        if slot_of is None:
            body = [
                f"const i64 to[] = {{i / {each}}}, m = to[0], end = {end};",
                "if (m >= end) return;  // no product reads rows of no group",
                *operand.lines,
                f"const i64 row = {operand.row};",
            ]
        else:
            place = f"{self.names[slot_of]}[row * {slots} + s]"
            body = [
                f"const i64 row = i / {each}, end = {end};",
                f"i64 to[{slots}];",
                "#pragma unroll",
                f"for (int s = 0; s < {slots}; ++s) to[s] = {place};",
            ]
        copy = [
            f"copy_row<{at_once}, {k}, {slots}>({operand.matrix} + row * {k}, "
            f"{self._scales(operand)} + row * {blocks}, i % {each}, to, end, {_SORTED_CODES}, "
            f"{_SORTED_SCALES});",
        ]
        return self.for_all("sort_rows", count * each, [*body, *copy], headers=self.piece_headers)

    @property
    def _slot_of(self) -> Value | None:
        """Which rows each token has, if the rows are those of tokens that a `route` sorted."""
        picks = self.fusion.producer(_parts(self)[0], "index_select")
        if picks is None or made_by_route(self.fusion, picks.values[1]) != "row_of":
            return None
        if self.names.get(base_of(self.fusion, picks.values[0])) != self._operand.matrix:
            return None  # tokens are gathered themselves
        slot_of = self.fusion.producers[base_of(self.fusion, picks.values[1])].outputs[2]
        fits = slot_of in self.memory and isinstance(plain(slot_of.type.shape[1]), int)
        return slot_of if fits else None

    def _product_of_codes(self, sizes: Sizes, arch: Arch, without_rest: bool) -> KernelSource:
        plan, read = self.plan, len(self.columns.read)
        wgmma = by_wgmma(arch)
        stores = [] if wgmma else self.stores
        rows, codes = value(self.rows, sizes), [*self._codes, size_class(without_rest), *stores]
        m, n = _TILE if wgmma else mma_tile(_TILE[0], _HALF, plan.groups, arch, read)
        tiles = bound(rows, min(plan.groups, rows) + 1, m) // m
        weight = Boxes(
            self.array_number(plan.weight[0]),
            "u8",
            (plan.k, plan.n, plan.groups),
            (_K_BLOCK, self._box_rows, 1),
        )
        rows_of_a = self._operand.boxes(m // 2, sizes)
        if self._sorted:
            number = self.array_number(self._sorted[0])
            rows_of_a = replace(rows_of_a, array=number, sizes=(plan.k, rows))
        return product_kernel(
            self,
            "fp8_gemm",
            () if wgmma else (m, n),
            codes,
            tiles * -(-plan.width // (n // read)),
            arch,
            {"a": rows_of_a, "b": weight},
        )

    def _make_codes(self) -> list[str]:
        """See kernels/fp8.cuh. UnsupportedError if it does not compute this product."""
        plan, read, operand = self.plan, self.columns.read, self._operand
        fits = (
            self._in_codes
            and not (plan.transposed or plan.added)
            and plan.kind == "fprop"
            and plan.k % _ALIGNED == plan.width % VECTOR == 0
            and len(read) <= 2
            and (plan.encoding.scales[0].block or plan.n // plan.scale_runs % _RUN == 0)
        )
        if not fits:
            raise UnsupportedError("a product of such codes has no kernel here")
        _, scales = plan.weight
        scale = "e8m0_(x)" if stored(scales) == "u8" else "x"
        to = [self.names[v] for v in plan.quantized]
        quantized = (
            [
                f"__device__ u8* codes() const {{ return {to[0]}; }}",
                f"__device__ float* scales() const {{ return {to[1]}; }}",
                f"using Scale = {scale_class(FP8_ROWS)};",
            ]
            if to
            else []
        )
        return [
            "static constexpr bool A_BOXES = true, B_BOXES = true;",
            f"static constexpr bool QUANTIZES = {str(bool(to)).lower()};",
            *quantized,
            f"static constexpr int BOX_ROWS = {self._box_rows};",
            *operand.functions(),
            f"__device__ const u8* b_codes() const {{ return {self.names[plan.weight[0]]}; }}",
            f"__device__ const float* a_scales() const {{ return {self._scales(operand)}; }}",
            "__device__ const float* scales_of_rows() const { return "
            f"{'a_scales()' if operand.in_boxes else _SORTED_SCALES}; }}",
            f"__device__ static float b_scale({stored(scales)} x) {{ return {scale}; }}",
            *self._scales_of_weight(self.names[scales], stored(scales)),
        ]

    def _scales_of_weight(self, array: str, dtype: str) -> list[str]:
        """Where those of a matrix begin, and that of a row; how far the next K block's is."""
        plan, blocks = self.plan, self._columns[1]
        of_matrix, of_row, step = plan.n * blocks, f"row * {blocks}", 1
        if plan.encoding.scales[0].block == 0:
            of_matrix, step = plan.scale_runs, 0
            of_row = f"row / {plan.n // plan.scale_runs}"
        return [
            f"static constexpr i32 NEXT_B_SCALE = {step};",
            f"__device__ const {dtype}* b_scales(i64 group) const {{ return {array} + group * "
            f"{of_matrix}; }}",
            f"__device__ static constexpr i32 b_scale_of(i32 row) {{ return {of_row}; }}",
        ]

    def _scales(self, operand: Operand) -> str:
        """The array of the scales of rows, which are gathered as the codes are."""
        _, scales = _parts(self)
        row = self.elements(without=self.made_later).row_in_memory(scales, _M, self._columns[1])
        if row is None or row[1] != operand.row:
            raise UnsupportedError("scales of rows that are not those of the codes")
        return self.names[row[0]]


class CodesWgrad(Wgrad):
    """The source of a planned wgrad of operands in e4m3 codes, which are in memory by columns."""

    needs = (*gemm.NEEDS, "clusters")

    def _find_operands(self) -> None:
        """UnsupportedError unless `transpose_row_blocks` made their codes."""
        plan, result = self.plan, self.fusion.producers
        self.dtype = "bf16"
        self._turned, self._scales = list[Value](), list[Value]()
        for v in (plan.product.a, plan.product.b):
            parts = [] if v not in result else list(result[v].values)
            back = result.get(parts[0]) if len(parts) == 2 else None
            if back is None or back.kind.name != "untranspose_row_blocks":
                raise UnsupportedError(f"{v.name} {v.type} over rows has no kernel here")
            self._turned.append(back.values[0])
            self._scales.append(parts[1])

    def _make_functions(self) -> list[str]:
        """See kernels/fp8_wgrad.cuh."""
        rows = size(plain(self.plan.product.a.type.shape[0]))
        return [
            f"static constexpr i32 GROUPS = {self.plan.groups}, N = {self.plan.n}, "
            f"K = {self.plan.k};",
            "static constexpr i32 WIDTH = K, COLUMNS_PER_RESULT = 1;",
            "",
            f"__device__ i64 rows() const {{ return {rows}; }}",
            *(
                f"__device__ const float* {name}_scales() const {{ return "
                f"{self.array(scales, ())}; }}"
                for name, scales in zip("ab", self._scales, strict=True)
            ),
            *self._make_store(),
        ]

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """Routing; the product."""
        plan, boxes = self.plan, dict[str, Boxes | None]()
        for name, turned in zip("ab", self._turned, strict=True):
            count, width, block = (value(plain(d), sizes) for d in turned.type.shape)
            boxes[name] = Boxes(
                self.array_number(turned), "u8", (block, width, count), (block, _TILE[0], 1)
            )
        m, n = _CLUSTER * _TILE[0], _TILE[1]
        tiles = plan.groups * -(-plan.n // m) * -(-plan.k // n) * _CLUSTER
        product = product_kernel(
            self, "fp8_wgrad", (_CLUSTER,), self._functions, tiles, arch, boxes, cluster=_CLUSTER
        )
        return [*made_first(self, sizes, chosen.any_size), product]


def _box_rows(read: Sequence[Index]) -> int:
    """How many rows of the matrix follow each other wherever columns of the result read it: of half
    a tile, or of a run, which lies in one block; 0: fewer.
    """
    runs = _HALF // len(read), _RUN
    return next((n for n in runs if all(follow(c, n, _RUN) for c in read)), 0)


def _parts(source: DecodedRows) -> tuple[Value, Value]:
    """The codes and the scales of the rows."""
    codes, scales = source.fusion.producers[source.plan.a].values
    return codes, scales


def _operand(source: DecodedRows) -> Operand:
    """The codes of the rows. UnsupportedError unless they are in memory."""
    operand = Operand(source, _parts(source)[0], source.plan.k, "a")
    if operand.scratch:
        raise UnsupportedError("codes that are computed have no kernel here")
    return operand
