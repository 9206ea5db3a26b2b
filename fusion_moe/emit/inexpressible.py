"""The error of a backend about one operation that it has no code for."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..ir.core import Op


class Inexpressible(UnsupportedError):
    """An operation that a kernel cannot express; op: the one. A piece is cut there."""

    def __init__(self, op: Op, found: str, *, expected: str = ""):
        super().__init__(found, expected=expected)
        self.op = op
