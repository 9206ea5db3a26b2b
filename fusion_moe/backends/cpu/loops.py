"""The C++ of a segment without a product: loops over rows, one after the other.

Values that need more than one element of another one (a sum, a block scale, a swizzle) are made
first, in memory; then the results, with one loop for all results of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...encodings import FP8_E8M0, NVFP4, Encoding
from ...errors import UnsupportedError
from ...ir import FLOATS, AnySize, Dim, Fusion, Op, Value, elements, plain
from ...ir.kinds.eight_bits import TRAINED
from ..cxx import (
    Index,
    Number,
    Statement,
    Variable,
    branches,
    flat,
    hoisted,
    inner,
    is_made_first,
    known,
    reduction,
    reshaped,
    scale_class,
    size,
    unflat,
    written,
)
from ..inexpressible import Inexpressible, naming
from .segment import SegmentWriter, Source

_B, _I, _J, _K, _L, _M, _R = map(Variable, "bijklmr")
_ROW = Variable("row")
# terms of a sum that are added one after another; sums along memory are made in up to 16 lanes
_AT_ONCE, _LANES = 256, 16


def source(fusion: Fusion, writer: type[SegmentWriter] | None = None) -> Source:
    """The C++ of a segment that is elementwise, or sums, in loops over its elements.
    UnsupportedError, with the reason, if an operation of it cannot be written so.
    """
    whole = [v for op in fusion.ops for v in _whole(fusion, op)]
    memory = tuple(dict.fromkeys((*whole, *(v for v in fusion.outputs if v not in fusion.inputs))))
    return Source(fusion, (writer or LoopsWriter)(fusion, memory).text(), memory)


def _whole(fusion: Fusion, op: Op) -> Sequence[Value]:
    """The values that are made completely, in memory, before others can read elements of them."""
    if op.kind.name == "quantize":
        if op.rule != "max":
            raise Inexpressible(op, f"quantizing by {op.rule!r} has no kernel here")
        return _unpacked(fusion, op)
    return op.outputs if is_made_first(op) or op.kind.name in _WHOLE else ()


def _unpacked(fusion: Fusion, op: Op) -> tuple[Value, Value]:
    """Codes and block scales of a quantized value that consists only of these and is not stored in
    another form.
    """
    unpack = fusion.only_reader(op.outputs[0], "unpack")
    if unpack is None:
        raise Inexpressible(
            op,
            f"{op.outputs[0].name} {op.outputs[0].type} has no kernel here",
            expected="quantize followed by unpack",
        )
    codes, scales = unpack.outputs
    return codes, scales


class LoopsWriter(SegmentWriter):
    """Writes the struct of a segment without a product."""

    def body(self) -> list[str]:
        """The loops, one after the other."""
        lines: list[str] = []
        for op in self.fusion.ops:
            whole = _whole(self.fusion, op)
            if whole and not is_made_first(op):
                with naming(op):
                    lines += _WHOLE[op.kind.name](self, op)
            self.ready(whole)
        shapes = dict.fromkeys(_rows_of(v.type.shape) for v in self.later)
        for shape in shapes:
            lines += self._elementwise(
                [v for v in self.later if _rows_of(v.type.shape) == shape], *shape
            )
        return lines

    # Results --------------------------------------------------------------------------------------

    def _elementwise(self, values: Sequence[Value], rows: AnySize, width: AnySize) -> list[str]:
        """One loop that stores values with as many rows and columns."""
        result = self.elements()
        stores = [self.put(result, v, (rows, width), _M, _J) for v in values]
        body = _for_columns([*result.statements, *stores], "0", str(size(width)))
        return _for_rows(rows, width, body)

    # Values made completely -----------------------------------------------------------------------

    def _sum(self, op: Op) -> list[str]:
        (x,), (y,), result, output = op.values, op.outputs, reduction(op), self.elements()
        term, counts = output.of(x, result.at), (result.rows, result.columns, result.over)
        return (
            self._reduced(y, counts, output.statements, term)
            if result.along_memory
            else self._added(y, counts, output.statements, term)
        )

    def _logsumexp(self, op: Op) -> list[str]:
        """In two passes: the largest number of a row, then the sum. The first looks over NaN, of
        which the second makes NaN.
        """
        (x,), (y,), value, output = op.values, op.outputs, reduction(op), self.elements()
        term = output.of(x, value.at)
        larger = [*output.lines, f"largest = {term} > largest ? float({term}) : largest;"]
        before = [
            "float largest = -INFINITY;",
            *([] if branches(output.statements) else ["#pragma omp simd reduction(max : largest)"]),
            f"for (i64 r = 0; r < {size(value.over)}; ++r) {{",
            *inner(larger),
            "}",
            "const float most = std::fabs(largest) <= 3.4028234664e38f ? largest : 0.f;",
        ]
        counts = (value.rows, value.columns, value.over)
        power, result = f"exp_({term} - most)", "log_(sum[0]) + most"
        return self._reduced(y, counts, output.statements, power, before, result)

    def _added(
        self, y: Value, counts: Sequence[AnySize], statements: Sequence[Statement], term: object
    ) -> list[str]:
        """y [rows, columns], each element the sum of a term over r."""
        rows, columns, over = counts
        return self._added_between(y, (rows, columns), ("0", str(size(over))), statements, term)

    def _added_between(
        self,
        y: Value,
        counts: Sequence[AnySize],
        ends: tuple[str, str],
        statements: Sequence[Statement],
        term: object,
    ) -> list[str]:
        """y [rows, columns], each element the sum of a term over r, from the first end up to the
        second.
        """
        rows, columns = counts
        add = [
            "for (i64 r = first; r < end; ++r) {",
            *inner(_for_columns([*statements, f"sum[j - j0] += {term};"])),
            "}",
        ]
        store = _for_columns([self.store(y, flat([_M, _J], (rows, columns)), "sum[j - j0]")])
        body = ["float sum[COLUMNS];", *_sum_blocks(_AT_ONCE, *ends, "j1 - j0", add), *store]
        return [
            f"for_tiles({size(rows)}, {size(columns)}, pool, [&](i64 m, i64 j0, i64 j1) {{",
            *inner(body),
            "});",
        ]

    def _reduced(
        self,
        y: Value,
        counts: Sequence[AnySize],
        statements: Sequence[Statement],
        term: object,
        before: Sequence[str] = (),
        result: str = "sum[0]",
    ) -> list[str]:
        """y [rows], each element the sum of a term over r, which runs along memory. before: lines
        that come first for each row; result: what is made of the sum.
        """
        rows, _, over = counts
        simd = not branches(statements)
        add = [
            "float lanes = 0;",
            *(["#pragma omp simd reduction(+ : lanes)"] if simd else []),
            "for (i64 r = first; r < end; ++r) {",
        ]
        add += [*inner([*written(statements), f"lanes += {term};"]), "}", "sum[0] = lanes;"]
        sums = _sum_blocks(_AT_ONCE * _LANES if simd else _AT_ONCE, "0", str(size(over)), "1", add)
        body = [*before, "float sum[1];", *sums, self.store(y, _M, result)]
        return _for_all_rows(rows, over, body)

    def _combine(self, op: Op) -> list[str]:
        (y, slot_of, w), (tokens, slots) = op.values, op.values[1].type.shape
        result = self.elements()
        term = f"{result.of(y, [result.of(slot_of, [_M, _R]), _J])} * {result.of(w, [_M, _R])}"
        return self._added(
            op.outputs[0],
            (plain(tokens), plain(y.type.shape[1]), plain(slots)),
            result.statements,
            term,
        )

    def _group_sum(self, op: Op) -> list[str]:
        """Row m of the result is the sum of group m's rows."""
        (y, ends), (out,) = op.values, op.outputs
        result, end = self.elements(), self.array(ends)
        term, (groups, columns) = result.of(y, [_R, _J]), out.type.shape
        run = (f"(m == 0 ? 0 : {end}[m - 1])", f"{end}[m]")
        return self._added_between(
            out, (plain(groups), plain(columns)), run, result.statements, term
        )

    def _index_put_accumulate(self, op: Op) -> list[str]:
        """Rows added in order; each thread adds to its own columns."""
        (acc, index, value), (out,) = op.values, op.outputs
        rows, width = plain(acc.type.shape[0]), elements(acc.type.shape[1:])
        start, added = self.elements(), self.elements()
        first = start.of(acc, reshaped([_M, _J], (rows, width), acc.type.shape))
        term = added.of(value, reshaped([_R, _J], (index.type.shape[0], width), value.type.shape))
        at = flat([_M, _J], (rows, width))
        copy = [*start.statements, self.store(out, at, first)]
        now = f"{self.names[out]}[{at}]"
        wide = f"widen({now})" if out.type.dtype in FLOATS else now
        add = [*added.statements, self.store(out, at, f"{wide} + {term}")]
        body = [
            f"for (i64 m = 0; m < {size(rows)}; ++m) {{",
            *inner(_for_columns(copy)),
            "}",
            f"for (i64 r = 0; r < {size(index.type.shape[0])}; ++r) {{",
            *inner([f"const i64 m = {self.array(index)}[r];", *_for_columns(add)]),
            "}",
        ]
        return [
            f"for_tiles(1, {size(width)}, pool, [&](i64, i64 j0, i64 j1) {{",
            *inner(body),
            "});",
        ]

    def _decode_scale(self, op: Op) -> list[str]:
        (x,), (out,), encoding = op.values, op.outputs, op.encoding
        if encoding is not NVFP4:
            raise _no_kernel(encoding)
        most = encoding.element.maximum * encoding.scales[0].maximum
        *lead, rows, k = x.type.shape
        result = self.elements()
        element = result.of(x, [*unflat(_L, lead), _M, _K])
        of_row = [
            "u32 here = 0;",
            *([] if branches(result.statements) else ["#pragma omp simd reduction(max : here)"]),
            f"for (i64 k = 0; k < {size(k)}; ++k) {{",
            *inner([*result.lines, f"here = std::max(here, as_bits({element}) & 0x7FFFFFFFu);"]),
            "}",
            "for (u32 so_far = most; so_far < here && !most.compare_exchange_weak(so_far, here);) "
            "continue;",
        ]
        body = [
            "std::atomic<u32> most{0};  // magnitudes order as their bits do, NaN above all",
            *_for_rows(plain(rows), plain(k), of_row),
            f"{self.names[out]}[l] = as_float(most) / {most!r}f;",
        ]
        return [f"for (i64 l = 0; l < {size(elements(lead))}; ++l) {{", *inner(body), "}"]

    def _quantize(self, op: Op) -> list[str]:
        """Row by row, block by block. For non-finite numbers that the encoding cannot hold, or a
        negative scale, the reference raises.
        """
        encoding = op.encoding
        if encoding.axis == -2:
            return self._quantize_runs(op) if len(op.values) > 1 else self._quantize_columns(op)
        if encoding.scales[0].rows > 1:
            return self._quantize_squares(op)
        block = encoding.block
        (x, *matrix_scale), (codes, scales) = op.values, _unpacked(self.fusion, op)
        *lead, n, k = x.type.shape
        result = self.elements()
        element = result.of(
            x, [*reshaped([_M], (elements((*lead, n)),), (*lead, n)), _B * Number(block) + _I]
        )
        rows, blocks = elements((*lead, n)), encoding.blocks(known(k))
        whole = known(k) % block == 0
        count = str(block) if whole else f"std::min({block}, {known(k)} - int(b) * {block})"
        place = (
            f"{self.names[codes]} + m * {encoding.packed(known(k))} + b * {encoding.packed(block)}"
        )
        encoder = (
            f"quantize_block(block, decode_scale, {place}, {self.names[scales]} + at)"
            if encoding is NVFP4
            else f"quantize_fp8<{_scale(encoding)}>(block, count, {place}, "
            f"{self.names[scales]} + at)"
        )
        body = [
            *(line for scale in matrix_scale for line in self._of_matrix(scale, lead, n)),
            *([] if matrix_scale else ["bool good = true;"]),
            f"for (i64 b = 0; b < {blocks}; ++b) {{",
            f"    float block[{block}];",
            f"    const int count = {count};",
            *([] if branches(result.statements) else ["#pragma omp simd"]),
            "    for (int i = 0; i < count; ++i) {",
            *inner(inner([*result.lines, f"block[i] = {element};"])),
            "    }",
            f"    const i64 at = m * {blocks} + b;",
            f"    good = good & {encoder};",
            "}",
        ]
        loop = _for_rows(rows, plain(k), [*body, "if (!good) finite = false;"])
        return ["std::atomic<bool> finite{true};", *loop, "if (!finite) return BAD;"]

    def _of_matrix(self, decode_scale: Value, lead: Sequence[Dim], n: Dim) -> list[str]:
        """The scale of row m, out of the scales of matrices [*lead, n]."""
        runs = decode_scale.type.shape[len(lead)] if len(decode_scale.type.shape) > len(lead) else 1
        at = (_M // size(n)) * size(runs) + (_M % size(n)) // (size(n) // size(runs))
        return [
            f"const float decode_scale = {self.array(decode_scale)}[{at}];",
            "bool good = decode_scale >= 0.f && decode_scale < INFINITY;",
        ]

    def _quantize_squares(self, op: Op) -> list[str]:
        """Blocks of as many rows as columns, the last ones of a matrix shorter; block m is `i`."""
        (x,) = op.values
        codes, scales = _unpacked(self.fusion, op)
        encoding = op.encoding
        *lead, n, k = x.type.shape
        block, columns, result = encoding.block, known(k), self.elements()
        (rows, across), all_rows = (
            (-(-known(size) // block) for size in (n, k)),
            elements((*lead, n)),
        )
        element = result.of(
            x, [*reshaped([_ROW], (all_rows,), (*lead, n)), _B * Number(block) + _I]
        )
        simd = [] if branches(result.statements) else ["#pragma omp simd"]
        each = [
            "for (i64 row = first; row < end; ++row) {",
            f"    float block[{block}];",
            *simd,
            "    for (int i = 0; i < count; ++i) {",
            *inner(inner([*result.lines, f"block[i] = {element};"])),
            "    }",
        ]
        body = [
            f"const i64 b = m % {across}, top = m / {across} % {rows} * {block},",
            f"          first = m / {across * rows} * {size(n)} + top,",
            f"          end = first + std::min<i64>({block}, {size(n)} - top);",
            f"const int count = std::min<i64>({block}, {columns} - b * {block});",
            "u32 most = 0;",
            *each,
            "    most = std::max(most, largest_of(block, count));",
            "}",
            f"const {_scale(encoding)} made(most);",
            *each,
            f"    {self.names[scales]}[row * {across} + b] = made.stored;",
            f"    quantize_by(made.over, block, count, {self.names[codes]} + row * {columns} + "
            f"b * {block});",
            "}",
        ]
        return _for_all_rows(elements((*lead, rows * across)), block * block, body)

    def _quantize_columns(self, op: Op) -> list[str]:
        """Blocks of rows in which no matrix begins: block m is rows 32 m to 32 m + 31."""
        (x,), encoding = op.values, op.encoding
        *lead, n, k = x.type.shape
        rows = elements((*lead, n))
        body = self._blocks_of_columns(
            op, [*reshaped([_ROW], (rows,), (*lead, n)), _J], str(encoding.block)
        )
        lines = [f"const i64 first = m * {encoding.block}, at = m;", *body]
        blocks = f"{size(rows)} / {encoding.block}"
        return [
            f"for_tiles({blocks}, {size(plain(k))}, pool, [&](i64 m, i64 j0, i64 j1) {{",
            *inner(lines),
            "});",
        ]

    def _quantize_runs(self, op: Op) -> list[str]:
        """Blocks of each group's rows, the last one padded with zeros; zeros past the last end, and
        the scale of zeros in blocks without rows.
        """
        x, ends = op.values
        codes, scales = _unpacked(self.fusion, op)
        block = op.encoding.block
        rows, k = x.type.shape
        blocks, _ = scales.type.shape
        groups = size(ends.type.shape[0])
        end = self.array(ends)
        body = [
            f"const i64 start = m == 0 ? 0 : {end}[m - 1];",
            f"for (i64 first = start; first < {end}[m]; first += {block}) {{",
            f"    const i64 at = start / {block} + m + (first - start) / {block};",
            *inner(
                self._blocks_of_columns(op, [_ROW, _J], f"std::min<i64>({block}, {end}[m] - first)")
            ),
            "}",
        ]
        columns = size(plain(k))
        return [
            f"std::fill_n({self.names[scales]}, {size(plain(blocks))} * {columns}, "
            f"{_scale(op.encoding)}(0).stored);",
            f"const i64 past = {groups} == 0 ? 0 : {end}[{groups} - 1];",
            f"std::fill_n({self.names[codes]} + past * {columns}, ({size(plain(rows))} - past) * "
            f"{columns}, u8(0));",
            f"for_tiles({groups}, {columns}, pool, [&](i64 m, i64 j0, i64 j1) {{",
            *inner(body),
            "});",
        ]

    def _blocks_of_columns(self, op: Op, at: Sequence[Index], count: str) -> list[str]:
        """Block `at` of each column j, which has `count` rows from `first` on."""
        encoding = op.encoding
        codes, scales = _unpacked(self.fusion, op)
        result = self.elements()
        element = result.of(op.values[0], at)
        block = encoding.block
        columns = size(plain(op.values[0].type.shape[-1]))
        return [
            "for (i64 j = j0; j < j1; ++j) {",
            f"    float block[{block}] = {{}};",
            f"    u8 made[{block}];",
            f"    for (i64 i = 0; i < {count}; ++i) {{",
            "        const i64 row = first + i;",
            *inner(inner([*result.lines, f"block[i] = {element};"])),
            "    }",
            f"    quantize_fp8<{_scale(encoding)}>(block, {block}, made, {self.names[scales]} + "
            f"at * {columns} + j);",
            f"    for (i64 i = 0; i < {count}; ++i) {self.names[codes]}[(first + i) * {columns} + "
            "j] = made[i];",
            "}",
        ]

    def _transpose_blocks(self, op: Op) -> list[str]:
        """Row m of all transposed matrices is column k of one; the scale of a block stands in each
        of its rows.
        """
        (codes, scales), result = op.values, op.outputs
        groups, *sizes = codes.type.shape
        n, k = map(known, sizes)
        across, down = (known(s.type.shape[-1]) for s in (scales, result[1]))
        block = FP8_E8M0.block
        body = [
            f"const i64 row = m / {k} * {n}, k = m % {k};",
            "for (i64 j = j0; j < j1; ++j) {",
            f"    {self.names[result[0]]}[m * {n} + j] = {self.array(codes)}[(row + j) * {k} + k];",
            "}",
            f"for (i64 j = (j0 + {block - 1}) / {block}; j * {block} < j1; ++j) {{",
            f"    {self.names[result[1]]}[m * {down} + j] = "
            f"{self.array(scales)}[(row + j * {block}) * {across} + k / {block}];",
            "}",
        ]
        return [
            f"for_tiles({size(plain(groups) * k)}, {n}, pool, [&](i64 m, i64 j0, i64 j1) {{",
            *inner(body),
            "});",
        ]

    def _grouped_swizzle(self, op: Op) -> list[str]:
        (x, ends), (out,) = op.values, op.outputs
        rows, cols = x.type.shape
        arguments = (
            f"{self.array(x)}, {self.array(ends)}, {size(ends.type.shape[0])}, {size(rows)}, "
            f"{size(cols)}"
        )
        return [f"swizzle_128x4({arguments}, {self.names[out]});"]


_WHOLE: dict[str, Callable[[LoopsWriter, Op], list[str]]] = {
    "sum": LoopsWriter._sum,
    "logsumexp": LoopsWriter._logsumexp,
    "combine": LoopsWriter._combine,
    "group_sum": LoopsWriter._group_sum,
    "index_put_accumulate": LoopsWriter._index_put_accumulate,
    "topk_weights_backward": lambda writer, op: [writer.of_weights(op)],
    "decode_scale": LoopsWriter._decode_scale,
    "quantize": LoopsWriter._quantize,
    "transpose_blocks": LoopsWriter._transpose_blocks,
    "grouped_swizzle": LoopsWriter._grouped_swizzle,
}


def _for_rows(rows: AnySize, width: AnySize, body: Sequence[str]) -> list[str]:
    """`body` for each m, unless rows are empty: there may be more of them than can be counted
    through.
    """
    return [f"if ({size(width)} > 0) {{", *inner(_for_all_rows(rows, width, body)), "}"]


def _for_all_rows(rows: AnySize, width: AnySize, body: Sequence[str]) -> list[str]:
    """`body` for each m; a thread takes rows with about the same number of elements at a time."""
    step = f"rows_per_step({size(width)})"
    return [f"for_rows({size(rows)}, {step}, pool, [&](i64 m) {{", *inner(body), "});"]


def _for_columns(body: Sequence[Statement], first: str = "j0", end: str = "j1") -> list[str]:
    """`body` for each j, as vector code if nothing prevents it; statements that do not depend on j
    come before the loop.
    """
    once, each = hoisted(body, "j")
    simd = [] if branches(each) else ["#pragma omp simd"]
    return [
        *written(once),
        *simd,
        f"for (i64 j = {first}; j < {end}; ++j) {{",
        *inner(written(each)),
        "}",
    ]


def _sum_blocks(at_once: int, start: str, stop: str, columns: str, add: Sequence[str]) -> list[str]:
    """The sums of terms start .. stop - 1, where `add` adds up to so many, first .. end - 1, to
    zeros in `sum`.
    """
    return [
        f"sum_blocks<{at_once}>({start}, {stop}, {columns}, sum, [&](i64 first, i64 end) {{",
        *inner(add),
        "});",
    ]


def _rows_of(shape: Sequence[Dim]) -> tuple[AnySize, AnySize]:
    """A shape as rows and columns; a vector is one row."""
    return elements(shape[:-1]), plain(shape[-1]) if shape else 1


def _scale(encoding: Encoding) -> str:
    if encoding.name not in TRAINED:
        raise _no_kernel(encoding)
    return scale_class(encoding)


def _no_kernel(encoding: Encoding) -> UnsupportedError:
    return UnsupportedError(
        f"quantizing to {encoding.name} has no kernel here",
        expected=" or ".join((NVFP4.name, *TRAINED)),
    )
