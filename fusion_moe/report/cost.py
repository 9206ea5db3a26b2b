"""The cost of a segment: operations and bytes, from its types and the sizes of one call.

Bytes read and written are those of its inputs and outputs, each counted once. Of a grouped weight,
only groups that have rows count. Only the device knows how many these are; unless the number is
given, it is taken to be the number of rows, if that is less. Bytes avoided are what separate
kernels would move in addition: each value between two operations of the segment would be written
once (unless it is written anyway) and read once. Views, slices and reshapes move nothing. A cast is
done by the kernel before or after it, so a value counts with the narrowest dtype that it has on its
way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from ..encodings import Part
from ..ir import (
    DTYPES,
    Fusion,
    Op,
    Rows,
    TensorType,
    Value,
    dtype_name,
    plain,
    storage_shape,
    value,
)
from ..ir.kinds.runs import part_shape
from ..layouts import LAYOUTS

_COPIES = ("cat", "pad", "full")  # their role is "shape", but they write new memory
_PER_GROUP = ("grouped", "per_group")  # roles of products


def flops(fusion: Fusion, env: Mapping[str, int]) -> int:
    """Floating-point operations: two for each multiply-add of a product, one for each element of a
    pointwise result.
    """
    return sum(value(op.kind.flops(op), env) for op in fusion.ops if op.kind.flops)


def bytes_read(
    fusion: Fusion, env: Mapping[str, int], used: Mapping[str, int] | None = None
) -> int:
    """Bytes of the inputs; of grouped weights, those of the groups that have rows. used: partition
    -> number of groups that have rows.
    """
    return sum(_touched(v, fusion, env, used or {}) for v in fusion.inputs)


def bytes_written(fusion: Fusion, env: Mapping[str, int]) -> int:
    """The bytes that a segment's outputs have."""
    return sum(type_bytes(v.type, env) for v in fusion.outputs)


def bytes_avoided(fusion: Fusion, env: Mapping[str, int]) -> int:
    """Bytes of the values inside: one read each, and one write unless the value is an output."""
    return sum(_avoided(v, fusion, env) for op in fusion.ops if not _rides(op) for v in op.outputs)


def _avoided(v: Value, fusion: Fusion, env: Mapping[str, int]) -> int:
    after = forms(v, fusion, _rides)  # casts and renaming
    read = not all(_rides(reader) for form in after for reader in fusion.readers.get(form, ()))
    size = type_bytes(v.type, env)
    if not v.type.quantized:
        # packs have parts
        plain_forms = (form.type for form in after if not form.type.quantized)
        size = size // _itemsize(v.type) * min(map(_itemsize, plain_forms))
    return size * (read + (read and not any(form in fusion.outputs for form in after)))


def forms(v: Value, fusion: Fusion, through: Callable[[Op], bool]) -> list[Value]:
    """A value, and the results of those of its readers, and of theirs, for which `through`
    holds.
    """
    results = [v]
    for form in results:
        for reader in filter(through, fusion.readers.get(form, ())):
            results += [out for out in reader.outputs if out not in results]
    return results


def _rides(op: Op) -> bool:
    """Whether an operation moves no bytes by itself."""
    return (
        op.kind.name == "cast"
        or op.kind.role == "view"
        or (op.kind.role == "shape" and op.kind.name not in _COPIES)
    )


def type_bytes(type: TensorType, env: Mapping[str, int]) -> int:
    """Bytes of a value of this type."""
    if type.quantized:
        return sum(_part_bytes(part, type, env) for part in type.encoding.parts)
    return prod(storage_shape(type, env)) * _itemsize(type)


def _part_bytes(part: Part, type: TensorType, env: Mapping[str, int]) -> int:
    """Bytes of a part of an encoded value: block scales padded as their layout stores them, and one
    scale for a whole matrix.
    """
    (*lead, rows, k), encoding = type.shape, type.encoding
    if part.of_blocks and isinstance(rows, Rows) and type.layout != "linear":
        rows = rows % getattr(LAYOUTS[type.layout], "rows", 1)
    shape = part_shape(encoding, part, (*lead, rows, value(plain(k), env)))
    layout = type.layout if part.of_blocks else "linear"
    return (
        prod(storage_shape(TensorType(shape, dtype_name(part.dtype), layout), env))
        * part.dtype.itemsize
    )


def _itemsize(type: TensorType) -> int:
    return DTYPES[type.dtype].itemsize


def _touched(v: Value, fusion: Fusion, env: Mapping[str, int], used: Mapping[str, int]) -> int:
    size, rows = type_bytes(v.type, env), _rows_of_weight(v, fusion)
    if rows is None:
        return size
    groups = value(rows.groups.count, env)
    return size * used.get(rows.groups.name, min(value(rows.total, env), groups)) // max(groups, 1)


def _rows_of_weight(v: Value, fusion: Fusion) -> Rows | None:
    """The rows of the product that reads a value as its weight, one matrix for each group; None if
    no product does.
    """
    for form in forms(v, fusion, lambda op: op.kind.role not in _PER_GROUP):
        for reader in fusion.readers.get(form, ()):
            if reader.kind.role in _PER_GROUP and form is reader.values[1]:
                rows = reader.values[0].type.shape[0]
                if isinstance(rows, Rows) and all(
                    x.type.shape[:1] == (rows.groups.count,) for x in (v, form)
                ):
                    return rows
    return None
