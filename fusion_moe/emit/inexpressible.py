"""The error of a backend about one operation that it has no code for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UnsupportedError
from ..ir.core import Op


class Inexpressible(UnsupportedError):
    """An operation that a kernel cannot express; op: the one. A piece is cut there."""

    def __init__(self, op: Op, found: str, *, expected: str = "", todo: str = ""):
        super().__init__(found, expected=expected, todo=todo)
        self.op = op


@contextmanager
def naming(op: Op) -> Iterator[None]:
    """While an operation is written: what is refused without naming one is refused because of it, or of what reads it if it is a view."""
    try:
        yield
    except Inexpressible:
        raise
    except UnsupportedError as error:
        if op.kind.view:
            raise
        raise Inexpressible(op, error.found, expected=error.expected, todo=error.todo) from error
