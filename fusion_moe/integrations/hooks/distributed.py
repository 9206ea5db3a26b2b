"""Experts divided between ranks: the operations by which their programs send tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ... import plugins
from ...ir.core import OpKind


@plugins.operations
def operations() -> Sequence[OpKind]:
    """Those of ranks that share memory."""
    from ..distributed.exchange.operations import OPERATIONS

    return OPERATIONS
