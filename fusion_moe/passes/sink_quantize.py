"""Rows that products of all ranks read in codes travel so, as half as many bytes: each is quantized
once, by the rank whose token it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..encodings import Encoding
from ..ir import Fusion, FusionDefinition, Op, Value
from ..ir.kinds.rules import known
from ..target import ROWS, Target
from .rewrite import rewrite


def sink_quantize(fusion: Fusion, target: Target) -> Fusion:
    """The Fusion with a `quantize` before each operation that moves rows which are only picked to
    be quantized, to an encoding that the target's products read.
    """
    results = {op: _only_read_in(fusion, op) for op in fusion.ops}
    read = {ROWS.get(form) for form in target.activation_formats}
    sent = {op: encoding for op, encoding in results.items() if encoding and encoding.name in read}
    return rewrite(fusion, partial(_rule, sent, {})) if sent else fusion


def _only_read_in(fusion: Fusion, op: Op) -> Encoding | None:
    """The encoding to which all that reads rows that were moved quantizes them."""
    rows = op.outputs[0]
    if not op.kind.moves_rows_in or rows in fusion.outputs:
        return None
    results: set[Encoding | None] = set()
    for gather in fusion.readers.get(rows, ()):
        picks = gather.kind.name == "index_select" and gather.attrs["dim"] == 0
        (picked,) = gather.outputs
        if not picks or picked in fusion.outputs:
            return None
        results |= {_of_rows(reader) for reader in fusion.readers.get(picked, ())}
    encoding = results.pop() if len(results) == 1 else None
    width, piece = rows.type.shape[1], op.kind.moves_rows_in
    return encoding if encoding and _in_pieces(encoding, known(width), piece) else None


def _of_rows(op: Op) -> Encoding | None:
    """That of a `quantize` of single rows."""
    alone = op.kind.name == "quantize" and len(op.values) == 1 and op.rule == "max"
    return op.encoding if alone and op.encoding.axis == -1 else None


def _in_pieces(encoding: Encoding, width: int, piece: int) -> bool:
    shapes = [(encoding.part_shape(part, (), 1, width), part) for part in encoding.parts]
    return all(shape[-1] * part.dtype.itemsize % piece == 0 for shape, part in shapes)


def _rule(
    sent: dict[Op, Encoding],
    scales: dict[Value, Sequence[Value]],
    fd: FusionDefinition,
    op: Op,
    inputs: Sequence[Any],
) -> Sequence[Value] | None:
    """Picks codes where rows were picked; scales: those of codes."""
    if op in sent:
        x, *others = inputs
        codes, *beside = fd.ops.unpack(fd.ops.quantize(x, encoding=sent[op].name))
        result = fd.append(op.kind, [codes, *others, *beside], op.attrs)
        before = len(op.outputs)
        scales[result[0]] = result[before:]
        return result[:before]
    gather = fd.producer(inputs[0], "index_select") if op.kind.name == "quantize" else None
    if gather is None or gather.values[0] not in scales:
        return None
    picked = [
        fd.append(gather.kind, [part, gather.values[1]], gather.attrs)[0]
        for part in scales[gather.values[0]]
    ]
    return [fd.ops.pack(inputs[0], *picked, encoding=op.encoding.name, layout="linear")]
