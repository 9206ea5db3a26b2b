"""The table of operations. A new operation is one row in one of these files: its type rule, its
meaning, its derivative.
"""

from ..core import OpKind
from . import collectives, grouped, pointwise, quantized, router, rows, shape

KINDS: dict[str, OpKind] = {
    kind.name: kind
    for file in (pointwise, shape, router, rows, quantized, grouped, collectives)
    for kind in file.TABLE
}
