"""The CUDA C++ that makes copies of numbers in MXFP8, around kernels/mxfp8.cuh: what is stored of each, one kernel for those of a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...encodings import find
from ...ir.core import Fusion, Op, Value
from ...ir.kinds.quantized import TRAINED
from ...ir.kinds.shape import elements
from ...ir.sizes import value
from ...ir.types import plain
from ...runtime import cuda
from ..cxx.indices import Variable, reshaped, size
from ..cxx.plan import known
from ..cxx.statements import inner
from ..inexpressible import Inexpressible
from .source import MAX_RESIDENT, THREADS, KernelSource, Sizes, Source
from .vectors import of_eight

_ROWS = 32  # of a tile, and in a block of a copy along columns
_J, _M = map(Variable, "jm")


@dataclass(frozen=True)
class Copy:
    """A `quantize` with what follows it: the parts, and the bf16 numbers that they stand for; None for what nobody reads."""

    op: Op
    codes: Value | None
    scales: Value | None
    numbers: Value | None

    @classmethod
    def of(cls, fusion: Fusion, op: Op) -> Copy:
        """Inexpressible for another encoding than MXFP8, and unless all that reads it is one `unpack`."""
        encoding, (made,) = find(op.attrs["encoding"]), op.outputs
        if encoding.name not in TRAINED:
            raise Inexpressible(op, f"quantizing to {encoding.name} has no kernel here")
        if why := cuda.why_no_wgmma():
            raise Inexpressible(op, why)
        if known(op.values[0].type.shape[-1]) % encoding.block:
            raise Inexpressible(op, f"quantizing {op.values[0].type} has no kernel here, expected a multiple of {encoding.block} columns")
        readers = fusion.readers.get(made, ())
        if made in fusion.outputs or [r.kind.name for r in readers] != ["unpack"]:
            raise Inexpressible(op, f"{made.name} {made.type} has no kernel here, expected quantize followed by unpack")
        parts = readers[0].outputs
        numbers = _numbers(fusion, parts)
        codes, scales = (v if _read_apart(fusion, v, numbers) else None for v in parts)
        return cls(op, codes, scales, numbers)

    @property
    def in_columns(self) -> bool:
        """Whether its blocks lie along rows."""
        return find(self.op.attrs["encoding"]).axis == -2

    @property
    def memory(self) -> list[Value]:
        """What is stored of it."""
        return [v for v in (self.codes, self.scales, self.numbers) if v is not None]


def of_one_value(fusion: Fusion) -> dict[Op, list[Copy]]:
    """The copies of a fusion, those of one value together, by the first `quantize` of it. Raises as `Copy.of`."""
    found: dict[Value, list[Copy]] = {}
    for op in fusion.ops:
        if op.kind.name == "quantize":
            found.setdefault(op.values[0], []).append(Copy.of(fusion, op))
    if twice := [of_x for of_x in found.values() if len({copy.in_columns for copy in of_x}) < len(of_x)]:
        raise Inexpressible(twice[0][-1].op, f"{twice[0][0].op.values[0].name} is quantized twice along an axis")
    return {of_x[0].op: of_x for of_x in found.values()}


def _numbers(fusion: Fusion, parts: Sequence[Value]) -> Value | None:
    """What parts are decoded to in the same segment."""
    packs = (r for r in fusion.readers.get(parts[0], ()) if r.kind.name == "pack" and r.values == tuple(parts))
    decoded = (r for pack in packs for r in fusion.readers.get(pack.outputs[0], ()))
    return next((r.outputs[0] for r in decoded if r.kind.name == "dequantize" and r.attrs["dtype"] == "bf16"), None)


def _read_apart(fusion: Fusion, part: Value, numbers: Value | None) -> bool:
    """Whether a part is read by more than what decodes it."""
    if part in fusion.outputs:
        return True
    packed = [r.outputs[0] for r in fusion.readers.get(part, ()) if r.kind.name == "pack"]
    decoded = [r.outputs[0] for v in packed for r in fusion.readers.get(v, ())]
    return len(packed) < len(fusion.readers.get(part, ())) or decoded != [numbers]


def kernel(source: Source, name: str, copies: Sequence[Copy], left: Sequence[Value], sizes: Sizes) -> KernelSource:
    """What makes copies of one value, each along another axis. left: what is not in memory yet."""
    (x, *_), ends = copies[0].op.values, next((v for copy in copies for v in copy.op.values[1:]), None)
    *lead, n, _ = x.type.shape
    width, rows = known(x.type.shape[-1]), elements((*lead, n))
    made = source.elements(without=left, below={_J.name: width})
    element = made.of(x, reshaped([_M, _J], (rows, width), x.type.shape))
    groups = 0 if ends is None else known(ends.type.shape[0])
    tiles = f"PlainRows{{{size(rows)}}}" if ends is None else f"GroupedRows<{groups}>{{{source.array(ends, left)}, {size(rows)}, error}}"
    by_axis = {copy.in_columns: copy for copy in copies}
    which = ", ".join(str(axis in by_axis).lower() for axis in (False, True))
    body = [
        "griddepcontrol_wait();",
        "griddepcontrol_launch_dependents();",
        "const auto load = [&](i64 m, i64 j0, float (&x)[8]) {",
        *inner(of_eight(made.statements, [f"x[v] = {element};"])),
        "};",
        f"make_copies<{width}, {which}>({tiles}, load, {_stored(source, by_axis.get(False))}, {_stored(source, by_axis.get(True))});",
    ]
    warps = (-(-value(plain(rows), sizes) // _ROWS) + (groups + 1 if groups else 0)) * (width // _ROWS)
    return source.kernel(name, body, -(-warps * 32 // THREADS), headers=("mxfp8.cuh",), max_resident=MAX_RESIDENT)


def _stored(source: Source, copy: Copy | None) -> str:
    """Where a copy goes."""
    if copy is None:
        return "Copy{}"
    return f"Copy{{{', '.join('nullptr' if v is None else source.names[v] for v in (copy.codes, copy.scales, copy.numbers))}}}"
