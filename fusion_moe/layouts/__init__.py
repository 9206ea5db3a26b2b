"""Layouts: the same numbers in another order of bytes, as objects with an inverse. A layout never
changes meaning.

linear    row-major
sf128x4   block scales as compute capability 10.0 reads them
w16x64    weights as the CUDA kernels read them

`Padding` is applied first to weights that are not whole tiles.
"""

from .layout import LINEAR, Layout, Linear, TensorLayout
from .padding import Padding
from .sf128x4 import SF128X4, SF128x4
from .w16x64 import W16X64, W16x64

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (LINEAR, SF128X4, W16X64)}

__all__ = [
    "LAYOUTS",
    "LINEAR",
    "SF128X4",
    "W16X64",
    "Layout",
    "Linear",
    "Padding",
    "SF128x4",
    "TensorLayout",
    "W16x64",
]
