"""The fusion IR: typed programs over rows that are divided into groups. docs/ir.md describes it.

What most of the library uses of it is imported from here; the files are:

sizes.py, types.py, signature.py    sizes that the host knows at launch; types of values, programs
core.py          Value, Op, Fusion; binding.py: symbols become numbers
kinds/           the table of operations: type rule, meaning, derivative
builder.py       FusionDefinition, by which programs are built; op_methods.py: `fd.ops`
text.py          a Fusion as Python text, and back
activation.py    a pointwise function as text
derivative.py    forward and backward of a Fusion; gradients.py: of each operation
saved.py         what the forward saves: a minimum cut; router_gradient.py: one product less
effects.py       inputs that are written
flow.py          parts of programs
"""

from .binding import nbytes, storage, storage_shape
from .builder import FusionDefinition
from .core import Fusion, Op, Value
from .flow import dependent, made_again, needed, part
from .sizes import AnySize, CeilDiv, Size, ceildiv, exact_div, symbol, value
from .text import one_line, parse
from .types import (
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    NARROW,
    STORED,
    Dim,
    Groups,
    Rows,
    TensorType,
    dtype_name,
    elements,
    plain,
)

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "FLOATS",
    "NARROW",
    "STORED",
    "AnySize",
    "CeilDiv",
    "Dim",
    "Fusion",
    "FusionDefinition",
    "Groups",
    "Op",
    "Rows",
    "Size",
    "TensorType",
    "Value",
    "ceildiv",
    "dependent",
    "dtype_name",
    "elements",
    "exact_div",
    "made_again",
    "nbytes",
    "needed",
    "one_line",
    "parse",
    "part",
    "plain",
    "storage",
    "storage_shape",
    "symbol",
    "value",
]
