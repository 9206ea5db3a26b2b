"""The CUDA C++ of copies in few bits, by block_copies.py and e2m1_copies.py: which operations are
copies, and a kernel that makes and stores all copies of one value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...encodings import FP8_COLUMNS, MXFP8_COLUMNS
from ...ir import Fusion, Op, Value, elements
from ...ir.kinds.eight_bits import TRAINED
from ...schedule.product import cat_before
from ..cxx import Variable, base_of, hoisted, inner, known, reshaped, stored, written
from ..inexpressible import Inexpressible
from . import block_copies, e2m1_copies
from .block_copies import BLOCK_COPY
from .source import KernelSource, Source
from .vectors import FIRST, VECTOR, WholeEights, of_eight

_J, _M = map(Variable, "jm")


@dataclass(frozen=True)
class Copy:
    """A `quantize` and the operations after it: the parts, and the bf16 numbers that they stand
    for; None for unread ones. turned: the codes by columns, in place of the others; both_ways: the
    parts of the transposed matrices.
    """

    op: Op
    codes: Value | None
    scales: Value | None
    numbers: Value | None
    turned: Value | None = None
    both_ways: tuple[Value, ...] = ()

    @classmethod
    def of(cls, fusion: Fusion, op: Op) -> Copy:
        """Inexpressible for encodings without a kernel, and unless one `unpack` is the only reader,
        after a `relayout` of weights in E2M1.
        """
        encoding, (result,) = op.encoding, op.outputs
        if encoding.name not in (*TRAINED, *e2m1_copies.SCALES):
            raise Inexpressible(op, f"quantizing to {encoding.name} has no kernel here")
        multiple = VECTOR if encoding.name in block_copies.ENCODINGS else encoding.block
        if known(op.values[0].type.shape[-1]) % multiple:
            raise Inexpressible(
                op,
                f"quantizing {op.values[0].type} has no kernel here, expected "
                f"a multiple of {multiple} columns",
            )
        e2m1, relaid = encoding.name in e2m1_copies.SCALES, fusion.only_reader(result, "relayout")
        if e2m1 and relaid and relaid.attrs["layout"] == e2m1_copies.LAYOUT:
            (result,) = relaid.outputs
        unpack = fusion.only_reader(result, "unpack")
        if unpack is None:
            raise Inexpressible(
                op,
                f"{result.name} {result.type} has no kernel here, expected quantize followed by "
                "unpack",
            )
        parts = unpack.outputs
        numbers = None if e2m1 else _numbers(fusion, parts)
        codes, scales = (v if _read_apart(fusion, v, numbers) else None for v in parts)
        if turned := _turned(fusion, codes):
            return cls(op, None, scales, None, turned)
        return cls(op, codes, scales, numbers, both_ways=_both_ways(fusion, parts))

    @property
    def in_columns(self) -> bool:
        """Whether its blocks lie along rows."""
        return self.op.encoding.axis == -2

    @property
    def memory(self) -> list[Value]:
        """The values of it that are stored."""
        stored = self.codes, self.scales, self.numbers, self.turned, *self.both_ways
        return [v for v in stored if v is not None]


def of_one_value(fusion: Fusion) -> dict[Op, list[Copy]]:
    """The copies in few bits that a fusion makes, by the first `quantize` of the value that they
    round: in 8 bits those along rows and along columns of one value share a kernel.

    Inexpressible if a value is quantized twice along one axis, or a copy has no kernel (`Copy.of`).
    """
    results: dict[object, list[Copy]] = {}
    for op in fusion.ops:
        if op.kind.name == "quantize":
            alone = op.attrs["encoding"] in e2m1_copies.SCALES
            results.setdefault(op if alone else op.values[0], []).append(Copy.of(fusion, op))
    if twice := [
        of_x for of_x in results.values() if len({copy.in_columns for copy in of_x}) < len(of_x)
    ]:
        raise Inexpressible(
            twice[0][-1].op, f"{twice[0][0].op.values[0].name} is quantized twice along an axis"
        )
    return {of_x[0].op: of_x for of_x in results.values()}


def saved(fusion: Fusion) -> list[Op]:
    """Each `dequantize` to bf16 of a copy with blocks along the rows of groups (MXFP8 or FP8) whose
    codes and scales are inputs of the fusion: a forward saved them.
    """
    results = []
    for op in fusion.ops:
        if op.kind.name != "dequantize" or len(op.values) == 1 or op.attrs["dtype"] != "bf16":
            continue
        packed, pack = op.values[0], fusion.producer(op.values[0], "pack")
        of_runs = packed.type.encoding in (MXFP8_COLUMNS, FP8_COLUMNS)
        parts = () if pack is None else pack.values
        if parts and of_runs and all(base_of(fusion, v) in fusion.inputs for v in parts):
            results.append(op)
    return results


def _numbers(fusion: Fusion, parts: Sequence[Value]) -> Value | None:
    """The value to which parts are decoded in the same segment."""
    packs = (
        r
        for r in fusion.readers.get(parts[0], ())
        if r.kind.name == "pack" and r.values == tuple(parts)
    )
    decoded = (r for pack in packs for r in fusion.readers.get(pack.outputs[0], ()))
    return next(
        (
            r.outputs[0]
            for r in decoded
            if r.kind.name == "dequantize" and r.attrs["dtype"] == "bf16"
        ),
        None,
    )


def _turned(fusion: Fusion, codes: Value | None) -> Value | None:
    """The only reading of codes, if that is by columns."""
    turn = fusion.only_reader(codes, "transpose_row_blocks") if codes else None
    return turn.outputs[0] if turn else None


def _both_ways(fusion: Fusion, parts: Sequence[Value]) -> tuple[Value, ...]:
    """The parts of transposed matrices, if these are in the segment."""
    turns = (r for r in fusion.readers.get(parts[0], ()) if r.kind.name == "transpose_blocks")
    return next((r.outputs for r in turns if r.values == tuple(parts)), ())


def _read_apart(fusion: Fusion, part: Value, numbers: Value | None) -> bool:
    """Whether something other than the decoding operation reads a part."""
    if part in fusion.outputs:
        return True
    packed = [r.outputs[0] for r in fusion.readers.get(part, ()) if r.kind.name == "pack"]
    decoded = [r.outputs[0] for v in packed for r in fusion.readers.get(v, ())]
    return len(packed) < len(fusion.readers.get(part, ())) or decoded != [numbers]


def kernels(
    source: Source, name: str, copies: Sequence[Copy], left: Sequence[Value]
) -> tuple[KernelSource, ...]:
    """The kernels that make copies of one value, each along another axis. left: values that are not
    in memory yet.
    """
    op = copies[0].op
    x, ends = op.values[0], next((v for copy in copies for v in copy.op.values[1:]), None)
    row, number = _row(source, x, left)
    if e2m1_copies.chosen_inside(source.fusion, op):
        return e2m1_copies.by_matrix(source, name, row, op, copies[0].memory, number)
    if op.encoding.name in e2m1_copies.SCALES:
        return (e2m1_copies.kernel(source, name, row, op, copies[0].memory, number, left),)
    each = [(copy.op.encoding, _places(source, copy), _kind(copy)) for copy in copies]
    shape, cut = x.type.shape, _cut(source.fusion, x)
    return (block_copies.kernel(source, name, row, each, number, shape, ends, left, cut),)


def _row(source: Source, x: Value, left: Sequence[Value]) -> tuple[list[str], str]:
    """The C++ of the rows of a value, eight columns at a time, and the type of its numbers."""
    *lead, n, k = x.type.shape
    width, in_memory = known(k), source.in_memory(left)
    result = WholeEights(source.fusion, in_memory, below={_J.name: width})
    element = result.of(x, reshaped([_M, _J], (elements((*lead, n)), width), x.type.shape))
    of_row, of_columns = hoisted(result.statements, FIRST.name, _J.name)
    once, each = written(of_row), of_eight(of_columns, [f"x[v] = {element};"])
    reports = any(", error)" in line for line in once)
    return [
        *(["LateReport late{error};"] if reports else []),
        "const auto row = [&](i64 m) {",
        *inner(["LateReport& error = late;"] if reports else []),
        *inner(once),
        "    return [=](i64 j0, float (&x)[8]) {",
        *inner(inner(each)),
        "    };",
        "};",
    ], "bf16" if stored(x) == "bf16" else "float"


def _cut(fusion: Fusion, x: Value) -> int:
    """The column from which on a value is made from the second of two others; 0: it is not."""
    cat = cat_before(fusion, x)
    widths = [known(v.type.shape[-1]) for v in cat.values] if cat else []
    # others are parts of blocks that alternate
    return widths[0] if len(widths) == 2 and sum(widths) == known(x.type.shape[-1]) else 0


def _kind(copy: Copy) -> str:
    """What block_copies.cuh calls it."""
    if copy.both_ways:
        return f"BothWays<{{scale}}, {known(copy.op.values[0].type.shape[-2])}>"
    return "TurnedCopy<{scale}>" if copy.turned else BLOCK_COPY


def _places(source: Source, copy: Copy) -> str:
    """Where its codes, scales and numbers are stored."""
    stored: list[Value | None] = [copy.codes, copy.scales, copy.numbers, *copy.both_ways]
    if copy.turned:
        stored = [copy.turned, copy.scales]
    return ", ".join("nullptr" if v is None else source.names[v] for v in stored)
