"""Layouts that the library does not have, which backends read by their descriptors alone."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_moe import layouts
from fusion_moe.layouts import Order, Tiled

OWN_LAYOUTS = [
    # scales alone, padded: tiles of 24 rows and 2 columns
    Tiled("turned", scales=Order(rows=(2, 12), columns=(2,), places=(1, 2, 0))),
    # elements too: tiles of 8 rows and 32 columns, in pieces of 16; words of scales, as of sf128x4
    Tiled(
        "pieces",
        scales=Order(rows=(4, 16), columns=(2, 4), places=(2, 1, 0, 3)),
        elements=Order(rows=(2, 4), columns=(2,), places=(2, 1, 0)),
    ),
]


def registered() -> Iterator[None]:
    """A fixture for a module."""
    for layout in OWN_LAYOUTS:
        layouts.register(layout)
    yield
    for layout in OWN_LAYOUTS:
        layouts.unregister(layout.name)
