"""nvFuser: whether it is there. Its backend has an entry point of its own."""

from __future__ import annotations

from ... import plugins
from ..nvfuser import library


@plugins.packages
def packages() -> tuple[plugins.Package, ...]:
    """The packages that this integration needs: nvFuser itself."""
    return (plugins.Package("nvFuser", "nvfuser-cu128-torch210", library.why_missing()),)
