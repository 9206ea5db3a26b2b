"""A backend's error about one operation for which it has no code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UnsupportedError
from ..ir import Op


class Inexpressible(UnsupportedError):
    """An operation that a kernel cannot express. op: this operation; a piece is divided there."""

    def __init__(self, op: Op, found: str, *, expected: str = "", todo: str = ""):
        super().__init__(found, expected=expected, todo=todo)
        self.op = op


@contextmanager
def naming(op: Op) -> Iterator[None]:
    """While an operation is written: a refusal that names no operation is attributed to it, or, if
    it is a view, to what reads it.
    """
    try:
        yield
    except Inexpressible:
        raise
    except UnsupportedError as error:
        if op.kind.view:
            raise
        raise Inexpressible(op, error.found, expected=error.expected, todo=error.todo) from error
