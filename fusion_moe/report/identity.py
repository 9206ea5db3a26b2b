"""Which regions of a model count as one program: equal operations from equal lines of the user's
program, on equal sizes.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..frontends.regions import Region
from ..ir.text import text


def identity(region: Region) -> Hashable:
    """A key that is equal for regions that the report shows as one fusion."""
    return (
        text(region.fusion),
        tuple(op.source for op in region.fusion.ops),
        tuple(numbers(region).items()),
    )


def numbers(region: Region) -> dict[str, int]:
    """The sizes of this call for the symbols of a region, without those that only the device
    knows.
    """
    found = {}
    for name, source in region.sizes.items():
        val = source.node.meta["val"]
        size = val if source.dim is None else val.shape[source.dim]
        if size.node.has_hint():
            found[name] = int(size.node.hint) // source.by
    return found
