"""What the operations of nvFuser mean, in plain torch: the table OPS, name -> function of Values,
Scalars and literals.

Written from nvFuser's documentation and sources, not from the library that is tested with it, of
which it imports nothing.
"""

from collections.abc import Callable
from typing import Any

from . import blockscale, pointwise, products, rows, shapes

OPS: dict[str, Callable[..., Any]] = {
    **pointwise.OPS,
    **shapes.OPS,
    **rows.OPS,
    **blockscale.OPS,
    **products.OPS,
}
