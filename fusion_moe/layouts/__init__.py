"""Layouts: the same numbers in another order of bytes, as objects with an inverse. A layout never
changes meaning.

linear    row-major
sf128x4   block scales as compute capability 10.0 reads them
w16x64    weights as the CUDA kernels read them

One of your own: `Tiled`, and `register`. `Padding` is applied first to weights that are not whole
tiles.
"""

from ..encodings import Order
from ..errors import OptionError
from .groups import bound, ceil_to, check_ends, check_ids, ends_from_sizes
from .layout import LINEAR, Layout, Linear, TensorLayout, as_bytes
from .padding import Padding
from .sf128x4 import SF128X4, SF128x4
from .tiled import Tiled
from .w16x64 import W16X64, W16x64

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (LINEAR, SF128X4, W16X64)}


def register(layout: Tiled) -> Tiled:
    """Registers a layout by its name, for types, operations and kernels. OptionError if another
    one has the name.
    """
    if LAYOUTS.setdefault(layout.name, layout) != layout:
        raise OptionError(
            f"another layout called {layout.name!r}",
            expected="an unused name",
            todo="unregister it first",
        )
    return layout


def unregister(name: str) -> None:
    """Removes a layout that `register` added."""
    LAYOUTS.pop(name, None)


__all__ = [
    "LAYOUTS",
    "LINEAR",
    "SF128X4",
    "W16X64",
    "Layout",
    "Linear",
    "Order",
    "Padding",
    "SF128x4",
    "TensorLayout",
    "Tiled",
    "W16x64",
    "as_bytes",
    "bound",
    "ceil_to",
    "check_ends",
    "check_ids",
    "ends_from_sizes",
    "register",
    "unregister",
]
