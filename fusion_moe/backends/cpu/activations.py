"""The prologue of a grouped product: rows of activations, read where they are in memory, or
computed.
"""

from __future__ import annotations

from ...ir import Value
from ..cxx import Variable, branches, hoisted, inner, written
from ..cxx.elements import STORED
from .segment import SegmentWriter

ACTIVATION = {"f32": "OF_F32", "bf16": "OF_BF16", "f16": "OF_F16"}  # kernels/product.h
_K, _M = map(Variable, "km")


def row_function(writer: SegmentWriter, name: str, v: Value, width: int) -> list[str]:
    """A member function that returns row m of a matrix [M, width]: in memory, or computed into
    `scratch`.
    """
    a = STORED[v.type.dtype]
    return [f"const {a}* {name}(i64 m, {a}* scratch) const {{", *inner(_row(writer, v, width)), "}"]


def row_pointer(v: Value, field: str, name: str) -> list[str]:
    """Passes the function to a product, as a field of a Problem."""
    return [
        f"{field} = [](const void* segment, i64 m, void* scratch) -> const void* {{",
        f"    return static_cast<const Segment*>(segment)->{name}(m, "
        f"static_cast<{STORED[v.type.dtype]}*>(scratch));",
        "};",
    ]


def _row(writer: SegmentWriter, v: Value, width: int) -> list[str]:
    elements = writer.elements()
    result = elements.row_in_memory(v, _M, width)
    if result is not None:
        matrix, row = result
        return [
            *elements.lines,
            "(void)scratch;",
            f"return {writer.names[matrix]} + {row} * {width};",
        ]
    elements = writer.elements()
    output = elements.of(v, [_M, _K])
    once, each = hoisted(elements.statements, _K.name)
    simd = [] if branches(each) else ["#pragma omp simd"]
    store = f"scratch[k] = narrow<{STORED[v.type.dtype]}>({output});"
    return [
        *written(once),
        *simd,
        f"for (i64 k = 0; k < {width}; ++k) {{",
        *inner([*written(each), store]),
        "}",
        "return scratch;",
    ]
