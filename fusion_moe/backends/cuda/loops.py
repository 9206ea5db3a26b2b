"""The CUDA C++ of a segment without a product: kernels that compute results elementwise, with a
thread for each element or each eight of a row.

Values that need more than one element of another one (routing, a combine, a sum, quantized rows)
are made first, in memory. Sums are added in an order that depends only on sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...arch import Arch
from ...encodings import FP8_ROWS
from ...ir import AnySize, Fusion, Op, Value, elements, exact_div, plain
from ..cxx import (
    Number,
    Variable,
    base_of,
    hoisted,
    inner,
    is_made_first,
    known,
    reduction,
    reshaped,
    size,
    stored,
    unflat,
    written,
)
from ..cxx.sums import Reduction
from ..inexpressible import Inexpressible, naming
from . import block_copies, copies, e2m1_copies, router
from .heuristics import Chosen
from .routing import made_first
from .source import THREADS, KernelSource, Sizes, Source
from .vectors import FIRST, VECTOR, Store, WholeEights, of_eight

_I, _J, _M, _R = map(Variable, "ijmr")
_MISSING = ("index_put_accumulate", "grouped_swizzle")
_TURNING = {
    "transpose_blocks": block_copies.transpose_blocks,
    "transpose_row_blocks": block_copies.transpose_row_blocks,
}
_WARPS = THREADS // 32
_AT_ONCE = 256  # terms of a sum that a thread adds one after another


class Loops(Source):
    """The source of a segment. UnsupportedError with the reason if there is none."""

    ELEMENTS = WholeEights

    def __init__(self, fusion: Fusion):
        if other := next((op for op in fusion.ops if not _has_kernel(op)), None):
            raise Inexpressible(other, f"{other.kind.name} has no kernel here yet")
        self.sums = [op for op in fusion.ops if op.kind.name in _SUMMED]
        self._made = {op: _results(fusion, op) for op in self.sums}  # by kernels of their own
        self.copies, self.saved = copies.of_one_value(fusion), copies.saved(fusion)
        whole = [
            v
            for op in fusion.ops
            if is_made_first(op)
            or op.kind.name in ("transpose_blocks", "transpose_row_blocks", "decode_scale")
            or op in (*self.sums, *self.saved)
            for v in self._made.get(op, op.outputs)
        ]
        whole += [v for of_x in self.copies.values() for copy in of_x for v in copy.memory]
        super().__init__(
            fusion,
            tuple(dict.fromkeys((*whole, *(v for v in fusion.outputs if v not in fusion.inputs)))),
        )
        for op in self.copies if len(self.memory) == 2 else ():  # nothing else is made
            x = base_of(fusion, op.values[0])
            if op.encoding == FP8_ROWS and x in fusion.inputs and x.type.dtype == "bf16":
                self.unquantized = x
        inside = [e2m1_copies.chosen_inside(fusion, op) for op in self.copies]
        for op in (o for o in fusion.ops if o.kind.name == "decode_scale"):
            if op not in inside:
                raise Inexpressible(op, "a scale has a kernel only with what it is the scale of")
            self.scratch.append(e2m1_copies.scratch(op))

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """Routing; sums and copies, in order; then the results, with one kernel for all results
        that have as many elements.
        """
        rest = () if chosen.without_codes else self.once(self._after_routing)
        return [*made_first(self, sizes, chosen.any_size), *rest]

    def _after_routing(self) -> list[KernelSource]:
        results, left = list[KernelSource](), self.made_later
        for op in self.fusion.ops:
            with naming(op):
                kernels, done = self._whole(op, f"copies_{len(results)}", left)
            results += kernels
            left = [v for v in left if v not in done]
        counts = dict.fromkeys(elements(v.type.shape) for v in left)
        of_count = [(n, [v for v in left if elements(v.type.shape) == n]) for n in counts]
        return results + [
            self._elementwise(i, values, n, left) for i, (n, values) in enumerate(of_count)
        ]

    def _whole(
        self, op: Op, name: str, left: Sequence[Value]
    ) -> tuple[Sequence[KernelSource], Sequence[Value]]:
        """The kernels of an operation's own, if it has some, and what they make. name: of copies;
        left: values that are not in memory yet.
        """
        if op in self.sums:
            return [_SUMMED[op.kind.name](self, op, left)], self._made[op]
        if of_x := self.copies.get(op, ()):
            scale = e2m1_copies.chosen_inside(self.fusion, op)
            results = [*(scale.outputs if scale else ()), *(v for c in of_x for v in c.memory)]
            return copies.kernels(self, name, of_x, left), results
        if op.kind.name in _TURNING and op.outputs[0] in left:
            return [_TURNING[op.kind.name](self, name, op, left)], op.outputs
        if op in self.saved:
            return [block_copies.reading(self, name, op, left)], op.outputs
        return (), ()

    def _combine(self, op: Op, left: Sequence[Value]) -> KernelSource:
        return self.sum_of_slots(op, self._made[op], left)

    def _logsumexp(self, op: Op, left: Sequence[Value]) -> KernelSource:
        """A warp for each row, which reads it twice: for its largest number, then to sum."""
        (x,), (y,), result = op.values, op.outputs, reduction(op)
        over = str(size(result.over))
        body = [
            "const i64 m = i;",
            "float largest = -INFINITY;",
            "{",
            f"    const i64 first = 0, end = {over};",
            *inner(self._each(x, result, left, "largest = maximum_(largest, {});")),
            "}",
            "largest = max_of_warp(largest);",
            "const float most = std::fabs(largest) == INFINITY ? 0.f : largest;",
            *_sum_blocks(32, "0", over, self._each(x, result, left, "total += exp_({} - most);")),
            "const float total = log_(sum_of_warp(sum)) + most;",
            f"if (threadIdx.x % 32 == 0) {self.store(y, _M, 'total')}",
        ]
        return self.for_all_warps("logsumexp", result.rows, body, headers=router.HEADERS)

    def _sum(self, op: Op, left: Sequence[Value]) -> KernelSource:
        """A block for the only row, a warp for each of more, or a thread for each column of each
        row.
        """
        (x,), (y,), result = op.values, op.outputs, reduction(op)
        if result.along_memory and result.rows == 1:
            return self._sum_of_all(x, y, result, left)
        if result.along_memory:
            add = self._each(x, result, left, "total += {};")
            body = [
                *_sum_blocks(32, "0", str(size(result.over)), add),
                "const float total = sum_of_warp(sum);",
                f"if (threadIdx.x % 32 == 0) {self.store(y, _M, 'total')}",
            ]
            return self.for_all_warps("sum", result.rows, body, index="m")
        output, columns = self.elements(without=left), size(result.columns)
        term = output.of(x, result.at)
        add = [
            "for (i64 r = first; r < end; ++r) {",
            *inner([*output.lines, f"total += {term};"]),
            "}",
        ]
        body = [
            f"const i64 m = i / {columns}, j = i % {columns};",
            *_sum_blocks(1, "0", str(size(result.over)), add),
            self.store(y, _I, "sum"),
        ]
        return self.for_all("sum", elements((result.rows, result.columns)), body)

    def _sum_of_all(
        self, x: Value, y: Value, value: Reduction, left: Sequence[Value]
    ) -> KernelSource:
        """One block, whose threads take the terms in turns."""
        result = self.elements(without=left)
        term = result.of(x, [i.replaced(_M.name, Number(0)) for i in value.at])
        add = [
            f"for (i64 r = first + threadIdx.x; r < end; r += {THREADS}) {{",
            *inner([*result.lines, f"total += {term};"]),
            "}",
        ]
        body = [
            *self.WAIT,
            *_sum_blocks(THREADS, "0", str(size(value.over)), add),
            f"const float total = sum_of_warps<{_WARPS}>(sum_of_warp(sum));",
            f"if (threadIdx.x == 0) {self.store(y, Number(0), 'total')}",
        ]
        return self.kernel("sum", body, 1)

    def _each(self, x: Value, value: Reduction, left: Sequence[Value], line: str) -> list[str]:
        """`line` for each term of a row that a lane takes: eight columns at a time, or one."""
        if not isinstance(value.over, int) or value.over % VECTOR:
            result = self.elements(without=left)
            term = result.of(x, value.at)
            return [
                "for (i64 r = first + threadIdx.x % 32; r < end; r += 32) {",
                *inner([*result.lines, line.format(term)]),
                "}",
            ]
        result = self.elements(without=left, below={_J.name: value.over})
        term = result.of(x, [i.replaced(_R.name, _J) for i in value.at])
        of_row, of_columns = hoisted(result.statements, FIRST.name, _J.name)
        return [
            *written(of_row),
            "#pragma unroll 4",
            f"for (i64 j0 = first + {VECTOR} * (threadIdx.x % 32); j0 < end; j0 += "
            f"{32 * VECTOR}) {{",
            *inner(of_eight(of_columns, [line.format(term)])),
            "}",
        ]

    def _group_sum(self, op: Op, left: Sequence[Value]) -> KernelSource:
        """A block for each group and 32 columns: its warps divide the rows, and their sums are
        added.
        """
        (x, ends), (y,), result = op.values, op.outputs, self.elements(without=left)
        groups, columns = (known(d) for d in y.type.shape)
        rows, tiles, term = size(plain(x.type.shape[0])), -(-columns // 32), result.of(x, [_R, _J])
        add = [
            f"for (i64 r = first + threadIdx.x / 32; r < end; r += {_WARPS}) {{",
            *inner([*result.lines, f"total += {term};"]),
            "}",
        ]
        body = [
            f"const i64 g = blockIdx.x / {tiles}, j = blockIdx.x % {tiles} * 32 + "
            "threadIdx.x % 32;",
            *self.WAIT,
            f"const MTile run = rows_of_group({self.array(ends, left)}, g, {rows}, error);",
            *_sum_blocks(_WARPS, "run.first", f"(j < {columns} ? run.end : run.first)", add),
            f"const float total = sum_of_warps<{_WARPS}>(sum);",
            f"if (threadIdx.x < 32 && j < {columns}) "
            f"{self.store(y, Variable('g') * Number(columns) + _J, 'total')}",
        ]
        return self.kernel("group_sum", body, groups * tiles)

    def _elementwise(
        self, i: int, values: Sequence[Value], count: AnySize, left: Sequence[Value]
    ) -> KernelSource:
        width = plain(values[0].type.shape[-1]) if values[0].type.shape else 1
        if (
            isinstance(width, int)
            and width % VECTOR == 0
            and (rows := exact_div(count, width)) is not None
        ):
            return self._by_eights(i, values, rows, width, left)
        result = self.elements(without=left)
        stores = [self.store(v, _I, result.of(v, unflat(_I, v.type.shape))) for v in values]
        checks = [] if i else self._checks(count, left)
        return self.for_all(f"elements_{i}", count, [*checks, *result.lines, *stores])

    def _checks(self, count: AnySize, left: Sequence[Value]) -> list[str]:
        """Of ends that are inputs, which elements only search in, by `count` threads."""
        return [
            f"for (i64 g = i; g < {size(op.outputs[0].type.shape[0])}; g += {size(count)}) "
            f"check_end({self.array(op.outputs[0], left)}, g, {size(op.attrs['rows'])}, error);"
            for op in self.fusion.ops
            if op.kind.name == "ends"
        ]

    def _by_eights(
        self, i: int, values: Sequence[Value], rows: AnySize, width: int, left: Sequence[Value]
    ) -> KernelSource:
        """A thread for eight columns of a row."""
        result, store = self.elements(without=left, below={_J.name: width}), Store(width)
        for v in values:
            element = result.of(v, reshaped([_M, _J], (rows, width), v.type.shape))
            store.add(v, self.names[v], f"stored<{stored(v)}>({element})", width, _J)
        place = f"const i64 m = i / {width // VECTOR}, j0 = i % {width // VECTOR} * {VECTOR};"
        count = elements((rows, width // VECTOR))
        checks = [] if i else self._checks(count, left)
        return self.for_all(
            f"elements_{i}", count, [*checks, place, *store.body(result.statements)]
        )


_SUMMED: dict[str, Callable[[Loops, Op, Sequence[Value]], KernelSource]] = {
    "sum": Loops._sum,
    "logsumexp": Loops._logsumexp,
    "group_sum": Loops._group_sum,
    "combine": Loops._combine,
    "topk_weights_backward": router.backward,
}


def _has_kernel(op: Op) -> bool:
    """Whether there is one for an operation; `problem_ends` has one for each number of groups."""
    groups = op.attrs["groups"].count if op.kind.name == "problem_ends" else 1
    return op.kind.name not in _MISSING and isinstance(groups, int) and groups > 0


def _sum_blocks(threads: int, start: str, stop: str, add: Sequence[str]) -> list[str]:
    """`sum`, this thread's part of a sum of terms start .. stop - 1, where `add` adds its part of
    first .. end - 1 to `total`.
    """
    body = ["float total = 0;", *add, "return total;"]
    return [
        f"const float sum = sum_blocks<{_AT_ONCE * threads}>({start}, {stop}, [&](i64 first, "
        f"i64 end) {{",
        *inner(body),
        "});",
    ]


def _results(fusion: Fusion, op: Op) -> tuple[Value, ...]:
    """What the kernel of a sum stores: its outputs, or in place of a combine's the results that it
    is rounded to, if nothing else reads it.
    """
    readers = [r for r in fusion.ops if op.outputs[0] in r.values]
    rounded = tuple(v for r in readers for v in r.outputs)
    if op.kind.name != "combine" or op.outputs[0] in fusion.outputs or not readers:
        return op.outputs
    only = all(r.kind.name == "cast" for r in readers) and set(rounded) <= set(fusion.outputs)
    return rounded if only else op.outputs
