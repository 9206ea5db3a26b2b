"""What a segment costs: operations and bytes, from its types and the sizes of one call.

Bytes read and written are those of its inputs and outputs, each once. Of weights that belong to groups, at most as many groups are
touched as there are rows. Avoided is what separate kernels would have moved besides: every value between two of its operations
written once and read once; what only renames elements (views, slices, reshapes) moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch

from ..formats import FORMATS
from ..ir.core import Fusion, Value, storage_shape
from ..ir.sizes import value
from ..ir.types import DTYPES, Rows, TensorType
from ..segment import Segment

_FREE = ("view", "shape")


def flops(fusion: Fusion, env: Mapping[str, int]) -> int:
    """Floating-point operations: two for each multiply-add of a product, one for each element of a pointwise result."""
    return sum(value(op.kind.flops(op), env) for op in fusion.ops if op.kind.flops)


def bytes_read(segment: Segment, env: Mapping[str, int]) -> int:
    """Bytes of the inputs, of grouped weights at most those that the rows can touch."""
    return sum(_touched(v, segment.fusion, env) for v in segment.fusion.inputs)


def bytes_written(segment: Segment, env: Mapping[str, int]) -> int:
    """Bytes of the outputs."""
    return sum(type_bytes(v.type, env) for v in segment.fusion.outputs)


def bytes_avoided(segment: Segment, env: Mapping[str, int]) -> int:
    """Bytes of the values inside, twice."""
    inside = (v for op in segment.fusion.ops if op.kind.role not in _FREE for v in op.outputs if v not in segment.fusion.outputs)
    return 2 * sum(type_bytes(v.type, env) for v in inside)


def type_bytes(type: TensorType, env: Mapping[str, int]) -> int:
    """Bytes of a value of this type."""
    shape = storage_shape(type, env)
    if type.quantized:
        blocks = FORMATS[type.dtype].blocks(FORMATS[type.dtype].elements(shape[-1]))
        return prod(shape) + prod(shape[:-1]) * blocks
    return prod(shape) * torch.empty(0, dtype=DTYPES[type.dtype]).element_size()


def _touched(v: Value, fusion: Fusion, env: Mapping[str, int]) -> int:
    size = type_bytes(v.type, env)
    if fusion.role(v) != "weight" or not v.type.shape:
        return size
    rows = [r for r in _cut_rows(fusion) if r.groups.count == v.type.shape[0]]
    if not rows:
        return size
    groups = value(rows[0].groups.count, env)
    return size * min(value(rows[0].total, env), groups) // max(groups, 1)


def _cut_rows(fusion: Fusion) -> Iterator[Rows]:
    for v in (*fusion.inputs, *(v for op in fusion.ops for v in op.outputs)):
        yield from (d for d in v.type.shape if isinstance(d, Rows))
